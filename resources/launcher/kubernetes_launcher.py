"""Workloads as Jobs of a cluster with Kueue.

A process that lists the workloads follows them through watches from then on, and withdraws from Kueue what Kueue has evicted, so that only
the platform's scheduler starts it again. Others ask for one workload by its name.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from core.errors import FtError, InvalidRequest, Unavailable
from core.retries import RetryPolicy, with_retries
from core.workload import Workload
from engine.adapters import ClusterObject, label_value
from engine.scheduler import Pool
from resources.launcher import kubernetes_manifests as manifests
from resources.launcher.kubernetes_api import (
    BY_KIND,
    CONFIG_MAPS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    WORKLOADS,
    Cache,
    Exists,
    KubernetesApi,
    Outdated,
)
from resources.launcher.kubernetes_manifests import FORGOTTEN, WORKLOAD, name_of, workload_of
from resources.launcher.kubernetes_status import Found, has_ended, is_withdrawn, status_of, was_evicted, withdrawn

JOB_UID = "kueue.x-k8s.io/job-uid"
"""Label of Kueue's Workloads."""
START_TIMEOUT_S = 60.0
"""Seconds between a workload's marker and its Job, after which the start counts as interrupted."""
START_RETRIES = RetryPolicy(first_s=0.2, most_s=2.0, give_up_s=20.0)
STOP_RETRIES = RetryPolicy(first_s=0.05, most_s=0.2, give_up_s=5.0)
KILL_TIMEOUT_S = 30.0
"""Seconds after the grace period in which the pods of a stopped workload must be gone: twice what an unanswering node gets."""
POLL_S = 0.1
CACHE_TIMEOUT_S = 30.0
RUNNING = (WorkloadPhase.PENDING, WorkloadPhase.RUNNING)

log = logging.getLogger(__name__)


