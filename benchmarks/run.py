"""All benchmarks, one after the other: ``make bench``. Small sizes; each benchmark's own command runs the whole and writes its results."""

from benchmarks.datasets import __main__ as datasets

if __name__ == "__main__":
    datasets.main(["--quick"])
