"""Two real ranks: each way of sharing a model is what it says, gives the losses of one process, and goes on where another stopped."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from engine.training.checkpoints import committed_checkpoints, step_name
from engine.training.data_order import DataOrder
from engine.training.failures import ExitEvidence, Outcome
from tests.engine.training.attempts import RUNTIME, SPEC, Job, job
from tests.engine.training.runtime.parallel import small_slices
from tests.engine.training.runtime.parallel.test_torchrun import torchrun
from tests.engine.training.runtime.test_endings import _rewrite

FULL: dict[str, Any] = {"adapter": "full", "lora": None}
COMPILES = pytest.mark.timeout(600)
"""DeepSpeed compiles an operator on its first use, which takes minutes on a busy machine."""
ZERO = [pytest.param(name, marks=[pytest.mark.slow, COMPILES]) for name in ("zero1", "zero2", "zero3")]
TOLERANCE = 1e-4
"""C8 for another world size; summing in another order moves float32 losses by some 1e-7."""
SMALL_SLICES = "tests.engine.training.runtime.parallel.small_slices"


def shared(strategy: str, **changes: Any) -> dict[str, Any]:
    """The tests' spec over two ranks: the global batch stays."""
    return {"strategy": strategy, "world_size": 2, "optimization": replace(SPEC.optimization, accumulation_steps=1), **changes}


def losses(made: Job) -> list[float]:
    return [m["loss"] for m in made.steps()]


