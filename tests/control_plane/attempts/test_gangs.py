"""Gangs of two nodes, each with an agent and a directory of its own, that run the scripted training: how they meet, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agent.messages import Exit, Heartbeat
from control_plane.attempts import agents
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase
from core.errors import InvalidRequest
from core.workload import NODE, VARIABLE
from tests.support.jobs.followed_jobs import Job, plain_weights, until
from tests.support.processes.scripted_training import Scenario

TWO_NODES = "pools: [{name: local, gpu_type: local, nodes: [{count: 2, gpus: 1}]}]"


@pytest.fixture
def gang(new_job: Callable[..., Job], tmp_path: Path) -> Job:
    pools = tmp_path / "pools.yaml"
    pools.write_text(TWO_NODES)
    return new_job(env={"pools": str(pools)}, strategy="ddp", world_size=2)


def node_dir(job: Job, node: int) -> Path:
    """Directory of the job on a node."""
    root = job.platform.settings.work_dir
    return (root if node == 0 else root / "nodes" / str(node)) / "jobs" / job.id


def play(job: Job, *scenarios: Scenario) -> None:
    """What the training process of each node does."""
    for node, scenario in enumerate(scenarios):
        scenario.write(node_dir(job, node))


def agent_of(workload: str, node: int) -> psutil.Process:
    for process in psutil.process_iter(["environ"]):
        env = process.info["environ"] or {}
        if workload in env.get(VARIABLE, "") and env.get(NODE) == str(node) and process.status() != psutil.STATUS_ZOMBIE:
            return process
    raise AssertionError(f"{workload} has no agent on node {node}")


def at_step(job: Job, step: int) -> Callable[[], bool]:
    return lambda: (jobs.get(job.platform, job.tenant, job.id).job.step or 0) >= step


def test_each_node_has_an_agent_and_a_gpu_of_its_own_and_the_first_one_reports(gang: Job) -> None:
    play(gang, Scenario(steps=6), Scenario(steps=6, says="unseen"))
    assert gang.run() is JobState.EVALUATING
    assert gang.weights() == plain_weights(6)
    assert [event.data["step"] for event in gang.events("metrics")] == list(range(1, 7)), "one node reports"
    for node in range(2):
        assert (node_dir(gang, node) / "exit-a1.json").exists()
        assert (node_dir(gang, node) / "inputs-a1/pack_dir/manifest.json").exists()
    assert not (node_dir(gang, 0).parents[1] / "inputs").samefile(node_dir(gang, 1).parents[1] / "inputs")


def test_the_leaders_address_is_told_once_every_node_can_start(gang: Job) -> None:
    held = gang.claim()
    token = agents.introduce(gang.platform, held, may_read=[])

    def beat(node: int, number: int, **fields: object) -> str:
        return agents.heartbeat(gang.platform, token, Heartbeat(node=node, number=number, **fields)).leader  # type: ignore[arg-type]

    assert beat(0, 1, address="10.0.0.1:4711") == ""
    assert beat(1, 1) == "", "it still fetches its inputs"
    assert beat(1, 2, address="10.0.0.2:4712") == "10.0.0.1:4711"
    assert beat(0, 2, address="10.0.0.1:4711") == "10.0.0.1:4711"
    with pytest.raises(InvalidRequest, match="2 nodes, and no node 2"):
        beat(2, 1)


def test_a_node_that_fails_ends_the_others_and_one_that_succeeds_does_not(gang: Job) -> None:
    held = gang.claim()
    token = agents.introduce(gang.platform, held, may_read=[])
    done = Exit(exit_code=0, evidence={"outcome": "succeeded", "step": 6, "total_steps": 6, "message": ""}, stop_reason=None)
    agents.heartbeat(gang.platform, token, Heartbeat(node=1, number=1, exit=done))
    answer = agents.heartbeat(gang.platform, token, Heartbeat(node=0, number=1))
    assert (answer.peer_failed, answer.alone) == (False, True)
    agents.heartbeat(
        gang.platform,
        token,
        Heartbeat(node=1, number=2, exit=replace(done, exit_code=1, evidence=None)),
    )
    assert agents.heartbeat(gang.platform, token, Heartbeat(node=0, number=2)).peer_failed


def test_a_stop_reaches_every_node(gang: Job) -> None:
    play(gang, Scenario(steps=9, hold_at=3), Scenario(steps=9, hold_at=3))
    held, thread, endings = gang.following(Scenario(steps=9, every=100, hold_at=3))
    until(at_step(gang, 3))
    jobs.pause(gang.platform, gang.tenant, gang.id)
    thread.join(120)
    assert endings[0].outcome == "paused"
    assert len(gang.steps()) == 1
    assert gang.launcher.get(held.workload).phase is WorkloadPhase.EXITED
    assert all((node_dir(gang, node) / "exit-a1.json").exists() for node in range(2))


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_agent_that_dies_takes_the_gang_along_and_the_job_goes_on(gang: Job, node: int, signum: signal.Signals) -> None:
    waits = Scenario(steps=6, hold_at=3)
    play(gang, waits, waits)
    held, thread, endings = gang.following(waits)
    until(lambda: at_step(gang, 3)() and gang.steps() == [2])
    agent_of(held.workload, node).send_signal(signum)
    thread.join(60)
    assert endings[0].outcome == {signal.SIGKILL: "node_lost", signal.SIGTERM: "preempted"}[signum]
    assert gang.launcher.get(held.workload).phase is WorkloadPhase.EXITED
    play(gang, Scenario(steps=6), Scenario(steps=6))
    assert gang.run() is JobState.EVALUATING
    assert gang.weights() == plain_weights(6)


@pytest.mark.slow
def test_a_node_that_is_frozen_ends_the_gang_though_the_leader_is_well(gang: Job) -> None:
    quick = replace(gang.platform.settings, heartbeat_timeout_s=6.0, heartbeat_grace_s=1.0)
    gang.platform = replace(gang.platform, settings=quick)
    waits = Scenario(steps=6, hold_at=3)
    play(gang, waits, waits)
    held, thread, endings = gang.following(waits)
    until(lambda: at_step(gang, 3)() and gang.steps() == [2])
    frozen = agent_of(held.workload, 1)
    os.kill(frozen.pid, signal.SIGSTOP)
    thread.join(60)
    assert endings[0].outcome == "stalled"
    assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE
    play(gang, Scenario(steps=6), Scenario(steps=6))
    assert gang.run() is JobState.EVALUATING
    assert gang.weights() == plain_weights(6)


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_what_a_node_explains_is_the_cause_whatever_the_collapse_does_to_the_others(gang: Job, node: int) -> None:
    scenarios = [Scenario(steps=9, hold_at=5), Scenario(steps=9, hold_at=5)]
    scenarios[node] = Scenario(steps=9, end_at={"step": 4, "outcome": "oom"})
    play(gang, *scenarios)
    held, thread, endings = gang.following(scenarios[0])
    thread.join(60)
    assert endings[0].outcome == "oom"
    assert gang.launcher.get(held.workload).phase is WorkloadPhase.EXITED
