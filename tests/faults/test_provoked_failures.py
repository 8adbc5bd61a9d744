"""Failures that really happen to a real training process, and what the platform makes of each: class, owner, remedy."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from core.errors import Fault
from engine.training.checkpoints import committed_checkpoints
from engine.training.failures import Evidence, ExitEvidence, FailureClass, PastAttempt, Retry, classify_failure, with_half_batch
from tests.engine.training.attempts import SPEC, Job, job, write_pack
from tests.engine.training.runtime.parallel.test_torchrun import torchrun
from tests.engine.training.runtime.test_endings import _rewrite

UNUSED_TOKEN = 258
"""No window of the tests' packs holds it."""


def judged(training: Job, code: int, history: tuple[PastAttempt, ...] = ()) -> FailureClass:
    """What the platform makes of the end of the newest attempt."""
    newest = committed_checkpoints(training.work / "checkpoints")
    step = int(newest[-1].name.removeprefix("step-")) if newest else 0
    reached = max((m["step"] for m in training.steps()), default=0)
    found = classify_failure(
        Evidence(
            phase="exited",
            exit=ExitEvidence.read(training.work, training.attempts),
            exit_code=code,
            committed_step=step,
            last_step=reached,
            history=history,
            spec=training.spec,
        )
    )
    assert found is not None
    return found


def test_one_row_that_gives_no_number_is_named_and_nothing_else_is_blamed(tmp_path: Path) -> None:
    with job(tmp_path) as poisoned:
        weights = load_file(poisoned.base / "model.safetensors")
        weights["model.embed_tokens.weight"][UNUSED_TOKEN] = np.inf
        save_file(weights, poisoned.base / "model.safetensors", metadata={"format": "pt"})
        rows = pq.read_table(poisoned.pack / "shard-00000.parquet").to_pylist()
        rows[15]["input_ids"][4] = UNUSED_TOKEN
        _rewrite(poisoned.pack, rows)
        found = judged(poisoned, poisoned.train())
        assert (found.code, found.fault, found.retry) == ("bad_example", Fault.USER, Retry.NEVER), poisoned.log()
        assert "train window 15 alone gives a loss that is not finite" in found.message
        assert "remove the named row" in found.remedy
        assert poisoned.exit()["detail"]["row"] == 15
        assert all(m["loss"] == m["loss"] for m in poisoned.steps())


def test_a_rate_that_explodes_is_the_users_and_leaves_no_weights(tmp_path: Path) -> None:
    optimization = replace(SPEC.optimization, learning_rate=1e30, schedule="constant", warmup_ratio=0.0)
    with job(tmp_path, optimization=optimization, checkpoint=replace(SPEC.checkpoint, every_steps=500)) as exploded:
        found = judged(exploded, exploded.train())
        assert (found.code, found.fault, found.retry) == ("diverged", Fault.USER, Retry.NEVER), exploded.log()
        assert "learning_rate" in found.message and "to a third" in found.remedy
        assert not (exploded.work / "final").exists() and not committed_checkpoints(exploded.work / "checkpoints")


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json", "cut short"])
def test_a_base_model_that_lost_a_file_is_the_operators(tmp_path: Path, damage: str) -> None:
    with job(tmp_path) as bare:
        if damage == "cut short":
            os.truncate(bare.base / "model.safetensors", 100_000)
        else:
            (bare.base / damage).unlink()
        found = judged(bare, bare.train())
        assert (found.code, found.fault, found.retry) == ("base_model_unavailable", Fault.PLATFORM, Retry.RESUME), bare.log()
        assert "an operator must restore the base model" in found.remedy


@pytest.mark.slow
def test_a_job_that_always_breaks_is_a_dead_letter_after_three(tmp_path: Path) -> None:
    with job(tmp_path) as broken:
        with (broken.pack / "shard-00000.parquet").open("ab") as f:
            f.write(b"x")
        codes, history = [], ()
        while len(codes) < 4 and "dead_letter" not in codes:
            found = judged(broken, broken.train(), history)
            history = (*history, PastAttempt(code=found.code, committed_step=0, last_step=0))
            codes.append(found.code)
        assert codes == ["internal", "internal", "dead_letter"]
        assert found.retry is Retry.NEVER and "operators look at its attempts" in found.remedy


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_batch_that_does_not_fit_is_halved_and_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what a step frees goes back, so that the next one asks for it again
    optimization = replace(SPEC.optimization, per_device_batch_size=24, accumulation_steps=1, num_epochs=10)
    spec = {"optimization": optimization, "max_seq_len": 512, "lora": replace(SPEC.lora, dropout=0.0)}
    with job(tmp_path, **spec, checkpoint=replace(SPEC.checkpoint, every_steps=1)) as tight:
        write_pack(tight.pack, num_windows=24, length=512, validation=0)
        rows = pq.read_table(tight.pack / "shard-00000.parquet").to_pylist()
        for row in rows:  # windows of two examples fill the length: no micro-batch is smaller than another
            row["input_ids"] = [n % 250 for n in range(512)]
            row["labels"], row["seq_lengths"] = row["input_ids"], [200, 312]
        _rewrite(tight.pack, rows)
        limited = ("tests.faults.limited_memory",)
        code = tight.start(module=limited, fresh=True).wait(timeout=280)
        found = judged(tight, code)
        assert (code, found.code, found.retry) == (77, "oom", Retry.HALVE_BATCH), tight.log()
        assert found.fault is Fault.AMBIGUOUS and "half the micro-batch" in found.remedy
        at = committed_checkpoints(tight.work / "checkpoints")[-1].name
        halved = with_half_batch(tight.spec)
        assert halved is not None and halved.optimization.global_batch_size(1) == optimization.global_batch_size(1)
        tight.spec = halved
        assert tight.start(module=limited, fresh=True).wait(timeout=280) == 0, tight.log()
        assert tight.exit()["detail"]["resumed_from"] == at
        assert [m["step"] for m in tight.steps()] == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "agent"])
def test_kill_9_of_one_of_two_ranks_or_of_their_agent_is_a_lost_node(tmp_path: Path, victim: str) -> None:
    with job(tmp_path, world_size=2, strategy="ddp") as pair:
        agent = pair.start(module=torchrun(2))
        pair.wait_until(lambda: len(pair.steps()) >= 4, timeout_s=90)
        children = [p for p in psutil.Process(agent.pid).children() if "engine.training.runtime" in p.cmdline()]
        ranks = {int(p.environ()["RANK"]): p for p in children}
        os.kill(agent.pid if victim == "agent" else ranks[int(victim[-1])].pid, signal.SIGKILL)
        code = agent.wait(timeout=60)
        psutil.wait_procs(children, timeout=60)
        assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        found = judged(pair, code)
        assert (found.code, found.fault, found.retry) == ("node_lost", Fault.PLATFORM, Retry.RESUME), (found, pair.log())
        assert pair.start(module=torchrun(2)).wait(timeout=120) == 0, pair.log()
        assert [m["step"] for m in pair.steps()] == list(range(1, 9))
