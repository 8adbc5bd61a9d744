"""Ranks under torchrun: a stop reaches them, they end with it, and nothing listens on another address than theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agent.process_group import ONE_NODE, training_command
from engine.training.failures import ExitEvidence, Outcome
from resources.launcher.local_processes import REPOSITORY
from tests.engine.training.attempts import job
from tests.support.jobs.followed_jobs import until
from tests.support.processes.stack import free_port


def torchrun(ranks: int, module: str = "engine.training.runtime", *, node: int = 0, leader: str = "") -> tuple[str, ...]:
    """The module and the arguments with which an agent starts `ranks` ranks, of one node or, with a `leader`, of one of two."""
    command = training_command(module, Path("run.json"), num_processes=ranks, node=node, num_nodes=2 if leader else 1, leader=leader)
    return tuple(command[2:-1])


def listening(process: psutil.Process) -> set[str]:
    family = [process, *process.children(recursive=True)]
    return {connection.laddr.ip for each in family for connection in each.net_connections() if connection.status == psutil.CONN_LISTEN}


MEET = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(sys.argv[1] + os.environ["RANK"], "w").write(str(total.item()))
while not os.path.exists(sys.argv[1] + "go"):
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("leader", "address"), [("", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")], ids=["one node", "two nodes"])
def test_ranks_meet_at_an_address_of_their_own(tmp_path: Path, leader: str, address: str) -> None:
    """Whoever reaches the store of a training can write what its ranks read."""
    (tmp_path / "meet.py").write_text(MEET)
    found = f"{leader}:{free_port()}" if leader else ""
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", *torchrun(2, "meet", node=node, leader=found), f"{tmp_path}/"],
            env={**os.environ, **ONE_NODE, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        )
        for node in range(2 if leader else 1)
    ]
    try:
        ranks = range(2 * len(nodes))
        until(lambda: all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in ranks), timeout_s=90)
        assert {(tmp_path / str(rank)).read_text() for rank in ranks} == {str(float(len(ranks)))}
        seen = [listening(psutil.Process(node.pid)) for node in nodes]
        assert address in seen[0], "its store listens"
        assert set[str]().union(*seen) <= {address, "127.0.0.1"}
    finally:
        (tmp_path / "go").touch()
        codes = [node.wait(timeout=60) for node in nodes]
    assert codes == [0] * len(nodes)


def test_one_rank_alone_needs_no_launcher() -> None:
    assert torchrun(1) == ("engine.training.runtime",)


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
    with job(tmp_path, world_size=2, strategy="ddp") as single:
        agent = single.start(module=torchrun(2))
        single.wait_until(lambda: len(single.steps()) >= 1, timeout_s=90)
        ranks = [p for p in psutil.Process(agent.pid).children() if "engine.training.runtime" in p.cmdline()]
        assert len(ranks) == 2
        agent.kill()
        agent.wait(timeout=60)
        psutil.wait_procs(ranks, timeout=60)
        assert all(not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE for rank in ranks)
        assert not (single.work / "exit-a1.json").exists(), "a killed rank has no time for a word"
