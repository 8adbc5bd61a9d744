"""Jobs on a real cluster: from a file to a registered adapter, gangs, preemption, and pods that die meanwhile."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from tests.cluster.installed_platform import NAMESPACE, RELEASE, Installed, until
from tests.cluster.small_jobs import ROWS, at_step, outcomes, spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HOURS_S = 36_000.0
"""Expected duration that the test gives a job: one that is nearly done is not preempted."""


def test_the_installation_checks_itself(cluster: Installed) -> None:
    cluster.config.test(RELEASE, timeout=300)
    for pod in cluster.kubectl.items("pods", "-n", NAMESPACE):
        for status in pod["status"].get("containerStatuses", []):
            assert status["restartCount"] == 0, pod["metadata"]["name"]


def test_a_file_becomes_an_adapter_in_production(cluster: Installed) -> None:
    tenant = cluster.new_tenant()
    made = tenant.submit(tenant.upload(ROWS), **spec() | {"auto_promote": True})
    found = tenant.reach(made, "succeeded")
    assert found["status"] == "succeeded" and found["fine_tuned_model"]
    assert tenant.adapter(found["adapter_id"])["stage"] == "production"
    attempted = [one["metadata"]["labels"]["ft-platform/attempt"] for one in tenant.kubernetes_jobs()]
    assert sorted(attempted) == ["1", "2"], "the training and its evaluation"
    assert tenant.billed_gpu_seconds() > 0
    assert all(pod["status"]["phase"] == "Succeeded" for pod in tenant.pods())


def test_a_gang_has_a_pod_on_each_node(cluster: Installed) -> None:
    tenant = cluster.new_tenant()
    file = tenant.upload(ROWS)
    wide = tenant.submit(file, **spec(num_gpus=2))
    tenant.reach(wide, "running")
    nodes = [pod["spec"]["nodeName"] for pod in tenant.pods(wide)]
    assert len(nodes) == len(set(nodes)) == 2
    tenant.reach(wide, "succeeded")
    assert outcomes(cluster, wide) == ["succeeded"]


def test_a_premium_gang_takes_the_nodes_of_a_standard_job_which_ends_with_the_same_weights(cluster: Installed) -> None:
    modest, urgent = cluster.new_tenant(), cluster.new_tenant(tier="premium")
    asked = spec(1000, num_gpus=2, batch=8, every=500)  # long enough that the second job comes while it trains
    first = modest.submit(modest.upload(ROWS), **asked)
    modest.reach(first, "provisioning", "running")
    second = urgent.submit(urgent.upload(ROWS), **asked)
    urgent.reach(second, "queued")
    urgent.openai.fine_tuning.jobs.pause(second)

    def lengthen() -> None:
        with cluster.engine.begin() as conn:
            conn.execute(sa.update(jobs).where(jobs.c.id == first, jobs.c.expected_s < HOURS_S).values(expected_s=HOURS_S))

    def stepped() -> bool:
        lengthen()
        return (modest.job(first)["step"] or 0) >= 3

    until(stepped, limit_s=300)
    urgent.openai.fine_tuning.jobs.resume(second)
    modest.reach(first, "preempted", "queued", limit_s=120)
    urgent.reach(second, "succeeded")
    modest.reach(first, "succeeded")
    assert outcomes(cluster, first) == ["preempted", "succeeded"]
    assert outcomes(cluster, second) == ["succeeded"]
    assert modest.weights(first) == urgent.weights(second)


def test_a_pod_that_is_killed_costs_no_more_than_the_steps_since_its_checkpoint(cluster: Installed) -> None:
    tenant = cluster.new_tenant()
    made = tenant.submit(tenant.upload(ROWS), **spec(200))
    at_step(tenant, made, 15)
    (pod,) = [p["metadata"]["name"] for p in tenant.pods(made) if p["status"]["phase"] == "Running"]
    cluster.kubectl("delete", "pod", "-n", tenant.namespace, pod, "--grace-period=0", "--force")
    tenant.reach(made, "succeeded")
    assert len(outcomes(cluster, made)) == 2
    names = [one["metadata"]["name"] for one in tenant.kubernetes_jobs()]
    assert len(names) == len(set(names)) == 3, "two trainings and an evaluation, each one Job"


def test_the_platforms_own_pods_may_die_while_a_job_trains(cluster: Installed) -> None:
    tenant = cluster.new_tenant()
    made = tenant.submit(tenant.upload(ROWS), **spec(250))
    at_step(tenant, made, 5)
    own = "app.kubernetes.io/name=ft-platform"
    deleted = cluster.kubectl("delete", "pod", "-n", NAMESPACE, "-l", own, "--field-selector=status.phase=Running", "--wait=false")
    assert deleted.count(f"{RELEASE}-") >= 5, deleted
    for component in ("api", "worker", "daemon", "code-location"):
        cluster.kubectl("rollout", "status", "-n", NAMESPACE, f"deploy/{RELEASE}-{component}", "--timeout=180s", timeout_s=200)
    tenant.reach(made, "succeeded")
    assert outcomes(cluster, made) == ["succeeded"]


def test_an_upgrade_of_the_chart_leaves_running_trainings_running(cluster: Installed) -> None:
    tenant = cluster.new_tenant()
    made = tenant.submit(tenant.upload(ROWS), **spec(250))
    at_step(tenant, made, 5)
    cluster.upgrade(cluster.values | {"env": {**cluster.values["env"], "FT_LOG_LEVEL": "WARNING"}})
    tenant.reach(made, "succeeded")
    assert outcomes(cluster, made) == ["succeeded"]
