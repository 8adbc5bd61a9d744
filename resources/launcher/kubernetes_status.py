"""How a workload stands, from its Job, its pods and its Kueue Workload: objects and `now` in, a status out.

1. A Job that is over has EXITED, with the first exit code but 0 of its pods, or the one that its condition names.
2. One that Kueue has evicted, or that was withdrawn from its queue, ends with its pods. Once they are deleted, nothing says how they ended,
   so it is LOST.
3. It runs once all of its agents have started, and is billed from then on; until then it is PENDING, with the reason.
4. A pod whose time to end has passed counts as gone: its node does not answer. If the cluster has lost the node, this is certain at once,
   else after a moment. Its token lets it change nothing any more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from engine.adapters import ClusterObject
from resources.launcher.kubernetes_manifests import AGENT, workload_of

INDEX = "batch.kubernetes.io/job-completion-index"
UNANSWERED_S = 15.0
"""Seconds after a pod's grace period at which its node counts as gone; a kubelet kills within one or two."""
TAKEN = frozenset({"PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet"})
"""Disruptions by which a cluster takes a node back on purpose; the others follow the loss of a node."""
EVICTED = "ft-platform/evicted"
"""Annotation of a Workload that Kueue evicted and the launcher withdrew: why."""
DEACTIVATED = ("Deactivated", "WorkloadDeactivated")
"""Reasons of evictions that follow a withdrawal."""
STARTING = frozenset({"ContainerCreating", "PodInitializing"})
EXIT_CODE = re.compile(r"exit code (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the cluster has of one workload."""

    job: ClusterObject
    pods: Sequence[ClusterObject]
    """In any order; those that were deleted are missing."""
    queued: ClusterObject | None
    """Kueue's Workload, which it makes a moment after the Job."""


def status_of(found: Found, *, now: float) -> WorkloadStatus:
    pods = sorted(found.pods, key=_index)
    started = [at for pod in pods if (at := _time(_agent_state(pod).get("startedAt"))) is not None]
    left = [pod for pod in pods if not has_ended(pod) and not _is_unanswered(pod, now)]
    over = _condition(found.job, "Complete") or _condition(found.job, "Failed")
    taken = was_evicted(found) or is_withdrawn(found)
    about: dict[str, Any] = {
        "name": workload_of(found.job),
        "nodes": tuple(node for pod in pods if (node := pod["spec"].get("nodeName"))),
        "evicted": was_evicted(found) or any(_disruption(pod) in TAKEN for pod in pods),
    }
    began = max(started) if len(started) == found.job["spec"]["completions"] else None
    if over is not None or (taken and pods and all(map(has_ended, pods))):
        reason = _withdrawal(found) if was_evicted(found) else _end_reason(over, pods)
        return WorkloadStatus(**about, phase=WorkloadPhase.EXITED, started_at=began, **_ending(over or {}, pods), reason=reason)
    if not left and (taken or any(_is_unanswered(pod, now) for pod in pods)):
        reason = _withdrawal(found) if was_evicted(found) else _end_reason(None, pods)
        return WorkloadStatus(**about, phase=WorkloadPhase.LOST, started_at=began, reason=reason)
    if began is None:
        return WorkloadStatus(**about, phase=WorkloadPhase.PENDING, reason=_waiting(found, pods))
    failed = any(_exit_code(pod) or _is_unanswered(pod, now) or _disruption(pod) for pod in pods)
    return WorkloadStatus(**about, phase=WorkloadPhase.RUNNING, started_at=began, broken=bool(left) and failed)


def was_evicted(found: Found) -> bool:
    """Whether Kueue took the nodes back by itself."""
    if found.queued is None:
        return False
    evicted = _any_condition(found.queued, "Evicted")  # false again once Kueue has admitted it again
    by_itself = evicted is not None and not str(evicted.get("reason")).startswith(DEACTIVATED)
    return by_itself or EVICTED in found.queued["metadata"].get("annotations", {})


def withdrawn(found: Found) -> ClusterObject:
    """Return the change of Kueue's Workload by which it is never admitted again, and what runs is ended; it keeps why Kueue evicted it."""
    if not was_evicted(found):
        return {"spec": {"active": False}}
    return {"metadata": {"annotations": {EVICTED: _withdrawal(found)}}, "spec": {"active": False}}


def is_withdrawn(found: Found) -> bool:
    return found.queued is not None and found.queued["spec"].get("active") is False


def _ending(over: ClusterObject, pods: Sequence[ClusterObject]) -> dict[str, Any]:
    ends = [_time(_agent_state(pod).get("finishedAt")) for pod in pods]
    known = [at for at in ends if at is not None]
    changed = _time(over.get("lastTransitionTime"))
    codes = [code for pod in pods if (code := _exit_code(pod))]
    said = EXIT_CODE.search(str(over.get("message")))
    succeeded = over.get("type") == "Complete" or all(pod["status"].get("phase") == "Succeeded" for pod in pods)
    code = codes[0] if codes else _signed(int(said[1])) if said else 0 if succeeded else None
    return {"exit_code": code, "ended_at": max(known) if known and len(known) == len(ends) else changed}


def _end_reason(over: ClusterObject | None, pods: Sequence[ClusterObject]) -> str:
    for pod in pods:
        disrupted, why = _disruption(pod), _agent_state(pod).get("reason")
        if disrupted or pod["status"].get("reason"):
            return _told(disrupted or pod["status"]["reason"], pod["status"].get("message"))
        if why and why not in ("Completed", "Error"):
            return str(why)
    return _told(over.get("reason"), over.get("message")) if over is not None and over["type"] == "Failed" else ""


def _withdrawal(found: Found) -> str:
    """Return why Kueue evicted the workload."""
    assert found.queued is not None
    kept = found.queued["metadata"].get("annotations", {}).get(EVICTED)
    evicted = _any_condition(found.queued, "Evicted") or {}
    return str(kept) if kept is not None else _told(f"Evicted by Kueue ({evicted.get('reason')})", evicted.get("message"))


def _waiting(found: Found, pods: Sequence[ClusterObject]) -> str:
    """Return why not all agents have started: a pod's reason, or why Kueue has not admitted the workload."""
    for pod in pods:
        if (placed := _any_condition(pod, "PodScheduled")) is not None and placed["status"] == "False":
            return _told(placed.get("reason"), placed.get("message"))
        state = _agent_state(pod)
        if "startedAt" not in state and state.get("reason") not in (None, *STARTING):
            return _told(state["reason"], state.get("message"))
    if pods:
        return "ContainerCreating"
    if found.queued is None:
        return "not queued by Kueue yet"
    for kind in ("QuotaReserved", "Admitted"):
        unmet = _any_condition(found.queued, kind)
        if unmet is None or unmet["status"] != "True":
            return _told(f"waits for {kind}", None if unmet is None else unmet.get("message"))
    return "its pods are being made"


def _told(reason: object, message: object) -> str:
    return f"{reason}: {message}" if message else str(reason or "")


def has_ended(pod: ClusterObject) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _is_unanswered(pod: ClusterObject, now: float) -> bool:
    """Whether the pod should have ended, and its node does not say so."""
    until = _time(pod["metadata"].get("deletionTimestamp"))
    return not has_ended(pod) and until is not None and now > until + (0.0 if _is_on_lost_node(pod) else UNANSWERED_S)


def _is_on_lost_node(pod: ClusterObject) -> bool:
    """Whether the cluster has lost the pod's node: it then marks the node's pods as not ready, without the reason that a kubelet gives."""
    ready = _any_condition(pod, "Ready")
    return ready is not None and ready["status"] == "False" and not ready.get("reason")


def _agent_state(pod: ClusterObject) -> ClusterObject:
    """Return what is known of the agent's container: running, terminated or waiting."""
    for container in pod["status"].get("containerStatuses", ()):
        if container["name"] == AGENT:
            found: ClusterObject = next(iter(container.get("state", {}).values()), {})
            return found
    return {}


def _exit_code(pod: ClusterObject) -> int | None:
    code = _agent_state(pod).get("exitCode")
    return None if code is None else _signed(code)


def _signed(code: int) -> int:
    """Return the exit code with a signal as a negative number."""
    return 128 - code if code > 128 else code


def _disruption(pod: ClusterObject) -> str | None:
    found = _condition(pod, "DisruptionTarget")
    return None if found is None else str(found.get("reason"))


def _condition(of: ClusterObject, kind: str) -> ClusterObject | None:
    """Return a condition that holds."""
    found = _any_condition(of, kind)
    return found if found is not None and found["status"] == "True" else None


def _any_condition(of: ClusterObject, kind: str) -> ClusterObject | None:
    return next((c for c in of.get("status", {}).get("conditions", ()) if c["type"] == kind), None)


def _index(pod: ClusterObject) -> int:
    return int(pod["metadata"].get("annotations", {}).get(INDEX, 0))


def _time(text: Any) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None
