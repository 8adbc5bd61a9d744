"""Each way for a run to end badly leaves its own exit code and evidence, and nothing poisoned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from engine.training.checkpoints import RESUMABLE, step_name, verify_checkpoint
from tests.engine.training.attempts import REPOSITORY, SPEC, job, write_pack
from tests.support.processes import forked_modules


@pytest.mark.parametrize("delay_steps", [0, 60], ids=["at once", "during the imports"])
def test_sigterm_before_the_first_step_is_a_preemption(tmp_path: Path, delay_steps: int) -> None:
    with job(tmp_path) as stopped:
        process = stopped.start(fresh=True)  # its imports are what is interrupted
        beats: list[float] = []
        stopped.wait_until(lambda: bool(stopped.heartbeat()))
        stopped.wait_until(lambda: beats.append(0.0) or len(beats) > delay_steps)  # type: ignore[func-returns-value]
        assert stopped.heartbeat()["phase"] in ("setup", "import")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
        assert (stopped.exit()["outcome"], stopped.exit()["step"]) == ("preempted", 0)


def test_a_rate_that_diverges_ends_before_its_weights_are_saved(tmp_path: Path) -> None:
    optimization = replace(SPEC.optimization, learning_rate=1e30, schedule="constant", warmup_ratio=0.0)
    with job(tmp_path, optimization=optimization, checkpoint=replace(SPEC.checkpoint, every_steps=500)) as diverged:
        assert diverged.train() == 76, diverged.log()
        evidence = diverged.exit()
        assert evidence["outcome"] == "diverged"
        assert "learning_rate (now 1e+30)" in evidence["message"]
        assert evidence["step"] == len(diverged.steps()) < evidence["detail"]["step"]
        assert all(m["loss"] == m["loss"] for m in diverged.steps())
        assert not (diverged.work / "final").exists()
        assert not (diverged.work / "checkpoints").exists()


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    with job(tmp_path) as bad:
        shard = bad.pack / "shard-00000.parquet"
        rows = pq.read_table(shard).to_pylist()
        rows[5]["input_ids"][3] = 999_999
        _rewrite(bad.pack, rows)
        assert bad.train() == 65, bad.log()
        evidence = bad.exit()
        assert evidence["message"] == "train window 5 holds token 999999, but the vocabulary ends at 259"
        assert evidence["detail"]["row"] == 5


def test_boundaries_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with job(tmp_path) as bad:
        rows = pq.read_table(bad.pack / "shard-00000.parquet").to_pylist()
        rows[2]["seq_lengths"][0] += 1
        _rewrite(bad.pack, rows)
        assert bad.train() == 65, bad.log()
        assert bad.exit()["message"] == "train window 2 has seq_lengths that do not add up to its tokens"


def test_a_shard_that_is_not_the_one_packed_is_the_platforms_fault(tmp_path: Path) -> None:
    with job(tmp_path) as damaged:
        with (damaged.pack / "shard-00000.parquet").open("ab") as f:
            f.write(b"x")
        assert damaged.train() == 70, damaged.log()
        assert "shard-00000.parquet has digest" in damaged.exit()["message"]


def test_a_missing_base_model_is_named_as_such(tmp_path: Path) -> None:
    with job(tmp_path) as missing:
        (missing.base / "config.json").unlink()
        assert missing.train() == 70, missing.log()
        assert missing.exit()["detail"]["code"] == "base_model_unavailable"


def test_a_spec_for_more_ranks_than_were_started_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, world_size=2, strategy="ddp") as wrong:
        assert wrong.train() == 64, wrong.log()
        assert wrong.exit()["outcome"] == "bad_spec"


def test_a_run_file_that_cannot_be_read_is_a_bad_spec(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"spec": {}}')
    command = [sys.executable, "-m", "engine.training.runtime", str(tmp_path / "run.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 64
    assert "missing ['adapter'" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the kernel knows of a process")
def test_a_forked_module_finds_what_a_fresh_one_does(tmp_path: Path) -> None:
    """Most attempts of the tests are forked; these are the things that the training process and its supervisors rely on."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "LC_ALL": "C.UTF-8", "GREETING": "hello"}
    command = [sys.executable, "-m", "tests.support.processes.process_environment", "65", "two words"]
    with (tmp_path / "log").open("wb") as log:
        fresh = subprocess.run(command, env=env, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, check=False)
    expected = sorted((tmp_path / "log").read_text().splitlines())  # when what is printed gets there is not compared
    forked = forked_modules.start(
        "tests.support.processes.process_environment", ["65", "two words"], env=env, cwd=tmp_path, log=tmp_path / "log"
    )
    assert fresh.returncode == forked.wait(timeout=120) == forked.poll() == 65
    assert sorted((tmp_path / "log").read_text().splitlines()) == expected
    error, found = expected
    assert error == "and this is an error" and json.loads(found)["environment"]["GREETING"] == "hello"


@pytest.mark.slow
def test_sigterm_during_a_validation_commits_the_step_before_it(tmp_path: Path) -> None:
    with job(tmp_path) as stopped:
        write_pack(stopped.pack, validation=100)
        process = stopped.start()
        stopped.wait_until(lambda: stopped.heartbeat().get("phase") == "save")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=25) == 75
        assert len(stopped.steps()) == stopped.exit()["step"] == stopped.exit()["detail"]["committed_step"] == 3
        assert not [m for m in stopped.metrics() if "eval_loss" in m]
        verify_checkpoint(stopped.work / "checkpoints" / step_name(3), required=RESUMABLE)


def _rewrite(pack: Path, rows: list[dict[str, list[int]]]) -> None:
    from tests.engine.training.attempts import _write_shard

    body = json.loads((pack / "manifest.json").read_text())
    body |= _write_shard(pack / "shard-00000.parquet", rows)
    (pack / "manifest.json").write_text(json.dumps(body))
