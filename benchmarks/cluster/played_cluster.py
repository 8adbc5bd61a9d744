"""What a cluster does with a Job, done by hand: Kueue queues and admits it, the Job controller makes its pod, and a kubelet runs it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from kubernetes.client import ApiClient, BatchV1Api, CoreV1Api, CustomObjectsApi

from control_plane.capacity import kueue
from resources.launcher.kubernetes_launcher import JOB_UID
from resources.launcher.kubernetes_manifests import AGENT

Manifest = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def holds(kind: str) -> Manifest:
    return {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": now()}


class PlayedCluster:
    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._core, self._batch, self._custom = CoreV1Api(client), BatchV1Api(client), CustomObjectsApi(client)

    def add_namespace(self, name: str) -> None:
        self._core.create_namespace({"metadata": {"name": name}})

    def run(self, name: str, namespace: str) -> None:
        """Admit a Job of one pod and run the pod."""
        job: Manifest = self._client.sanitize_for_serialization(self._batch.read_namespaced_job(name, namespace))
        about = {"name": f"job-{name}", "namespace": namespace, "labels": {JOB_UID: job["metadata"]["uid"]}}
        admitted = {"conditions": [holds("QuotaReserved"), holds("Admitted")]}
        group, _, version = kueue.API.partition("/")
        queued = {"apiVersion": kueue.API, "kind": "Workload", "metadata": about, "spec": {"active": True}, "status": admitted}
        self._custom.create_namespaced_custom_object(group, version, namespace, "workloads", queued)
        self._batch.patch_namespaced_job(name, namespace, {"spec": {"suspend": False}})
        pod = self._pod(job)
        self._core.create_namespaced_pod(namespace, pod)
        state = {"name": AGENT, "image": "", "imageID": "", "ready": True, "restartCount": 0, "state": {"running": {"startedAt": now()}}}
        status = {"phase": "Running", "conditions": [holds("PodScheduled"), holds("Ready")], "containerStatuses": [state]}
        self._core.patch_namespaced_pod_status(pod["metadata"]["name"], namespace, {"status": status})

    def _pod(self, job: Manifest) -> Manifest:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        annotations = {**template["metadata"]["annotations"], "batch.kubernetes.io/job-completion-index": "0"}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
        about = {
            "name": f"{name}-0-abcde",
            "labels": template["metadata"]["labels"],
            "annotations": annotations,
            "ownerReferences": [owner],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {**template["spec"], "nodeName": "node-0"}}
