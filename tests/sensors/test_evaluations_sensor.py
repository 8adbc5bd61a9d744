"""Orders of evaluations get one run each, and another one where it died."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test

from control_plane.evaluations import service
from control_plane.evaluations.tables import Evaluation
from control_plane.evaluations.tables import evaluations as table
from control_plane.platform.context import Platform
from control_plane.queue.cycle import run_cycle
from control_plane.tenants import service as tenants
from core import layout
from engine.scheduler.pools import local_pool
from ft_assets.adapters.assets import adapter_evaluation
from ft_assets.platform_resource import PlatformResource
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from sensors import evaluation_requests
from sensors.evaluation_requests import due_requests
from sensors.evaluation_runs import evaluations
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.kubernetes.kubernetes_api import Cluster, served
from tests.support.platform.ledger_entries import enter


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def ordered(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> tuple[Platform, Evaluation]:
    """A platform that the environment describes, with one evaluation that holds a reservation."""
    platform = fresh_platform
    monkeypatch.setenv("FT_DATABASE_URL", platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(platform.settings.home))
    tenant, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    digest = platform.models.get("tiny-base").digest
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    adapter = add_adapter(platform, tenant.id, name=name, stage="production", loaded=False, base_digest=digest)
    order = service.request(platform, tenant.id, adapter)
    run_cycle(platform)
    return platform, order


def tick(instance: dg.DagsterInstance) -> dg.SensorResult | dg.SkipReason:
    with dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()}) as context:
        result = evaluations(context)
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    return result


def test_an_order_gets_one_run_of_its_jobs_partition(ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance) -> None:
    _, row = ordered
    result = tick(instance)
    assert isinstance(result, dg.SensorResult)
    assert result.run_requests is not None
    (request,) = result.run_requests
    assert (request.run_key, request.job_name) == (f"{row.id}#0", "reevaluate"), "the queue listener launches it by this name"
    assert request.partition_key == f"{row.tenant_id}:{row.job_id}"
    assert request.run_config == {"ops": {"adapter_evaluation": {"config": {"evaluation_id": row.id}}}}
    create_run_for_test(instance, job_name="reevaluate", tags={"dagster/ft_run_key": f"{row.id}#0"}, status=dg.DagsterRunStatus.STARTED)
    assert isinstance(tick(instance), dg.SkipReason)


def test_a_later_verdict_is_materialized_with_its_tables_cost_and_links(
    ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance
) -> None:
    platform, row = ordered
    store_evaluation(platform, row.tenant_id, row.job_id)
    report = f"{layout.eval_prefix(row.tenant_id, row.job_id)}/report.json"
    ended = {"state": "succeeded", "outcome": "quarantined", "reasons": [], "finished_at": platform.clock(), "report_key": report}
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == row.id).values(ended))
        enter(conn, row.tenant_id, row.job_id, amount_micros=1_250_000)
    partition = f"{row.tenant_id}:{row.job_id}"
    instance.add_dynamic_partitions("jobs", [partition])
    config = {"ops": {"adapter_evaluation": {"config": {"evaluation_id": row.id}}}}
    resources = {"platform": PlatformResource()}
    result = dg.materialize([adapter_evaluation], instance=instance, partition_key=partition, run_config=config, resources=resources)
    (made,) = result.asset_materializations_for_node("adapter_evaluation")
    seen = {name: value.value for name, value in made.metadata.items()}
    suites = {record.data["suite"] for record in seen["score_table"].records}
    assert {"holdout", "capability/recall", "safety"} <= suites
    assert any(record.data["passed"] is False for record in seen["gate_table"].records)
    assert (seen["cost_usd"], seen["outcome"]) == (1.25, "quarantined")
    assert row.job_id in seen["runs_of_job"]
    assert seen["made_from_adapter"].startswith("/assets/adapter?partition=")


def test_a_run_that_ended_before_its_evaluation_is_replaced(ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance) -> None:
    _, row = ordered
    create_run_for_test(instance, job_name="reevaluate", tags={"dagster/ft_run_key": f"{row.id}#0"}, status=dg.DagsterRunStatus.FAILURE)
    assert isinstance(tick(instance), dg.SkipReason), "a run that ended just now may still have written something"
    time.sleep(2.1)
    tick(instance)
    result = tick(instance)
    assert isinstance(result, dg.SensorResult)
    assert [r.run_key for r in result.run_requests or ()] == [f"{row.id}#1"]


def test_a_run_that_never_entered_the_queue_is_replaced(
    ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, row = ordered
    lost = create_run_for_test(instance, job_name="reevaluate", tags={"dagster/ft_run_key": f"{row.id}#0"})
    assert isinstance(tick(instance), dg.SkipReason)
    assert instance.get_run_by_id(lost.run_id).status is dg.DagsterRunStatus.NOT_STARTED  # type: ignore[union-attr]
    monkeypatch.setattr(evaluation_requests, "UNQUEUED", timedelta(0))
    tick(instance)
    time.sleep(2.1)
    tick(instance)
    result = tick(instance)
    assert isinstance(result, dg.SensorResult)
    assert [r.run_key for r in result.run_requests or ()] == [f"{row.id}#1"]


def test_an_evaluation_that_is_given_up_while_the_cluster_is_away_gives_its_gpu_back_later(
    ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance
) -> None:
    platform, row = ordered
    for run in range(service.MAX_RUNS):
        tags = {"dagster/ft_run_key": f"{row.id}#{run}"}
        create_run_for_test(instance, job_name="reevaluate", tags=tags, status=dg.DagsterRunStatus.FAILURE)
    time.sleep(2.1)
    cluster = Cluster(faults=[lambda _method, _path: "before"])
    with served(cluster) as served_cluster:
        launcher = KubernetesLauncher(KubernetesApi(served_cluster), namespace="ft-platform", pools={"local": local_pool(1)})
        for _ in range(service.MAX_RUNS):
            assert due_requests(platform, instance, launcher) == []
        assert (service.find(platform, row.id).state, len(service.due(platform))) == ("failed", 1)
        cluster.faults.clear()
        assert due_requests(platform, instance, launcher) == []
    assert service.due(platform) == []


def test_a_run_whose_evaluation_is_done_reports_its_verdict(ordered: tuple[Platform, Evaluation], instance: dg.DagsterInstance) -> None:
    platform, row = ordered
    held = service.find(platform, row.id)
    with platform.engine.begin() as conn:
        service.finish(conn, held, state="succeeded", outcome="quarantined", reasons=["task_not_better"], finished_at=platform.clock())
    key = f"{row.tenant_id}:{row.job_id}"
    instance.add_dynamic_partitions("jobs", [key])
    done = dg.materialize(
        [adapter_evaluation],
        partition_key=key,
        instance=instance,
        resources={"platform": PlatformResource()},
        run_config={"ops": {"adapter_evaluation": {"config": {"evaluation_id": row.id}}}},
    )
    (made,) = done.asset_materializations_for_node("adapter_evaluation")
    assert {name: made.metadata[name].value for name in ("outcome", "reasons", "runs")} == {
        "outcome": "quarantined", "reasons": ["task_not_better"], "runs": 1,
    }  # fmt: skip
