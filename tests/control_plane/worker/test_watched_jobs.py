"""Attempts whose workloads are Jobs of a cluster, as the worker watches them: what waits, what starts, and what the cluster takes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from agent.messages import Exit, Heartbeat
from control_plane.attempts import agents, start
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.watch import Watcher
from control_plane.billing.tables import meter_events
from control_plane.capacity import kueue
from control_plane.capacity.tables import node_drains
from control_plane.evaluations import service as evaluations
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase
from control_plane.queue import cycle
from control_plane.tenants import service as tenants
from core.retries import RetryPolicy
from core.workload import Workload
from engine.scheduler.pools import local_pool
from resources.launcher import kubernetes_launcher
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from tests.support.jobs.claimed_job import ending, held_by
from tests.support.jobs.followed_jobs import until
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.jobs.started_job import start_job
from tests.support.kubernetes.kubernetes_api import Cluster, served
from tests.support.kubernetes.kubernetes_nodes import Nodes


class Impatient(KubernetesLauncher):
    start_retries = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


class Bench:
    """A job with a reservation whose workload was handed to the cluster, and a watcher."""

    def __init__(self, platform: Platform, held: Claim, stack: ExitStack) -> None:
        self.platform, self.held, self.tenant, self.job_id = platform, held, held.tenant, held.job_id
        self.cluster, self.ahead_s = Cluster(), 0.0
        self.nodes = Nodes(self.cluster)
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": kueue.namespace(held.tenant)}}
        self.cluster.create("namespaces", "", space)
        api = KubernetesApi(stack.enter_context(served(self.cluster)))
        clock = lambda: time.time() + self.ahead_s  # noqa: E731
        self.launcher = Impatient(api, namespace="ft-platform", pools={"local": local_pool(1)}, clock=clock)
        stack.callback(self.launcher.close)
        self.watcher = Watcher(platform=platform, launcher=self.launcher, answers=lambda: True)
        stack.callback(self.watcher.close)
        self.token = agents.introduce(platform, self.held, may_read=[])

    @property
    def name(self) -> str:
        return self.held.workload

    def start(self, *, name: str = "", num_nodes: int = 1) -> None:
        made = Workload(
            name=name or self.name, kind=self.held.kind, tenant=self.tenant, job=self.job_id, attempt=self.held.attempt,
            image="registry.example/ft@sha256:" + "0" * 64, labels={"tier": self.held.tier, "pool": self.held.pool},
            placement=self.held.placement * num_nodes, processes=(1,) * num_nodes,
        )  # fmt: skip
        assert self.launcher.start_or_adopt(made, token=self.token).phase is WorkloadPhase.PENDING

    def run(self, *, at: float) -> None:
        self.nodes.admit(self.name)
        self.nodes.run(self.name, at=at)
        assert self.watcher.look() == []

    def beat(self, number: int, said: Exit | None = None) -> None:
        agents.heartbeat(self.platform, self.token, Heartbeat(number=number, phase="train", exit=said))

    def job(self) -> Job:
        return jobs.get(self.platform, self.tenant, self.job_id).job

    def started_at(self) -> float | None:
        with self.platform.engine.connect() as conn:
            found = conn.execute(sa.select(attempts_table.c.started_at).where(attempts_table.c.job_id == self.job_id)).scalar_one()
        return None if found is None else float(found.timestamp())

    def metered(self) -> dict[str, float]:
        with self.platform.engine.connect() as conn:
            rows = conn.execute(sa.select(meter_events.c.kind, meter_events.c.at).where(meter_events.c.job_id == self.job_id)).all()
        return {row.kind: row.at.timestamp() for row in rows}

    def ended(self) -> Ending:
        endings: list[Ending] = []
        until(lambda: endings.extend(self.watcher.look()) or endings, timeout_s=30)
        self.watcher.settle()
        return endings[0]


@pytest.fixture
def bench(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(fresh_platform, start_job(fresh_platform, write_chat_rows, started_at=None), stack)


def test_a_workload_that_waits_says_why_and_is_neither_billed_nor_silent(bench: Bench) -> None:
    assert bench.watcher.look() == [], "its Job is not there yet"
    bench.start()
    assert bench.watcher.look() == []
    assert (bench.job().state, bench.job().reason_detail) == (
        "provisioning", "waits for QuotaReserved: couldn't assign flavors: insufficient unused quota",
    )  # fmt: skip
    assert (bench.started_at(), bench.metered()) == (None, {})
    bench.nodes.admit(bench.name)
    bench.nodes.unschedulable(bench.name, "0/4 nodes are available")
    assert bench.watcher.look() == []
    assert bench.job().reason_detail == "Unschedulable: 0/4 nodes are available"
    began = float(int(time.time()))
    bench.run(at=began)
    assert (bench.started_at(), bench.metered()) == (began, {"started": began})
    assert (bench.job().state, bench.job().reason_detail) == ("provisioning", None)
    bench.beat(1)
    assert bench.watcher.look() == []


def test_an_evaluation_that_waits_says_why_until_it_runs(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    trained = start_job(fresh_platform, write_chat_rows)
    attempts.finish(fresh_platform, trained, ending())
    with ExitStack() as stack:
        bench = Bench(fresh_platform, held_by(fresh_platform, trained.tenant, trained.job_id), stack)
        bench.start()
        assert bench.watcher.look() == []
        assert (bench.job().state, bench.job().reason_detail) == (
            "evaluating", "waits for QuotaReserved: couldn't assign flavors: insufficient unused quota",
        )  # fmt: skip
        bench.nodes.admit(bench.name)
        bench.nodes.run(bench.name, at=float(int(time.time())))
        assert start.start_or_adopt(fresh_platform, bench.launcher, bench.held) is None, "a step that was replaced sees it run first"
        assert (bench.job().state, bench.job().reason_detail) == ("evaluating", None)


def test_an_ordered_evaluation_that_is_given_up_while_it_waits_leaves_the_clusters_queue(fresh_platform: Platform) -> None:
    owner, _ = tenants.create(fresh_platform, "acme", tier="standard")
    digest = fresh_platform.models.get("tiny-base").digest
    adapter = add_adapter(fresh_platform, owner.id, name="ft:tiny-base:acme:x:1", stage="production", loaded=False, base_digest=digest)
    order = evaluations.request(fresh_platform, owner.id, adapter)
    with ExitStack() as stack:
        bench = Bench(fresh_platform, held_by(fresh_platform, owner.id, order.job_id), stack)
        bench.start()
        assert bench.watcher.look() == []
        for _ in range(evaluations.MAX_RUNS):
            (due,) = evaluations.due(fresh_platform)
            evaluations.replace_run(fresh_platform, bench.launcher, due, "ended FAILURE")
        assert (evaluations.find(fresh_platform, order.id).state, evaluations.due(fresh_platform)) == ("failed", [])
        assert not bench.nodes.admit(bench.name)
        assert bench.metered() == {}


def test_a_cancelled_workload_that_waits_is_withdrawn_and_costs_nothing(bench: Bench) -> None:
    bench.start()
    assert bench.watcher.look() == []
    jobs.cancel(bench.platform, bench.tenant, bench.job_id)
    ending = bench.ended()
    assert (ending.outcome, bench.job().state, bench.metered()) == ("cancelled", "cancelled", {})
    assert not bench.nodes.admit(bench.name)


def test_a_job_leaves_the_sick_node_that_kueue_chose_for_it(bench: Bench) -> None:
    bench.start()
    bench.run(at=float(int(time.time())))
    (pod,) = bench.nodes.pods(bench.name)
    machine = pod["spec"]["nodeName"]
    assert machine != bench.held.placement[0].node
    now = bench.platform.clock()
    with bench.platform.engine.begin() as conn:
        conn.execute(sa.insert(node_drains).values(node=machine, reason="Xid 79", drained_by="platform", drained_at=now, stop_at=now))
    cycle.run_cycle(bench.platform)
    assert agents.heartbeat(bench.platform, bench.token, Heartbeat(number=1, phase="train")).stop == "preempt"


def test_a_gang_that_is_cancelled_before_all_of_its_pods_have_started_is_not_billed(bench: Bench) -> None:
    bench.start(num_nodes=2)
    bench.nodes.admit(bench.name)
    bench.nodes.run(bench.name, only="0")
    jobs.cancel(bench.platform, bench.tenant, bench.job_id)
    bench.nodes.lost.add("node-0")  # its agent takes a while to end
    assert bench.watcher.look() == []
    until(lambda: len(bench.nodes.pods(bench.name)) == 1, timeout_s=10)
    assert bench.watcher.look() == [], "its reservation is kept as long as a pod runs"
    bench.nodes.lost.clear()
    bench.nodes.end(bench.name, 0, 143)
    ending = bench.ended()
    assert (ending.outcome, bench.job().state, bench.started_at()) == ("cancelled", "cancelled", None)
    assert "started" not in bench.metered()


def test_what_kueue_evicts_ends_as_preempted_and_waits_for_the_scheduler(bench: Bench) -> None:
    bench.start()
    began = float(int(time.time()))
    bench.run(at=began)
    bench.beat(1)
    bench.nodes.on_sigterm = lambda _pod: 143
    bench.nodes.evict(bench.name)
    ending = bench.ended()
    assert (ending.outcome, ending.status.evicted, bench.job().state) == ("preempted", True, "queued")
    assert set(bench.metered()) == {"started", "ended"}
    assert not bench.nodes.admit(bench.name), "Kueue does not start it again"


def test_a_start_that_was_interrupted_ends_the_attempt_and_the_next_one_has_another_name(bench: Bench) -> None:
    bench.cluster.faults.append(lambda method, path: "before" if method == "POST" and "secrets" in path else None)
    with ThreadPoolExecutor() as pool:
        interrupted = pool.submit(bench.start)
        until(lambda: bench.launcher.get(bench.name).phase is WorkloadPhase.PENDING, timeout_s=10)
        assert start.start_or_adopt(bench.platform, bench.launcher, bench.held) is None, "another step waits for its end"
        with pytest.raises(Exception, match="did not answer"):
            interrupted.result()
    bench.cluster.faults.clear()
    assert bench.watcher.look() == []
    bench.ahead_s = kubernetes_launcher.START_TIMEOUT_S + 5
    ending = bench.ended()
    assert (ending.outcome, ending.status.phase, bench.metered()) == ("node_lost", WorkloadPhase.LOST, {})
    cycle.run_cycle(bench.platform)
    assert attempts.claim(bench.platform, bench.tenant, bench.job_id).workload != bench.name


def test_a_workload_that_is_lost_is_forgotten_after_an_hour(bench: Bench) -> None:
    bench.start()
    bench.nodes.collect(bench.name)
    bench.ahead_s = kubernetes_launcher.START_TIMEOUT_S + 5
    assert bench.watcher.forget_ended() == 0
    bench.watcher._lost = dict.fromkeys(bench.watcher._lost, 0.0)
    assert bench.watcher.forget_ended() == 1
    assert bench.launcher.list() == []


def test_a_workload_that_cannot_be_forgotten_now_keeps_no_other_from_being_forgotten(bench: Bench) -> None:
    for name in (held := bench.name, "ftjob-2-a1"):
        bench.start(name=name)
        bench.nodes.admit(name)
        bench.nodes.run(name)
        bench.nodes.end(name, 0, 0, at=time.time() - 7200)
    bench.cluster.faults.append(lambda method, path: "before" if method == "DELETE" and path.endswith(f"secrets/{held}") else None)
    assert bench.watcher.forget_ended() == 1
    assert [status.name for status in bench.launcher.list()] == [held]
    bench.cluster.faults.clear()
    assert bench.watcher.forget_ended() == 1
    assert bench.launcher.list() == []
