"""Fifty jobs of several tenants while pods are killed at random: of trainings, evaluations, Dagster's runs and the platform."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.capacity.tables import node_drains
from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import FINAL
from resources.launcher.kubernetes_manifests import FORGOTTEN, WORKLOAD
from tests.cluster.faults import Attempt, attempted, watched_jobs, wrongly_billed
from tests.cluster.installed_platform import NAMESPACE, RELEASE, Installed, Manifest, Tenant, until
from tests.cluster.small_jobs import ROWS, spec

NUM_JOBS = int(os.environ.get("FT_TEST_NUM_JOBS", "50"))
NUM_TENANTS = max(2, -(-NUM_JOBS // 5))
"""A standard tenant may have five jobs in flight."""
WIDE_EVERY, SEED = 5, 7
"""The second of every five jobs is a gang of two pods."""
LIMIT_S = 600.0 + 150.0 * NUM_JOBS
"""Two cores need a minute and a half for a job with its three runs of Dagster and its evaluation."""
PAUSE_S = (5.0, 20.0)
"""Between two kills."""
DELETED_S = 1500.0
"""A deletion begins once the tenant's work has been at rest for two minutes; the worker looks every ten."""
IN_WORKER = ("exec", "-n", NAMESPACE, f"deploy/{RELEASE}-worker", "-c", "worker", "--")
OF_WORKLOADS = ("jobs", "pods", "secrets", "networkpolicies")
MOST_OF_A_JOB = 2
"""Pods of one job that are killed: a training that is killed ten times without progress is given up, rightly."""
FORGET = """
from dataclasses import replace
from datetime import timedelta
from control_plane.attempts.watch import FORGET_AFTER, Watcher
from control_plane.composition import open_platform
from control_plane.platform.settings import load
from resources.launcher import open_launcher
platform, ahead = open_platform(load()), timedelta()
later = replace(platform, clock=lambda: platform.clock() + ahead)
watcher = Watcher(platform=later, launcher=open_launcher(platform.settings), answers=lambda: True)
for _ in range(2):  # a workload without an end is forgotten an hour after it was found to be lost
    ahead += FORGET_AFTER + timedelta(minutes=1)
    watcher.forget_ended()
"""
"""What the worker does an hour after the end of a workload, at once."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 1200 + DELETED_S)]


@dataclass(kw_only=True)
class Killer:
    """Deletes a running pod now and then, without grace: one of a workload, a run of Dagster, or a service of the platform."""

    cluster: Installed
    draw: random.Random = field(default_factory=lambda: random.Random(SEED))
    killed: Counter[str] = field(default_factory=Counter)
    """Pods, by what they were."""
    _of_job: Counter[str] = field(default_factory=Counter)
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ending.wait(self.draw.uniform(*PAUSE_S)):
            victims = self.victims(self.draw.choice(("workload", "workload", "run", "service")))
            if victims:
                self.kill(self.draw.choice(victims))
            self.undrain()

    def undrain(self) -> None:
        """Puts nodes that the platform took for sick back into service, as an operator does who knows why jobs fail there."""
        with self.cluster.engine.connect() as conn:
            drained = list(conn.execute(sa.select(node_drains.c.node)).scalars())
        for node in drained:
            self.cluster.kubectl(*IN_WORKER, "ft", "admin", "nodes", "undrain", node, ok=False)

    def victims(self, kind: str) -> list[Manifest]:
        running = ("--field-selector", "status.phase=Running")
        if kind == "workload":
            found = self.cluster.kubectl.items("pods", "--all-namespaces", "-l", WORKLOAD, *running)
            return [pod for pod in found if self._of_job[job_of(pod)] < MOST_OF_A_JOB]
        is_run = "=" if kind == "run" else "!="
        chosen = f"app.kubernetes.io/name=ft-platform,app.kubernetes.io/component{is_run}runs"
        return self.cluster.kubectl.items("pods", "-n", NAMESPACE, "-l", chosen, *running)

    def kill(self, pod: Manifest) -> None:
        about = pod["metadata"]
        what = about["labels"].get("app.kubernetes.io/component", "workload")
        self.cluster.kubectl(
            "delete", "pod", "-n", about["namespace"], about["name"], "--grace-period=0", "--force", "--wait=false", ok=False
        )
        self.killed[what] += 1
        self._of_job[job_of(pod)] += 1

    def stop(self) -> None:
        self._ending.set()


def job_of(found: Manifest) -> str:
    return str(found["metadata"]["labels"].get("ft-platform/job", ""))


def attempt_of(found: Manifest) -> Attempt:
    return job_of(found), int(found["metadata"]["labels"]["ft-platform/attempt"])


@contextmanager
def killing(cluster: Installed) -> Iterator[Killer]:
    killer = Killer(cluster=cluster)
    thread = threading.Thread(target=killer.run)
    thread.start()
    try:
        yield killer
    finally:
        killer.stop()
        thread.join()


def states(cluster: Installed, wanted: Collection[str]) -> dict[str, str]:
    with cluster.engine.connect() as conn:
        return {row.id: str(row.state) for row in conn.execute(sa.select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(wanted)))}


def test_jobs_whose_pods_are_killed_all_succeed_and_are_billed_once(cluster: Installed, tmp_path: Path) -> None:
    tenants = [cluster.new_tenant() for _ in range(NUM_TENANTS)]
    files = [tenant.upload(ROWS) for tenant in tenants]
    began, made = time.monotonic(), list[str]()
    with watched_jobs(cluster.kubectl, tmp_path) as jobs_seen:
        for number in range(NUM_JOBS):
            asked = spec(8, every=2, num_gpus=2 if number % WIDE_EVERY == 1 else 1)
            mine = number % NUM_TENANTS
            made.append(tenants[mine].submit(files[mine], **asked, suffix=f"r{number}"))
        with killing(cluster) as killer:
            until(lambda: set(states(cluster, made).values()) <= FINAL, limit_s=LIMIT_S, what="the end of all jobs")
        uids = {key: found for key, found in jobs_seen().items() if key[0] in made}
    found = attempted(cluster, made)
    ends = Counter(f"{each.kind} {each.outcome}" for each in found)
    sys.stdout.write(f"{NUM_JOBS} jobs in {time.monotonic() - began:.0f} s; killed: {dict(killer.killed)}; attempts: {dict(ends)}\n")
    assert states(cluster, made) == dict.fromkeys(made, "succeeded")
    assert killer.killed["workload"] and killer.killed["runs"] and len(found) > 2 * NUM_JOBS, "some attempts were killed"
    known, started = {each.key for each in found}, {each.key for each in found if each.started_at is not None}
    assert [key for key, seen in uids.items() if len(seen) > 1] == [], "an attempt has one Job"
    assert started <= uids.keys() <= known
    assert wrongly_billed(cluster, made) == []
    checked = json.loads(cluster.ft("admin", "ledger", "check", "--json"))
    assert (checked["differences"], checked["total_micros"]) == ([], 0) and checked["num_entries"] >= len(started)
    forgotten_workloads_leave_their_mark(cluster, tenants, set(uids))
    deleted_tenants_leave_nothing(cluster, tenants)


def of_workloads(cluster: Installed, namespaces: Sequence[str], *kinds: str) -> list[Manifest]:
    return [one for space in namespaces for one in cluster.kubectl.items(",".join(kinds), "-n", space, "-l", WORKLOAD)]


def in_worker(cluster: Installed, *command: str) -> str:
    """Run a command where the platform may delete objects of the cluster."""
    return cluster.kubectl(*IN_WORKER, *command, timeout_s=900)


def marks_of(cluster: Installed, tenants: Sequence[Tenant]) -> list[Manifest]:
    names = {tenant.name for tenant in tenants}
    return [one for one in of_workloads(cluster, [NAMESPACE], "configmaps") if one["metadata"]["labels"]["ft-platform/tenant"] in names]


def forgotten_workloads_leave_their_mark(cluster: Installed, tenants: Sequence[Tenant], started: set[Attempt]) -> None:
    spaces = [tenant.namespace for tenant in tenants]
    assert {attempt_of(one) for one in of_workloads(cluster, spaces, "jobs")} == started
    in_worker(cluster, "python", "-c", FORGET)
    until(lambda: not of_workloads(cluster, spaces, *OF_WORKLOADS), what="the end of all objects of workloads")
    marks = marks_of(cluster, tenants)
    assert {attempt_of(mark) for mark in marks} >= started
    assert all(FORGOTTEN in mark["metadata"]["labels"] for mark in marks)


def deleted_tenants_leave_nothing(cluster: Installed, tenants: Sequence[Tenant]) -> None:
    before = {one["metadata"]["uid"] for tenant in tenants for one in cluster.kubectl.items("rolebindings", "-n", tenant.namespace)}
    assert before
    for tenant in tenants:
        in_worker(cluster, "ft", "admin", "tenants", "delete-data", tenant.name, "--reason", "a test", "--confirm", tenant.name)

    def left() -> bool:
        bound = {one["metadata"]["uid"] for tenant in tenants for one in cluster.kubectl.items("rolebindings", "-n", tenant.namespace)}
        return bool(before & bound) or bool(marks_of(cluster, tenants))

    until(lambda: not left(), limit_s=DELETED_S, what="the end of the tenants' namespaces and marks")
