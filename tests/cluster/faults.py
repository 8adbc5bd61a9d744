"""Commands with which an operator breaks the cluster, and what tests look at afterwards: every Job that there was, and every bill."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts.tables import agents, attempts, health_verdicts
from control_plane.billing.tables import ledger_entries
from control_plane.queue.tables import reservations
from resources.launcher.kubernetes_manifests import WORKLOAD
from tests.cluster.installed_platform import Installed, Kubectl, Manifest

KILL_NODE, START_NODE, RESTART_API_SERVER = "FT_TEST_KILL_NODE", "FT_TEST_START_NODE", "FT_TEST_RESTART_API_SERVER"
COMMANDS = {
    KILL_NODE: "a command that ends the kubelet and all containers of the node that it is given, as a loss of power does",
    START_NODE: "a command that starts the node again, with the same GPUs",
    RESTART_API_SERVER: "a command that kills the API server and starts it again after 30 s or more",
}
COMMAND_S = 300
BY_ATTEMPT = "JOB:.metadata.labels.ft-platform/job,ATTEMPT:.metadata.labels.ft-platform/attempt,UID:.metadata.uid"
"""Columns of kubectl's table of Jobs."""
Attempt = tuple[str, int]
"""A job of the platform, and the number of its attempt."""


def command(variable: str) -> list[str]:
    """Return the operator's command in an environment variable; without one, the test is skipped."""
    if not (given := os.environ.get(variable)):
        pytest.skip(f"not set: {variable} ({COMMANDS[variable]})")
    return shlex.split(given)


def carry_out(given: list[str]) -> None:
    done = subprocess.run(given, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"{shlex.join(given)}: {done.stdout}{done.stderr}"


@contextmanager
def watched_jobs(kubectl: Kubectl, directory: Path) -> Iterator[Callable[[], Mapping[Attempt, set[str]]]]:
    """Watch the Jobs of workloads in the whole cluster; yields a function that returns the UIDs of all that there were, by attempt."""
    seen = directory / "jobs.txt"
    wanted = ["get", "jobs", "--all-namespaces", "-l", WORKLOAD, "--watch", "--no-headers", "-o", f"custom-columns={BY_ATTEMPT}"]
    again = ["sh", "-c", 'while :; do "$@"; sleep 0.2; done', "sh", kubectl.path, *wanted]  # a watch ends after a while

    def uids() -> Mapping[Attempt, set[str]]:
        found = defaultdict[Attempt, set[str]](set)
        for job, attempt, uid in map(str.split, seen.read_text().splitlines()):
            found[job, int(attempt)].add(uid)
        return found

    with seen.open("wb") as out, subprocess.Popen(again, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True) as watch:
        try:
            yield uids
        finally:
            with suppress(ProcessLookupError):
                os.killpg(watch.pid, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempted:
    """An attempt with its reservation and what its leading agent reported."""

    job_id: str
    attempt: int
    kind: str
    num_gpus: int
    outcome: str | None
    started_at: datetime | None
    ended_at: datetime | None
    released_at: datetime | None
    heartbeat_at: datetime | None
    reported_step: int

    @property
    def key(self) -> Attempt:
        return self.job_id, self.attempt


def attempted(cluster: Installed, jobs: Collection[str]) -> list[Attempted]:
    """Return all attempts of `jobs`, trainings and evaluations, in order."""
    a, r, led = attempts.c, reservations.c, agents.c
    query = (
        sa.select(a.job_id, a.attempt, r.kind, r.num_gpus, a.outcome, a.started_at, a.ended_at, r.released_at)
        .add_columns(led.heartbeat_at, sa.func.coalesce(led.reported_step, 0).label("reported_step"))
        .join(reservations, (r.job_id == a.job_id) & (r.attempt == a.attempt))
        .outerjoin(agents, (led.job_id == a.job_id) & (led.attempt == a.attempt) & (led.node == 0))
        .where(a.job_id.in_(jobs))
        .order_by(a.job_id, a.attempt)
    )
    with cluster.engine.connect() as conn:
        return [Attempted(**row) for row in conn.execute(query).mappings()]


def alerts(cluster: Installed, job_id: str, code: str) -> list[datetime]:
    """Return when alerts of a code were raised for a job."""
    v = health_verdicts.c
    query = sa.select(v.raised_at).where(v.job_id == job_id, v.code == code).order_by(v.raised_at)
    with cluster.engine.connect() as conn:
        return list(conn.execute(query).scalars())


def wrongly_billed(cluster: Installed, jobs: Collection[str]) -> list[str]:
    """Return what is wrong with the bills of `jobs`, in words.

    Every attempt that started has one usage entry, over its GPUs and its time. One that failed through the platform is refunded in full,
    or, if its node was taken back, what its checkpoints do not hold. One that succeeded is refunded nothing, or, after such an attempt,
    what it loaded again.
    """
    usage, refunds = _entries(cluster, jobs, "usage"), _entries(cluster, jobs, "refund")
    found = attempted(cluster, jobs)
    taken = {each.job_id for each in found if each.outcome == "preempted"}
    billed = sorted(key for key, entries in usage.items() for _ in entries)
    started = [each.key for each in found if each.started_at is not None]
    wrong = [] if billed == started else [f"billed are {billed}, started were {started}"]
    for each in found:
        for entry in usage.get(each.key, ()):
            if each.started_at is None or each.ended_at is None:
                continue
            held_s = each.num_gpus * (each.ended_at - each.started_at).total_seconds()
            if abs(entry["gpu_seconds"] - held_s) > 0.01:
                wrong.append(f"{each.key} is billed {entry['gpu_seconds']:.2f} GPU-seconds and held {held_s:.2f}")
            used, refunded = entry["gpu_seconds"], sum(refund["gpu_seconds"] for refund in refunds.get(each.key, ()))
            if each.outcome == "preempted":
                right = 0 < refunded <= used
            elif entry["detail"]["fault"] is not None:
                right = refunded == used
            else:
                right = 0 <= refunded < used if each.job_id in taken else refunded == 0
            if not right:
                wrong.append(f"{each.key} ({each.outcome}) used {used:.2f} GPU-seconds and is refunded {refunded:.2f}")
    return wrong


def _entries(cluster: Installed, jobs: Collection[str], kind: str) -> Mapping[Attempt, list[Mapping[str, Any]]]:
    e = ledger_entries.c
    query = sa.select(e.job_id, e.attempt, e.gpu_seconds, e.detail).where(e.job_id.in_(jobs), e.kind == kind)
    found = defaultdict[Attempt, list[Mapping[str, Any]]](list)
    with cluster.engine.connect() as conn:
        for row in conn.execute(query).mappings():
            found[row["job_id"], row["attempt"]].append(dict(row))
    return found


def is_ready(cluster: Installed, node: str) -> bool:
    """Whether the cluster says that a node is ready."""
    conditions: list[Manifest] = cluster.kubectl.get("node", node)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def api_server_answers(cluster: Installed) -> bool:
    asked = [cluster.kubectl.path, "get", "--raw", "/livez", "--request-timeout=2s"]
    return subprocess.run(asked, capture_output=True, timeout=30).returncode == 0