def run_ranks(made: Job, *, module: str = RUNTIME) -> None:
    """Train to the end; several ranks without torchrun's agent, except under DeepSpeed, which the fork server hides."""
    ranks = made.spec.world_size
    if ranks == 1 or made.spec.strategy.startswith("zero"):
        started = [made.start(module=torchrun(ranks, module))]
    else:
        started = made.start_ranks(module=module)
    assert [process.wait(timeout=300) for process in started] == [0] * len(started), made.log()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one process, for an adapter and for full parameters."""
    found = {}
    for name, changes in (("lora", {}), ("full", FULL)):
        with job(tmp_path_factory.mktemp(name), **changes) as single:
            run_ranks(single)
            found[name] = losses(single)
    return found


def assert_is_what_it_says(strategy: str, evidence: dict[str, Any]) -> None:
    assert evidence["strategy"] == strategy
    if strategy == "ddp":
        assert evidence["wrapped"] == "DistributedDataParallel"
        return
    assert evidence["optimizer_elements"] * 2 == pytest.approx(evidence["optimizer_elements_whole"], rel=0.05), "state is in halves"
    if strategy in ("fsdp2", "zero3"):
        assert evidence["sharded_parameters"] > 0
        assert evidence["local_elements"] * 2 == pytest.approx(evidence["elements"], rel=0.05), "parameters are in halves"
    if strategy == "fsdp2":
        assert evidence["sharded_parameters"] == evidence["parameters"], "every parameter is a DTensor"
    if strategy.startswith("zero"):
        assert (evidence["wrapped"], f"zero{evidence['stage']}") == ("DeepSpeedEngine", strategy)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2", *ZERO])
@pytest.mark.parametrize("adapter", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_two_ranks_are_what_they_say_and_give_the_losses_of_one(
    strategy: str, adapter: str, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    with job(tmp_path, **shared(strategy, **(FULL if adapter == "full" else {}))) as pair:
        run_ranks(pair)
        assert_is_what_it_says(strategy, pair.exit()["detail"]["strategy"])
        assert losses(pair) == pytest.approx(alone[adapter], abs=TOLERANCE)


assert SPEC.lora is not None
OTHER_RATES = {"layer_lr_decay": 0.8, "min_lr_ratio": 0.2, "weight_decay": 0.1, "adam_betas": (0.8, 0.95)}
OTHER: dict[str, dict[str, Any]] = {
    "adapter": {"optimization": replace(SPEC.optimization, **OTHER_RATES, loraplus_lr_ratio=4.0)},
    "full": {"optimization": replace(SPEC.optimization, **OTHER_RATES), **FULL},
    "noise": {"optimization": replace(SPEC.optimization, neftune_noise_alpha=5.0, per_device_batch_size=1, accumulation_steps=4)},
    "dora": {"lora": replace(SPEC.lora, use_dora=True, dropout=0.0)},
    "pissa": {"lora": replace(SPEC.lora, init_lora_weights="pissa_niter_4", dropout=0.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        *((options, strategy) for options in ("adapter", "full") for strategy in ("ddp", "fsdp2")),
        *(pytest.param(options, "zero2", marks=COMPILES) for options in ("adapter", "full")),
        *(pytest.param(options, "zero3", marks=COMPILES) for options in ("adapter", "full")),
        ("noise", "ddp"), ("noise", "fsdp2"), pytest.param("noise", "zero3", marks=COMPILES), ("dora", "ddp"), ("pissa", "ddp"),
    ],
)  # fmt: skip
def test_rates_of_their_own_noise_and_other_adapters_are_on_two_ranks_those_of_one(options: str, strategy: str, tmp_path: Path) -> None:
    alone = {"lora": replace(SPEC.lora, dropout=0.0)} | OTHER[options] if options != "full" else OTHER[options]
    opt = alone.get("optimization", SPEC.optimization)
    halved = replace(opt, accumulation_steps=opt.accumulation_steps // 2)
    with job(tmp_path / "single", **alone) as single, job(tmp_path / "pair", **alone | shared(strategy, optimization=halved)) as pair:
        run_ranks(single)
        run_ranks(pair)
        assert losses(pair) == pytest.approx(losses(single), abs=TOLERANCE)
        rates = [[m["learning_rate"] for m in made.steps()] for made in (single, pair)]
        assert rates[0] == rates[1]


@pytest.mark.slow
def test_two_ranks_with_two_micro_batches_each_drop_out_what_one_with_four_drops_out(tmp_path: Path) -> None:
    four = replace(SPEC.optimization, num_epochs=0.5, per_device_batch_size=1, accumulation_steps=4)
    much = replace(SPEC.lora, dropout=0.5)
    with job(tmp_path / "single", optimization=four, lora=much) as single:
        run_ranks(single)
    with job(tmp_path / "pair", **shared("fsdp2", optimization=replace(four, accumulation_steps=2), lora=much)) as pair:
        run_ranks(pair)
    assert losses(pair) == pytest.approx(losses(single), abs=TOLERANCE)


@pytest.mark.slow
@COMPILES
def test_a_compilation_that_was_killed_does_not_stop_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch marks a compilation with a file and waits for as long as it is there; a killed one leaves it behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    left = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    with job(tmp_path / "pair", **shared("zero1")) as pair:
        run_ranks(pair)
    assert not left.exists()
    assert (left.parent / "deepspeed_shm_comm.so").exists()


def label_unequally(made: Job) -> list[int]:
    """Leave every third window with the label of its last token alone; labelled tokens of each window."""
    rows = pq.read_table(made.pack / "shard-00000.parquet").to_pylist()
    for row in rows[::3]:
        row["labels"] = [-100] * (len(row["labels"]) - 1) + row["labels"][-1:]
    _rewrite(made.pack, rows)
    return [sum(label != -100 for label in row["labels"]) for row in rows]


def slices(made: Job, labelled: list[int]) -> list[tuple[int, ...]]:
    """For each step, how many slices the micro-batch of each rank is scored in."""
    opt, ranks = made.spec.optimization, made.spec.world_size
    order = DataOrder(
        shard_rows=(len(labelled),),
        seed=made.spec.seed,
        per_device_batch_size=opt.per_device_batch_size,
        accumulation_steps=1,
        world_size=ranks,
    )
    steps = opt.total_steps(num_rows=len(labelled), world_size=ranks)
    return [
        tuple(math.ceil(sum(labelled[r] for r in order.micro_batch(s, 0, rank)) / small_slices.ROWS) for rank in range(ranks))
        for s in range(steps)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_ranks_with_unequal_numbers_of_labels_stay_together_and_give_the_losses_of_one(strategy: str, adapter: str, tmp_path: Path) -> None:
    """Each slice of logits gathers the output layer that ZeRO-3 splits: ranks with different numbers of slices would fail or hang."""
    changes = FULL if adapter == "full" else {}
    with job(tmp_path / "pair", **shared(strategy, **changes)) as pair, job(tmp_path / "single", **changes) as single:
        label_unequally(single)
        counts = slices(pair, label_unequally(pair))
        assert any(1 in step and max(step) > 1 for step in counts), "one rank scores at once, the other in slices"
        assert len({max(step) for step in counts}) > 2, "not the same number in every step"
        run_ranks(single)
        run_ranks(pair, module=SMALL_SLICES)
        assert losses(pair) == pytest.approx(losses(single), abs=TOLERANCE)


def stop_after(made: Job, steps: int) -> int:
    """Start, send SIGTERM to torchrun (or the process) after `steps`; the step that is committed."""
    ranks = made.spec.world_size
    process = made.start(module=torchrun(ranks))
    made.wait_until(lambda: len(made.steps()) >= steps, timeout_s=120)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=40) != 0
    evidence = ExitEvidence.read(made.work, made.attempts)
    assert evidence is not None and evidence.outcome is Outcome.PREEMPTED, made.log()
    assert committed_checkpoints(made.work / "checkpoints")[-1].name == step_name(evidence.step)
    return evidence.step


LONG = replace(SPEC.optimization, num_epochs=12)


@pytest.fixture(scope="module")
def long_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with job(tmp_path_factory.mktemp("long"), optimization=LONG) as single:
        run_ranks(single)
        yield single


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *ZERO])
def test_what_two_ranks_began_one_goes_on_with_in_the_same_order(strategy: str, long_alone: Job, tmp_path: Path) -> None:
    with job(tmp_path, **shared(strategy, optimization=replace(LONG, accumulation_steps=1))) as pair:
        step = stop_after(pair, 5)
        pair.spec = replace(pair.spec, strategy="single", world_size=1, optimization=LONG)
        run_ranks(pair)
        assert pair.exit()["detail"]["resumed_from"] == step_name(step)
        assert [m["step"] for m in pair.steps()] == [m["step"] for m in long_alone.steps()]
        assert [m["num_tokens"] for m in pair.steps()] == [m["num_tokens"] for m in long_alone.steps()]
        assert losses(pair) == pytest.approx(losses(long_alone), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero2", marks=COMPILES), pytest.param("zero3", marks=COMPILES)])
def test_matrices_with_rates_of_their_own_go_on_alone(strategy: str, tmp_path: Path) -> None:
    opt = replace(LONG, **OTHER_RATES, loraplus_lr_ratio=4.0)
    with job(tmp_path / "single", optimization=opt) as single:
        run_ranks(single)
    with job(tmp_path / "pair", **shared(strategy, optimization=replace(opt, accumulation_steps=1))) as pair:
        step = stop_after(pair, 5)
        pair.spec = replace(pair.spec, strategy="single", world_size=1, optimization=opt)
        run_ranks(pair)
        assert pair.exit()["detail"]["resumed_from"] == step_name(step)
        assert losses(pair) == pytest.approx(losses(single), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *ZERO])
def test_what_one_began_two_go_on_with(strategy: str, long_alone: Job, tmp_path: Path) -> None:
    with job(tmp_path, optimization=LONG) as grown:
        step = stop_after(grown, 5)
        grown.spec = replace(grown.spec, **shared(strategy, optimization=replace(LONG, accumulation_steps=1)))
        run_ranks(grown)
        assert grown.exit()["detail"]["resumed_from"] == step_name(step)
        assert losses(grown) == pytest.approx(losses(long_alone), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *ZERO])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_two_ranks_that_were_stopped_are_two_that_never_were(strategy: str, adapter: str, tmp_path: Path) -> None:
    changes = shared(strategy, optimization=replace(LONG, accumulation_steps=1), **(FULL if adapter == "full" else {}))
    with job(tmp_path / "reference", **changes) as reference, job(tmp_path / "stopped", **changes) as stopped:
        run_ranks(reference)
        stop_after(stopped, 5)
        run_ranks(stopped)
        assert losses(stopped) == losses(reference)
        name = "model.safetensors" if adapter == "full" else "adapter_model.safetensors"
        assert (stopped.work / "final" / name).read_bytes() == (reference.work / "final" / name).read_bytes()


@pytest.mark.slow
def test_full_parameters_in_parts_go_on_on_more_ranks(tmp_path: Path) -> None:
    """What each rank of FSDP2 wrote of a whole model is cut anew for another number of them."""
    with job(tmp_path / "reference", **FULL, optimization=LONG) as reference:
        run_ranks(reference)
    halves = shared("fsdp2", **FULL, optimization=replace(LONG, accumulation_steps=1))
    with job(tmp_path / "grown", **halves) as grown:
        step = stop_after(grown, 5)
        quarters = replace(LONG, accumulation_steps=1, per_device_batch_size=1)
        grown.spec = replace(grown.spec, world_size=4, optimization=quarters)
        run_ranks(grown)
        assert grown.exit()["detail"]["resumed_from"] == step_name(step)
        assert losses(grown) == pytest.approx(losses(reference), abs=TOLERANCE)
