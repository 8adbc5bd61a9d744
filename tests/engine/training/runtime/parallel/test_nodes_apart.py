"""Two ranks that see no file of one another: each writes and reads in its node's own directory."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the training environment")

from engine.training import checkpoints
from engine.training.checkpoints import committed_checkpoints, merged_manifest, read_manifest, verify_checkpoint
from engine.training.failures import EXIT_CODES, ExitEvidence, Outcome
from engine.training.spec import EarlyStopping
from tests.engine.training.attempts import SPEC, Job, job

FULL: dict[str, Any] = {"adapter": "full", "lora": None}
PAIR = {"world_size": 2, "optimization": replace(SPEC.optimization, accumulation_steps=1)}
STOPS_EARLY = replace(PAIR["optimization"], num_epochs=6, learning_rate=0.05, early_stopping=EarlyStopping(patience=2, min_delta=0.001))  # type: ignore[type-var]
WEIGHTS = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}


def run(made: Job, *, apart: bool) -> None:
    started = made.start_ranks(apart=apart)
    assert [process.wait(timeout=300) for process in started] == [0] * len(started), made.log()


def final(made: Job) -> bytes:
    return (made.work / "final" / WEIGHTS[made.spec.adapter]).read_bytes()


def join(made: Job, name: str) -> None:
    """Do what the agents do: the first node gets the checkpoint whole, the other keeps nothing."""
    parts = [made.work_of(node) / "checkpoints" / name for node in range(2)]
    whole = merged_manifest([read_manifest(part) for part in parts])
    draft = checkpoints.begin(parts[0])
    for part in parts:
        shutil.copytree(part, draft, dirs_exist_ok=True)
    checkpoints.place(draft, parts[0], whole)
    shutil.rmtree(made.work_of(1))


@pytest.fixture(scope="module", params=["lora", pytest.param("full", marks=pytest.mark.slow)])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """FSDP2 on one node."""
    changes = FULL if request.param == "full" else {}
    with job(tmp_path_factory.mktemp("together"), strategy="fsdp2", **PAIR, **changes) as made:
        run(made, apart=False)
        yield made


def test_ranks_apart_train_the_bytes_of_ranks_together_and_go_on_from_what_the_first_node_has(together: Job, tmp_path: Path) -> None:
    with job(tmp_path, strategy="fsdp2", **PAIR, **({} if together.spec.lora else FULL)) as made:
        run(made, apart=True)
        assert final(made) == final(together)
        sharded = together.spec.adapter == "full"
        saved = [[*committed_checkpoints(made.work_of(node) / "checkpoints")] for node in range(2)]
        assert [path.name for path in saved[1]] == ([path.name for path in saved[0]] if sharded else [])
        assert not (made.work_of(1) / "final").exists() and not [*made.work_of(1).glob(".tmp*")]

        first = saved[0][0]
        shutil.rmtree(made.work / "final")
        checkpoints.set_aside_newer(first.parent, read_manifest(first).step)
        if sharded:
            assert {read_manifest(path).num_nodes for path in (first, saved[1][0])} == {2}
            join(made, first.name)
        run(made, apart=True)
        assert made.exit()["detail"]["resumed_from"] == first.name
        assert verify_checkpoint(made.work_of(1) / "checkpoints" / first.name).num_nodes == 1, "the other node got it"
        assert final(made) == final(together)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "changes"), [("ddp", {}), ("fsdp2", FULL)], ids=["ddp", "fsdp2"])
def test_the_best_weights_are_brought_to_every_node_when_training_stops_early(
    strategy: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    fields = {**PAIR, "strategy": strategy, "optimization": STOPS_EARLY, **changes}
    with job(tmp_path / "together", **fields) as one, job(tmp_path / "apart", **fields) as two:
        run(one, apart=False)
        run(two, apart=True)
        kept = [made.exit()["detail"] for made in (one, two)]
        assert kept[0]["ended_early"] and kept[0]["kept_step"] == kept[0]["best_step"] < one.steps()[-1]["step"]
        assert kept[1]["kept_step"] == kept[0]["kept_step"]
        assert final(two) == final(one)


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_on_the_first_node_is_not_used_on_any(tmp_path: Path) -> None:
    with job(tmp_path, strategy="fsdp2", **PAIR, **FULL) as made:
        run(made, apart=True)
        whole = final(made)
        newest = committed_checkpoints(made.work / "checkpoints")[-1]
        join(made, newest.name)
        (newest / "distributed" / "__1_0.distcp").write_bytes(b"torn")
        run(made, apart=True)
        assert made.exit()["detail"]["resumed_from"] is None, "those before are parts"
        assert final(made) == whole


@pytest.mark.parametrize(("strategy", "changes"), [("ddp", {}), ("fsdp2", FULL)], ids=["ddp", "fsdp2"])
def test_a_stop_of_one_node_stops_both_after_the_same_step_and_each_says_so(strategy: str, changes: dict[str, Any], tmp_path: Path) -> None:
    fields = {**PAIR, "strategy": strategy, "optimization": replace(PAIR["optimization"], num_epochs=40), **changes}  # type: ignore[type-var]
    with job(tmp_path, **fields) as made:
        ranks = made.start_ranks(apart=True)
        made.wait_until(lambda: len(made.steps()) >= 3, timeout_s=120.0)
        ranks[1].send_signal(signal.SIGTERM)
        assert [rank.wait(timeout=60) for rank in ranks] == [EXIT_CODES[Outcome.PREEMPTED]] * 2, made.log()
        told = [ExitEvidence.read(made.work_of(node), 1) for node in range(2)]
        assert told[0] is not None and told[1] is not None
        assert (told[0].outcome, told[1].outcome) == (Outcome.PREEMPTED, Outcome.PREEMPTED)
        assert told[0].step == told[1].step >= 3
        newest = [committed_checkpoints(made.work_of(node) / "checkpoints")[-1:] for node in range(2)]
        saved = [read_manifest(path).step for paths in newest for path in paths]
        assert saved == [told[0].step] * (2 if checkpoints.is_sharded(made.spec) else 1)
