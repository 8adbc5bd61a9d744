"""All benchmarks, one after the other: ``make bench``. Small sizes; each benchmark's own command runs the whole and writes its results."""

from benchmarks.api import load
from benchmarks.cli import startup
from benchmarks.datasets import __main__ as datasets
from benchmarks.evals import harness
from benchmarks.scheduler import campaign
from benchmarks.serving import swap, throughput
from benchmarks.training import effects, memory_cpu, overhead

if __name__ == "__main__":
    datasets.main(["--quick"])
    print("\nwhat each training method changes", flush=True)
    effects.main(["--quick"])
    print("\nmemory of training steps against the estimate", flush=True)
    memory_cpu.main(["--only", "0", "--only", "1"])
    print("\nwhat the training loop costs", flush=True)
    overhead.main(["--quick"])
    print("\nan evaluation of 200 items against lm-evaluation-harness", flush=True)
    harness.main(["--quick"])
    print("\nadapters mixed in one batch", flush=True)
    throughput.main(["--quick"])
    print("\nswaps of adapters under load", flush=True)
    swap.main(["--quick"])
    print("\nwhat a start of ft costs", flush=True)
    startup.main(["--quick"])
    print("\nthe jobs API over a long history", flush=True)
    load.main(["--quick"])
    print("\nthe planned mix under all scheduling policies", flush=True)
    campaign.main(["mix", "--quick"])
