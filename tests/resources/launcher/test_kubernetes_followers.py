"""A launcher that follows workloads through watches: what it asks, what it misses, and what it logs while the API server is away."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest

from core.errors import Unavailable
from tests.resources.launcher.kubernetes_bench import (
    EXITED,
    NAME,
    PENDING,
    RUNNING,
    TOKEN,
    Bench,
    workload,
)
from tests.support.jobs.followed_jobs import until


def test_a_follower_asks_the_api_for_nothing_while_nothing_happens(bench: Bench) -> None:
    bench.started()
    follower = bench.follower()
    until(lambda: bench.cluster.watches == 3, timeout_s=10)
    bench.cluster.requests.clear()
    for _ in range(200):
        assert follower.get(NAME).phase is RUNNING
    assert bench.cluster.requests == []
    bench.nodes.end(NAME, 0, 0)
    until(lambda: follower.get(NAME).phase is EXITED, timeout_s=10)
    assert [path for _, path in bench.cluster.requests if "watch" not in path] == []


@pytest.mark.parametrize("too_old", [False, True])
def test_a_follower_whose_watch_breaks_misses_nothing(bench: Bench, too_old: bool) -> None:
    bench.started()
    follower = bench.follower()
    until(lambda: bench.cluster.watches == 3, timeout_s=10)
    bench.cluster.faults.append(lambda _method, path: "before" if "watch=true" in path else None)
    bench.cluster.break_watches()
    until(lambda: bench.cluster.watches == 0, timeout_s=10)
    bench.nodes.end(NAME, 0, 4)
    bench.launcher.start_or_adopt(workload("ftjob-2-a1"), token=TOKEN)
    if too_old:
        bench.cluster.compact()
    bench.cluster.faults.clear()
    bench.cluster.requests.clear()
    until(lambda: bench.cluster.watches == 3, timeout_s=30)
    until(lambda: [(s.name, s.phase) for s in follower.list()] == [(NAME, EXITED), ("ftjob-2-a1", PENDING)], timeout_s=10)
    listed = [path for _, path in bench.cluster.requests if path.startswith("/apis/batch/v1/jobs?") and "watch" not in path]
    assert bool(listed) is too_old, "everything is listed again only if the past is gone"


OUTAGE = """
import logging, sys, time
from core.errors import FtError
from core.telemetry import logs, outages
from kubernetes.client import ApiClient, Configuration
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
outages.OVER_S = 3.0
logs.configure("test")
settings = Configuration(host=sys.argv[1])
settings.api_key["authorization"] = sys.argv[2]
follower = KubernetesLauncher(KubernetesApi(ApiClient(settings)), namespace="ft-platform", pools={})
follower.list()
print("follows", flush=True)
met = 0
while met < 20:
    try:
        follower.get(sys.argv[3])
    except FtError as error:
        logging.getLogger("watch").warning("it cannot be watched now: %s", error.message)
        met += 1
    time.sleep(0.2)
print("met", flush=True)
time.sleep(6)
"""


@pytest.mark.slow
def test_an_outage_of_the_api_server_is_two_lines_in_the_log_of_a_follower() -> None:
    with ExitStack() as stack:
        bench = Bench(stack)
        bench.started()
        settings = bench.client.configuration
        command = [sys.executable, "-c", OUTAGE, settings.host, settings.api_key["authorization"], NAME]
        follower = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        assert follower.stdout is not None and follower.stdout.readline() == "follows\n"
        until(lambda: bench.cluster.watches == 3, timeout_s=10)
        bench.cluster.faults.append(lambda _method, _path: "before")
        bench.cluster.break_watches()
        assert follower.stdout.readline() == "met\n"
        bench.cluster.faults.clear()
        lines = follower.communicate(timeout=60)[1].splitlines()
    assert sum("does not answer" in line for line in lines) == sum("no further error" in line for line in lines) == 1, lines
    assert len(lines) == 2, lines


def test_a_follower_that_sees_no_changes_asks_instead_of_answering_from_the_past(bench: Bench) -> None:
    bench.started()
    follower = bench.follower()
    until(lambda: bench.cluster.watches == 3, timeout_s=10)
    bench.cluster.faults.append(lambda _method, path: "before" if "watch=true" in path else None)
    bench.cluster.break_watches()
    until(lambda: not follower._jobs.is_current, timeout_s=10)
    bench.nodes.end(NAME, 0, 0)
    assert follower.get(NAME).phase is EXITED
    bench.cluster.faults.append(lambda _method, _path: "before")
    with pytest.raises(Unavailable):
        follower.get(NAME)