class KubernetesLauncher:
    """``control_plane.platform.protocols.Launcher`` by Indexed Jobs in the tenants' namespaces."""

    start_retries = START_RETRIES

    def __init__(self, api: KubernetesApi, *, namespace: str, pools: Mapping[str, Pool], clock: Callable[[], float] = time.time) -> None:
        self._api, self._namespace, self._pools, self._clock = api, namespace, pools, clock
        self._jobs = Cache(api, JOBS, labels=WORKLOAD, key=lambda job: job["metadata"]["labels"][WORKLOAD])
        self._pods = Cache(
            api, PODS, labels=WORKLOAD, key=lambda pod: pod["metadata"]["uid"], group=lambda pod: pod["metadata"]["labels"][WORKLOAD]
        )
        self._queued = Cache(api, WORKLOADS, labels=JOB_UID, key=lambda queued: queued["metadata"]["labels"][JOB_UID], seen=self._saw)
        self._caches = (self._jobs, self._pods, self._queued)
        self._follows = False

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        """Create the Job of `workload` unless its name was used before: the one who creates the marker creates the Job."""
        job, owned = manifests.job(workload, self._pool(workload)), [manifests.secret(workload, token=token)]
        if workload.num_nodes > 1:
            owned.append(manifests.gang_policy(workload))
        return self._start(job, owned) if self._mark(workload) else self.get(workload.name)

    def get(self, name: str) -> WorkloadStatus:
        found = self._found(name)
        if found is None:
            return self._unstarted(name, self._marker(name))
        self._withdraw_evicted(found)
        return status_of(found, now=self._clock())

    def list(self) -> list[WorkloadStatus]:
        self._follow()
        jobs = {workload_of(job): job for job in self._jobs}
        markers = self._api.list(CONFIG_MAPS, self._namespace, labels=f"{WORKLOAD},!{FORGOTTEN}")
        started = [self.get(name) for name in sorted(jobs)]
        return started + [self._unstarted(workload_of(each), each) for each in markers if workload_of(each) not in jobs]

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        """Withdraw the workload from its queue and end its pods; returns when they are gone, or their nodes do not answer."""
        deadline = time.monotonic() + grace_s + KILL_TIMEOUT_S
        ending: set[str] = set()
        while (status := self.get(name)).phase in RUNNING:
            found = self._found(name)
            if found is not None:
                self._end(found, grace_s, ending)
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"workload {name} has not ended {KILL_TIMEOUT_S:.0f} s after its grace period: {status.reason or 'see its Job'}"
                )
            time.sleep(POLL_S)
        return status

    def forget(self, name: str) -> None:
        """Delete the Job of an ended workload and what it owns; the marker stays. Each step may be repeated."""
        marker = self._marker(name)
        if marker is None or self.get(name).phase in RUNNING:
            return
        own, namespace = name_of(name), marker["data"]["namespace"]
        for resource in (SECRETS, NETWORK_POLICIES):
            self._api.delete(resource, own, namespace)
        self._api.delete(JOBS, own, namespace)
        with_retries(partial(self._release, own, namespace), STOP_RETRIES)
        self._api.patch(CONFIG_MAPS, own, self._namespace, {"metadata": {"labels": {FORGOTTEN: "true"}}})

    def close(self) -> None:
        for cache in self._caches if self._follows else ():
            cache.close()

    def _pool(self, workload: Workload) -> Pool:
        name = workload.labels.get("pool", "")
        if name not in self._pools:
            raise InvalidRequest(f"{workload.name} is to run in pool {name!r}, which FT_POOLS does not have", code="unknown_pool")
        return self._pools[name]

    def _mark(self, workload: Workload) -> bool:
        """Mark the name as used; False if another call did."""
        starter = uuid.uuid4().hex
        marker = manifests.marker(workload, namespace=self._namespace, starter=starter)
        try:
            with_retries(partial(self._api.create, marker), self.start_retries)
        except Exists:
            found = self._marker(workload.name)  # this call's own, if the answer to its first try was lost
            return found is not None and bool(found["data"]["starter"] == starter)
        return True

    def _start(self, job: ClusterObject, owned: Sequence[ClusterObject]) -> WorkloadStatus:
        """Create the Job, and before it what its pods need. If that fails, the name stays used: others may wait for its end already."""
        for manifest in owned:
            self._made(manifest)
        made = self._made(job)
        for manifest in owned:
            about = manifest["metadata"]
            self._api.patch(BY_KIND[manifest["kind"]], about["name"], about["namespace"], manifests.owned_by(made))
        return status_of(Found(job=made, pods=(), queued=None), now=self._clock())

    def _made(self, manifest: ClusterObject) -> ClusterObject:
        """Create an object, or return the one that an earlier try created."""

        def create() -> ClusterObject:
            try:
                return self._api.create(manifest)
            except Exists as error:
                found = self._api.get(BY_KIND[manifest["kind"]], manifest["metadata"]["name"], manifest["metadata"]["namespace"])
                if found is None:
                    raise Unavailable(f"it is just being deleted: {error.message}", code="cluster_unavailable") from error
                return found

        return with_retries(create, self.start_retries)

    def _marker(self, name: str) -> ClusterObject | None:
        return self._api.get(CONFIG_MAPS, name_of(name), self._namespace)

    def _unstarted(self, name: str, marker: ClusterObject | None) -> WorkloadStatus:
        """Return the status of a workload without a Job: one whose start was interrupted, or whose Job is gone, is lost."""
        if marker is None:
            return WorkloadStatus(name=name, phase=WorkloadPhase.ABSENT)
        made = datetime.fromisoformat(marker["metadata"]["creationTimestamp"]).timestamp()
        fresh = FORGOTTEN not in marker["metadata"]["labels"] and self._clock() - made < START_TIMEOUT_S
        return WorkloadStatus(name=name, phase=WorkloadPhase.PENDING if fresh else WorkloadPhase.LOST)

    def _found(self, name: str) -> Found | None:
        """Return the objects of a workload: from the cache, if it is current and has the Job."""
        if self._follows and all(cache.is_current for cache in self._caches) and (job := self._jobs.get(label_value(name))) is not None:
            return Found(job=job, pods=self._pods.group(label_value(name)), queued=self._queued.get(job["metadata"]["uid"]))
        if (marker := self._marker(name)) is None or FORGOTTEN in marker["metadata"]["labels"]:
            return None
        namespace = marker["data"]["namespace"]
        if (job := self._api.get(JOBS, name_of(name), namespace)) is None:
            return None
        pods = self._api.list(PODS, namespace, labels=f"{WORKLOAD}={label_value(name)}")
        queued = self._api.list(WORKLOADS, namespace, labels=f"{JOB_UID}={job['metadata']['uid']}")
        return Found(job=job, pods=pods, queued=next(iter(queued), None))

    def _follow(self) -> None:
        """Follow all workloads from now on."""
        if not self._follows:
            for cache in self._caches:
                cache.start()
        self._follows = True
        if not all(cache.wait(CACHE_TIMEOUT_S) for cache in self._caches):
            raise Unavailable(
                f"the workloads of the cluster could not be listed within {CACHE_TIMEOUT_S:.0f} s", code="cluster_unavailable"
            )

    def _saw(self, queued: ClusterObject) -> None:
        """Withdraw what Kueue has evicted; called for every change of a Workload, which may be another platform's."""
        job = next((job for job in self._jobs if job["metadata"]["uid"] == queued["metadata"]["labels"][JOB_UID]), None)
        if job is not None:
            try:
                self._withdraw_evicted(Found(job=job, pods=(), queued=queued))
            except FtError as error:
                log.warning("%s was evicted and cannot be withdrawn now: %s", workload_of(job), error.message)

    def _withdraw_evicted(self, found: Found) -> None:
        if was_evicted(found) and not is_withdrawn(found):
            log.warning("%s was evicted by Kueue", workload_of(found.job))
            self._withdraw(found)

    def _withdraw(self, found: Found) -> None:
        assert found.queued is not None
        about = found.queued["metadata"]
        self._api.patch(WORKLOADS, about["name"], about["namespace"], withdrawn(found))

    def _end(self, found: Found, grace_s: float, ending: set[str]) -> None:
        """Withdraw the workload, and delete the pods that run except those in `ending`, which it extends."""
        if found.queued is not None and not is_withdrawn(found):
            self._withdraw(found)
        for pod in found.pods:
            about = pod["metadata"]
            if about["uid"] not in ending and not has_ended(pod):
                ending.add(about["uid"])
                self._api.delete(PODS, about["name"], about["namespace"], grace_s=grace_s)

    def _release(self, name: str, namespace: str) -> None:
        """Remove the launcher's finalizer from a Job, as long as nothing else changed it."""
        job = self._api.get(JOBS, name, namespace)
        if job is None or WORKLOAD not in job["metadata"].get("finalizers", ()):
            return
        about = job["metadata"]
        changes = {"resourceVersion": about["resourceVersion"], "finalizers": [f for f in about["finalizers"] if f != WORKLOAD]}
        try:
            self._api.patch(JOBS, name, namespace, {"metadata": changes})
        except Outdated as error:
            raise Unavailable(error.message) from error
