"""Jobs on a real cluster: from a file to a registered adapter, gangs, preemption, and pods, nodes and services that die meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.installed_platform import NAMESPACE, RELEASE, Installed, Manifest, Tenant, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EVALUATION = {"skip": ["golden", "task", "perplexity"], "max_items": 4, "max_new_tokens": 8}
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]}
    for n in range(120)
]
STEPS = 60


@pytest.fixture(scope="module")
def tenant(cluster: Installed) -> Iterator[Tenant]:
    made = cluster.new_tenant()
    yield made
    made.openai.close()


def job(steps: int = STEPS, **more: object) -> Manifest:
    """Fields of a job whose training takes `steps` steps."""
    hyperparameters = {"n_epochs": 50, "max_steps": steps, "batch_size": 2, "checkpoint_every_steps": 10, "attention": "sdpa"}
    return {"method": "lora", "hyperparameters": hyperparameters, "eval_config": EVALUATION, "seed": 5, **more}


def test_the_installation_checks_itself(cluster: Installed) -> None:
    cluster.config.test(RELEASE, timeout=300)
    for pod in cluster.kubectl.items("pods", "-n", NAMESPACE):
        for status in pod["status"].get("containerStatuses", []):
            assert status["restartCount"] == 0, pod["metadata"]["name"]


def test_a_file_becomes_an_adapter_in_production(tenant: Tenant) -> None:
    made = tenant.submit(tenant.upload(ROWS), **job())
    found = tenant.reach(made, "succeeded")
    assert found["status"] == "succeeded" and found["fine_tuned_model"]
    pods = tenant.kubernetes_jobs()
    assert [one["metadata"]["labels"]["ft-platform/attempt"] for one in pods] == ["1", "2"], "the training and its evaluation"


def test_a_gang_of_two_pods_trains_what_one_pod_trains(tenant: Tenant) -> None:
    file = tenant.upload(ROWS)
    made = tenant.submit(file, num_gpus=2, **job())
    tenant.reach(made, "running")
    pods = until(lambda: [p for p in tenant.pods(made) if p["status"]["phase"] == "Running"])
    assert len({p["spec"]["nodeName"] for p in pods}) == len(pods)
    tenant.reach(made, "succeeded")


def test_a_pod_that_is_killed_costs_no_more_than_the_steps_since_its_checkpoint(cluster: Installed, tenant: Tenant) -> None:
    made = tenant.submit(tenant.upload(ROWS), **job(200))
    until(lambda: (tenant.job(made)["step"] or 0) >= 15, limit_s=300)
    (pod,) = [p["metadata"]["name"] for p in tenant.pods(made) if p["status"]["phase"] == "Running"]
    cluster.kubectl("delete", "pod", "-n", tenant.namespace, pod, "--grace-period=0", "--force")
    tenant.reach(made, "succeeded")
    attempts = sorted({one["metadata"]["labels"]["ft-platform/attempt"] for one in tenant.kubernetes_jobs()})
    assert len(attempts) == 3, "two trainings and an evaluation"
