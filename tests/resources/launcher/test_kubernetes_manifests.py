"""Objects of a workload: valid for a strict API server, restricted, and named as the queues are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control_plane.capacity import kueue
from core.workload import NODE, NODE_DIR, TOKEN_FILE, VARIABLE, Kind, NodeShare, Workload
from engine.adapters.cluster import ClusterObject
from engine.scheduler.pools import Pool, equal_nodes
from resources.launcher import kubernetes_manifests as manifests

FABRIC = Pool(name="fabric", nodes=equal_nodes(32, prefix="f", fabric="ib"), gpu_type="h100-80gb", max_gpus_per_job=32)
SPOT = Pool(name="cheap", nodes=equal_nodes(16, prefix="c"), gpu_type="h100-80gb", max_gpus_per_job=16, pricing="spot", cpu_per_gpu=6)


def workload(*, num_nodes: int = 1, gpus: int = 8, name: str = "ftjob-1-a1") -> Workload:
    return Workload(
        name=name, kind=Kind.TRAIN, tenant="acme", job="ftjob-1", attempt=1, image="registry.example/ft@sha256:" + "0" * 64, grace_s=30.0,
        processes=(gpus,) * num_nodes, placement=tuple(NodeShare(node=f"f-{n}", devices=tuple(range(gpus))) for n in range(num_nodes)),
        labels={"tenant": "acme", "job": "ftjob-1", "pool": "fabric", "tier": "standard"},
        env={"FT_JOB": "ftjob-1"},
    )  # fmt: skip


def objects(made: Workload, pool: Pool) -> list[ClusterObject]:
    marker = manifests.marker(made, namespace="ft-platform", starter="0")
    return [marker, manifests.secret(made, token="secret"), manifests.gang_policy(made), manifests.job(made, pool)]


@pytest.mark.parametrize(
    "made", [workload(), workload(num_nodes=4), workload(name="Job_with" + "_a_long_name" * 9)], ids=["one", "gang", "long"]
)
@pytest.mark.parametrize("pool", [FABRIC, SPOT], ids=lambda pool: pool.name)
def test_every_object_is_valid_in_strict_mode(made: Workload, pool: Pool) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in objects(made, pool):
        kubernetes_validate.validate(manifest, "1.34", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(manifest | {"a_field_of_nobody": 1}, "1.34", strict=True)
        assert len(manifest["metadata"]["name"]) <= manifests.LONGEST_NAME
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())
        assert manifests.workload_of(manifest) == made.name


def pod_of(job: ClusterObject) -> Any:
    return job["spec"]["template"]["spec"]


def test_a_gang_is_one_indexed_job_that_ends_with_any_of_its_pods() -> None:
    spec = manifests.job(workload(num_nodes=4), FABRIC)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (spec["suspend"], spec["backoffLimit"], spec["podReplacementPolicy"]) == (True, 0, "Failed")
    disrupted, failed = spec["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert failed == {"action": "FailJob", "onExitCodes": {"containerName": "agent", "operator": "NotIn", "values": [0]}}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_its_queue_class_nodes_and_tolerations_are_those_of_the_rendered_queues() -> None:
    for pool in (FABRIC, SPOT):
        job = manifests.job(workload(), pool)
        rendered = kueue.render([pool])
        (flavor,) = [each["spec"] for each in rendered if each["kind"] == "ResourceFlavor"]
        assert (pod_of(job)["nodeSelector"], pod_of(job)["tolerations"]) == (flavor["nodeLabels"], flavor["tolerations"])
        queue, priority = job["metadata"]["labels"][kueue.QUEUE_LABEL], job["metadata"]["labels"][kueue.PRIORITY_LABEL]
        assert priority in {each["metadata"]["name"] for each in rendered if each["kind"] == "WorkloadPriorityClass"}
        local = {each["metadata"]["name"]: each for each in kueue.render_tenant("acme", "standard", [pool]) if each["kind"] == "LocalQueue"}
        assert local[queue]["metadata"]["namespace"] == job["metadata"]["namespace"]
        (covered,) = {tuple(q["spec"]["resourceGroups"][0]["coveredResources"]) for q in rendered if q["kind"] == "ClusterQueue"}
        resources = pod_of(job)["containers"][0]["resources"]
        assert set(resources["requests"]) == set(covered), "Kueue admits nothing that requests what no queue covers"
        assert resources["requests"]["cpu"] == str(8 * pool.cpu_per_gpu)
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    ("pool", "num_nodes", "asked"),
    [
        (FABRIC, 1, {"kueue.x-k8s.io/podset-required-topology": "kubernetes.io/hostname"}),
        (FABRIC, 4, {"kueue.x-k8s.io/podset-required-topology": "ft-platform/fabric"}),
        (SPOT, 2, {"kueue.x-k8s.io/podset-unconstrained-topology": "true"}),
    ],
)
def test_a_gang_stays_inside_one_fabric_where_the_pool_has_any(pool: Pool, num_nodes: int, asked: dict[str, str]) -> None:
    annotations = manifests.job(workload(num_nodes=num_nodes), pool)["spec"]["template"]["metadata"]["annotations"]
    assert {key: value for key, value in annotations.items() if "topology" in key} == asked
    levels = [level["nodeLabel"] for each in kueue.render([pool]) if each["kind"] == "Topology" for level in each["spec"]["levels"]]
    assert set(asked.values()) <= {*levels, "true"}


def test_a_pod_can_do_no_more_than_train() -> None:
    pod = pod_of(manifests.job(workload(), FABRIC))
    (container,) = pod["containers"]
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    kinds = [set(volume) - {"name"} for volume in pod["volumes"]]
    assert sorted(kind for each in kinds for kind in each) == ["emptyDir"] * 3 + ["secret"], "restricted pods mount nothing of their node"
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/dev/shm", "/node", "/tmp"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert pod["terminationGracePeriodSeconds"] == 120, "30 s to write a checkpoint, and 90 to upload it"


def test_the_agent_finds_what_it_finds_on_one_machine() -> None:
    made = workload(num_nodes=2)
    (container,) = pod_of(manifests.job(made, FABRIC))["containers"]
    env = {each["name"]: each for each in container["env"]}
    files = {VARIABLE: "/run/ft-platform/workload.json", TOKEN_FILE: "/run/ft-platform/token", NODE_DIR: "/node", "FT_JOB": "ftjob-1"}
    assert {name: env[name]["value"] for name in files} == files
    assert env[NODE]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert not [each for each in env.values() if "secretKeyRef" in each.get("valueFrom", {})], (
        "no key of the operator reaches a tenant's pod"
    )
    assert container["command"] == ["python", "-m", "agent"]
    secret = manifests.secret(made, token="an-attempts-token")
    (mounted,) = [volume["secret"] for volume in pod_of(manifests.job(made, FABRIC))["volumes"] if "secret" in volume]
    assert mounted["secretName"] == secret["metadata"]["name"]
    assert {item["key"] for item in mounted["items"]} <= set(secret["data"])
    assert "an-attempts-token" not in json.dumps(objects(made, FABRIC))


def test_names_of_different_workloads_differ_however_long_they_are() -> None:
    names = ["ftjob-1-a1", "ftjob-1-a2", "FTJOB-1-a1", "x" * 100 + "1", "x" * 100 + "2", "ftjob_1-a1"]
    assert len({manifests.name_of(name) for name in names}) == len(names)
