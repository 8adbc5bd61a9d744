"""The worker's round reads a Prometheus server, takes sick nodes out of service, reports slow GPUs and cordons the cluster's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts.tables import health_verdicts
from control_plane.capacity import nodes
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.worker.periodic_work import HARDWARE
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_nodes import CORDONED, cordon
from tests.support.jobs.queued_jobs import Queued, queued
from tests.support.kubernetes.kubernetes_api import Cluster, served
from tests.support.servers.prometheus_server import PrometheusServer, prometheus

POOLS = """
pools:
  - name: desk
    gpu_type: local
    nodes: [{prefix: desk, count: 2, gpus: 4}]
"""
XID = "DCGM_FI_DEV_XID_ERRORS"


@pytest.fixture
def server() -> Iterator[PrometheusServer]:
    with prometheus() as running:
        yield running


@pytest.fixture
def world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path, server: PrometheusServer) -> Queued:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return queued(new_platform(pools=str(tmp_path / "pools.yaml"), prometheus_url=server.url), write_chat_rows)


def gpu(number: int, node: str = "desk-0", **more: str) -> dict[str, str]:
    """Labels as the exporter writes them, and as Prometheus renames them where it scrapes pods."""
    return {"Hostname": node, "gpu": str(number), "UUID": f"GPU-{number}", "modelName": "NVIDIA H100 80GB HBM3", **more}


def test_a_hardware_xid_drains_the_node_and_an_application_xid_does_not(world: Queued, server: PrometheusServer) -> None:
    server.plant(XID, 0, **gpu(0))
    server.plant(XID, 31, **gpu(1, "desk-1"))
    server.plant("DCGM_FI_DEV_GPU_TEMP", 79, **gpu(0))
    assert HARDWARE.run(world.platform).startswith("nodes drained for errors: 0; nodes drained for failures: 0; jobs with slow GPUs: 0")
    server.plant(XID, 79, **gpu(0))
    assert "nodes drained for errors: 1" in HARDWARE.run(world.platform)
    assert "nodes drained for errors: 0" in HARDWARE.run(world.platform)
    assert [(n.name, n.reason) for n in nodes.list_nodes(world.platform) if n.reason] == [
        ("desk-0", "GPU 0 (GPU-0): Xid 79, GPU has fallen off the bus")
    ]


def test_a_partitioned_gpu_counts_once_with_its_highest_value(world: Queued, server: PrometheusServer) -> None:
    for part, value in (("1", 1.0), ("2", 0.0)):
        server.plant("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", value, **gpu(0, GPU_I_ID=part))
    assert "nodes drained for errors: 1" in HARDWARE.run(world.platform)


def test_a_server_that_does_not_answer_drains_nothing_and_the_round_goes_on(world: Queued, server: PrometheusServer) -> None:
    server.plant(XID, 79, **gpu(0))
    server.status = 503
    told = HARDWARE.run(world.platform)
    assert "nodes drained for errors: failed, Unavailable: Prometheus does not answer a query: status 503; check FT_PROMETHEUS_URL" in told
    assert "nodes drained for failures: 0" in told
    assert {n.state for n in nodes.list_nodes(world.platform)} == {"ready"}


def test_without_a_server_only_failures_count(world: Queued, server: PrometheusServer) -> None:
    server.plant(XID, 79, **gpu(0))
    settings = replace(world.platform.settings, prometheus_url="")
    assert "nodes drained for errors: 0" in HARDWARE.run(replace(world.platform, settings=settings))


def test_a_gpu_slower_than_the_others_of_its_job_is_reported_to_operators_until_it_is_not(world: Queued, server: PrometheusServer) -> None:
    job = world.job(world.tenant(), gpus=4)
    world.round()
    held = attempts.claim(world.platform, world.row(job).tenant_id, job)
    attempts.mark_started(world.platform, held, started_at=world.now[0].timestamp())

    def clocks(*values: float) -> str:
        for number, value in enumerate(values):
            pods = {"pod": "dcgm-exporter-x7k2p", "exported_pod": f"{held.workload}-{number // 2}-abcde"}
            server.plant("DCGM_FI_DEV_SM_CLOCK", value, **gpu(number, f"desk-{number // 2}", **pods))
        server.plant("DCGM_FI_DEV_SM_CLOCK", 345, **gpu(7, pod="vllm-0-0-zzzzz"))
        return HARDWARE.run(world.platform)

    assert "jobs with slow GPUs: 0" in clocks(1755, 1700, 1740, 1420)
    assert "jobs with slow GPUs: 1" in clocks(1755, 1700, 1740, 1350)
    assert "jobs with slow GPUs: 1" in clocks(1755, 1700, 1740, 1350)
    with world.platform.engine.connect() as conn:
        (verdict,) = conn.execute(sa.select(health_verdicts)).all()
    assert (verdict.code, verdict.audience, verdict.cleared_at) == ("gpu_slow", "operator", None)
    assert verdict.message.startswith("GPU 3 (GPU-3) of node desk-1 runs at 1,350 MHz, its peers at 1,740.")
    assert "jobs with slow GPUs: 0" in clocks(1755, 1700, 1740, 1750)
    with world.platform.engine.connect() as conn:
        codes = conn.execute(sa.select(job_events.c.code).where(job_events.c.job_id == job).order_by(job_events.c.seq)).scalars().all()
    assert codes[-2:] == ["gpu_slow", "health_recovered"]


def test_drained_nodes_of_a_cluster_are_cordoned_and_only_those_are_uncordoned() -> None:
    cluster = Cluster()
    for name in ("a", "b", "theirs"):
        cluster.create("nodes", "", {"kind": "Node", "metadata": {"name": name}, "spec": {"unschedulable": name == "theirs"}})
    with served(cluster) as client:
        api = KubernetesApi(client)

        def cordoned() -> dict[str, Any]:
            return {n["metadata"]["name"]: n["spec"]["unschedulable"] for n in cluster.find("nodes")}

        assert cordon(api, {"a", "counted-0"}) == 1, "a counted node has no object"
        assert cordoned() == {"a": True, "b": False, "theirs": True}
        assert cordon(api, {"a", "counted-0"}) == 0
        assert cordon(api, {"b"}) == 2
        assert cordoned() == {"a": False, "b": True, "theirs": True}
        assert [n["metadata"]["name"] for n in cluster.find("nodes", selector=CORDONED)] == ["b"]
