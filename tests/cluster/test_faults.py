"""A node that dies, and an API server that is away, under running trainings."""

from __future__ import annotations

import shlex
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.cluster import faults
from tests.cluster.faults import alerts, api_server_answers, attempted, carry_out, is_ready, watched_jobs, wrongly_billed
from tests.cluster.installed_platform import Installed, until
from tests.cluster.small_jobs import ROWS, at_step, outcomes, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NOTICED_WITHIN, ENDED_WITHIN = timedelta(seconds=30), timedelta(seconds=60)
"""After the last heartbeat."""
ROUND = timedelta(seconds=2)
"""What the worker's round of looks at all attempts takes at most on a busy machine."""


def test_a_job_whose_node_dies_resumes_elsewhere_within_a_minute_and_pays_once(cluster: Installed, tmp_path: Path) -> None:
    kill, start = faults.command(faults.KILL_NODE), faults.command(faults.START_NODE)
    tenant = cluster.new_tenant()
    with watched_jobs(cluster.kubectl, tmp_path) as jobs_seen:
        made = tenant.submit(tenant.upload(ROWS), **spec(200))
        at_step(tenant, made, 15)
        (pod,) = [each for each in tenant.pods(made) if each["status"]["phase"] == "Running"]
        node = pod["spec"]["nodeName"]
        carry_out([*kill, node])
        try:
            until(lambda: attempted(cluster, [made])[0].released_at, limit_s=120, what="the end of the first attempt")
            until(lambda: not is_ready(cluster, node), what=f"{node} being lost")
            tenant.reach(made, "succeeded")
            later = [each["spec"]["nodeName"] for each in tenant.pods(made) if each["metadata"]["name"] != pod["metadata"]["name"]]
        finally:
            carry_out([*start, node])
        until(lambda: is_ready(cluster, node), what=f"{node} being back")
        started = jobs_seen()
    first, *others = attempted(cluster, [made])
    assert first.heartbeat_at is not None and first.released_at is not None
    assert first.released_at - first.heartbeat_at <= ENDED_WITHIN + ROUND
    assert alerts(cluster, made, "heartbeat_missed")[0] - first.heartbeat_at <= NOTICED_WITHIN + ROUND
    assert [each.outcome for each in (first, *others)] == ["stalled", "succeeded", "succeeded"], "two trainings and an evaluation"
    assert later and node not in later
    assert {key: len(uids) for key, uids in started.items() if key[0] == made} == {(made, attempt): 1 for attempt in (1, 2, 3)}
    assert wrongly_billed(cluster, [made]) == []


def test_trainings_go_on_while_the_api_server_is_away(cluster: Installed) -> None:
    restart = faults.command(faults.RESTART_API_SERVER)
    tenant = cluster.new_tenant()
    made = tenant.submit(tenant.upload(ROWS), **spec(250))
    at_step(tenant, made, 5)
    steps = list[int]()
    with subprocess.Popen(restart, stdout=subprocess.DEVNULL) as restarted:
        while restarted.poll() is None:
            if not api_server_answers(cluster):
                steps.append(attempted(cluster, [made])[0].reported_step)
            time.sleep(0.5)
    assert restarted.returncode == 0, shlex.join(restart)
    assert steps and steps[-1] > steps[0], f"it trained while the API server was away: {steps}"
    tenant.reach(made, "succeeded")
    assert outcomes(cluster, made) == ["succeeded"]
    assert wrongly_billed(cluster, [made]) == []
