"""Started by torchrun: one rank is the same run, and a stop reaches the ranks behind the agent."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from ft_assets.training.checkpoints import ADAPTER
from ft_assets.training.failures import ExitEvidence, Outcome
from tests.ft_assets.training.attempts import job


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "ft_assets.training.runtime")


@pytest.mark.slow
def test_one_rank_under_torchrun_trains_the_same_bytes_as_plain_python(tmp_path: Path) -> None:
    with job(tmp_path / "plain") as plain, job(tmp_path / "torchrun") as ranked:
        assert plain.train() == 0, plain.log()
        assert ranked.start(module=torchrun(1)).wait(timeout=120) == 0, ranked.log()
        for name in ADAPTER:
            assert (ranked.work / "final" / name).read_bytes() == (plain.work / "final" / name).read_bytes()


@pytest.mark.slow
def test_two_ranks_stop_together_and_resume_together(tmp_path: Path) -> None:
    with job(tmp_path, world_size=2, strategy="ddp") as pair:
        agent = pair.start(module=torchrun(2))
        pair.wait_until(lambda: len(pair.steps()) >= 2, timeout_s=90)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(timeout=30) != 0
        evidence = ExitEvidence.read(pair.work, 1)
        assert evidence is not None and evidence.outcome is Outcome.PREEMPTED
        assert evidence.detail["committed_step"] == evidence.step >= 2

        assert pair.start(module=torchrun(2)).wait(timeout=120) == 0, pair.log()
        assert [m["step"] for m in pair.steps()] == list(range(1, 9))


@pytest.mark.slow
def test_a_rank_does_not_outlive_its_agent(tmp_path: Path) -> None:
    """The agent starts ranks in sessions of their own; one that lived on would write beside the next attempt."""
    with job(tmp_path) as single:
        agent = single.start(module=torchrun(1))
        single.wait_until(lambda: len(single.steps()) >= 1, timeout_s=90)
        (rank,) = [p for p in psutil.Process(agent.pid).children() if "ft_assets.training.runtime" in p.cmdline()]
        agent.kill()
        agent.wait(timeout=60)
        psutil.wait_procs([rank], timeout=60)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        assert not (single.work / "exit-a1.json").exists(), "a killed rank has no time for a word"
