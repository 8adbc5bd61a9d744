"""All benchmarks, one after the other: ``make bench``."""

from benchmarks import datasets

if __name__ == "__main__":
    datasets.main()
