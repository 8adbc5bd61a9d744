"""Objects of one workload: a marker in the platform's namespace, and in the tenant's a Job with what it owns.

The marker is made first and stays: it says that the name was used, and in which namespace. A gang is one Indexed Job, with a pod for each
node; a pod that fails or is taken away ends the whole Job.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping

from control_plane.capacity import kueue
from core.errors import Conflict
from core.workload import NODE, NODE_DIR, TOKEN_FILE, VARIABLE, Workload
from engine.adapters import IMAGE_DIGEST, SERVER_USER, ClusterObject, kubernetes_name, label_value, pod_container
from engine.scheduler import Pool

WORKLOAD = "ft-platform/workload"
"""Label of everything that belongs to a workload, its annotation with the whole name, and the finalizer of its Job: what a Job says of its
end stays until the platform has forgotten the workload."""
FORGOTTEN = "ft-platform/forgotten"
"""Label of a marker whose workload was forgotten."""
LONGEST_NAME = 55
"""A pod is named ``<job>-<index>-<5 characters>``, and its host name has at most 63."""
AGENT = "agent"
STATED = "/run/ft-platform"
"""Directory of the workload's description and its token."""
SCRATCH = {"node": "/node", "tmp": "/tmp"}
"""Directories that a pod may write to, which end with it."""
MAX_SECRET_BYTES = 1 << 20
"""The API server accepts no larger Secret."""
UPLOAD_S = 90.0
"""Time to upload the last checkpoint, because the node's directory ends with the pod. With the 30 s to write it, 120 s: the notice that
spot instances get on AWS."""


def name_of(workload: str) -> str:
    """Return the name of a workload's objects."""
    return kubernetes_name(workload, longest=LONGEST_NAME)


def workload_of(manifest: ClusterObject) -> str:
    """Return the name of the workload that an object belongs to."""
    return str(manifest["metadata"]["annotations"][WORKLOAD])


def labels(workload: Workload) -> dict[str, str]:
    about = {"tenant": workload.tenant, "job": workload.job, "attempt": str(workload.attempt), **workload.labels}
    return {"app.kubernetes.io/part-of": "ft-platform", WORKLOAD: label_value(workload.name)} | {
        f"ft-platform/{k}": label_value(v) for k, v in about.items()
    }


def marker(workload: Workload, *, namespace: str, starter: str) -> ClusterObject:
    """Return the mark that a name was used; `starter` identifies the call that may start the workload."""
    data = {"namespace": kueue.namespace(workload.tenant), "starter": starter}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(workload, namespace), "data": data}


def secret(workload: Workload, *, token: str) -> ClusterObject:
    """Return the description and the token, mounted as files.

    ``Conflict`` (``workload_too_large``) if the API server would not store it.
    """
    values = {"workload.json": workload.to_json(), "token": token}
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    size = sum(map(len, values.values()))
    if size > MAX_SECRET_BYTES:
        raise Conflict(
            f"the description of {workload.name} has {size} bytes and a Secret holds {MAX_SECRET_BYTES}; train on fewer, larger files",
            code="workload_too_large",
        )
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(workload), "type": "Opaque", "immutable": True, "data": data}


def gang_policy(workload: Workload) -> ClusterObject:
    """Return the policy by which the pods of a gang reach each other, and no other pod of the tenant."""
    peers = {"podSelector": {"matchLabels": {WORKLOAD: label_value(workload.name)}}}
    spec = {**peers, "policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [peers]}], "egress": [{"to": [peers]}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(workload), "spec": spec}


def owned_by(job: ClusterObject) -> ClusterObject:
    """Return the change that makes an object end with its Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def job(workload: Workload, pool: Pool) -> ClusterObject:
    """Return the Indexed Job of a gang. It is suspended until Kueue has room for all of its pods."""
    if not IMAGE_DIGEST.fullmatch(workload.image):
        raise Conflict(
            f"image {workload.image!r} of {workload.name} is not pinned by its digest; "
            "set FT_IMAGE to the platform's image@sha256:<64 digits>",
            code="image_not_pinned",
        )
    metadata = _metadata(workload)
    queue, priority = kueue.queue_name(workload.labels["tier"], pool.name), kueue.priority_class(workload.labels["tier"])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata
        | {"labels": metadata["labels"] | {kueue.QUEUE_LABEL: queue, kueue.PRIORITY_LABEL: priority}, "finalizers": [WORKLOAD]},
        "spec": {
            "suspend": True,
            "completionMode": "Indexed",
            "completions": workload.num_nodes,
            "parallelism": workload.num_nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {
                    "labels": metadata["labels"],
                    "annotations": metadata["annotations"] | kueue.topology_request(pool, workload.num_nodes),
                },
                "spec": _pod(workload, pool),
            },
        },
    }


def _metadata(workload: Workload, namespace: str = "") -> ClusterObject:
    return {
        "name": name_of(workload.name),
        "namespace": namespace or kueue.namespace(workload.tenant),
        "labels": labels(workload),
        "annotations": {WORKLOAD: workload.name},
    }


def _failure_rules() -> list[ClusterObject]:
    """Rules that end the Job with the reason in its condition: a disruption, or else the agent's exit code."""
    return [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": AGENT, "operator": "NotIn", "values": [0]}},
    ]


def _pod(workload: Workload, pool: Pool) -> ClusterObject:
    scratch = [{"name": name, "emptyDir": {}} for name in SCRATCH]
    files = [{"key": name, "path": name} for name in ("workload.json", "token")]
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(workload.grace_s + UPLOAD_S),
        "nodeSelector": kueue.node_selector(pool),
        "tolerations": kueue.tolerations(pool),
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": SERVER_USER, "runAsGroup": SERVER_USER, "fsGroup": SERVER_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_agent(workload, pool)],
        "volumes": [
            {"name": "stated", "secret": {"secretName": name_of(workload.name), "defaultMode": 0o440, "items": files}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *scratch,
        ],
    }  # fmt: skip


def _agent(workload: Workload, pool: Pool) -> ClusterObject:
    requests = kueue.pod_requests(pool, max(len(workload.devices_of(node)) for node in range(workload.num_nodes)) or 1)
    mounts: list[ClusterObject] = [{"name": "stated", "mountPath": STATED, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": name, "mountPath": path} for name, path in SCRATCH.items()]
    made = pod_container(AGENT, workload.image, command=("python", "-m", *workload.command), env=_environment(workload), mounts=mounts)
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return made | {
        "env": [*made["env"], {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        "resources": {"requests": requests, "limits": {name: requests[name] for name in ("memory", kueue.GPU_RESOURCE)}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(workload: Workload) -> Mapping[str, str]:
    own = {VARIABLE: f"{STATED}/workload.json", TOKEN_FILE: f"{STATED}/token", NODE_DIR: SCRATCH["node"]}
    return {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", **workload.env, **own}
