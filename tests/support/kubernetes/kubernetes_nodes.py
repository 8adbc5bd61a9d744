"""What acts on a cluster's objects: the Job controller, Kueue, and nodes whose containers a test starts and ends."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from copy import deepcopy

from tests.support.kubernetes.kubernetes_api import Cluster, Key, Object, timestamp

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
TERMINAL = ("Succeeded", "Failed")


def condition(found: Object, kind: str) -> Object | None:
    return next((c for c in found["status"].get("conditions", ()) if c["type"] == kind), None)


def holds(found: Object, kind: str) -> bool:
    return (found_ := condition(found, kind)) is not None and found_["status"] == "True"


def with_condition(found: Object, kind: str, *, status: bool = True, reason: str = "", message: str = "") -> Object:
    others = [c for c in found["status"].get("conditions", ()) if c["type"] != kind]
    made = {"type": kind, "status": str(status), "reason": reason, "message": message, "lastTransitionTime": timestamp()}
    return {**found, "status": {**found["status"], "conditions": [*others, made]}}


def is_over(job: Object) -> bool:
    return holds(job, "Complete") or holds(job, "Failed")


class Nodes:
    """The cluster's machines and controllers, as a test drives them. Pods stay pending until :meth:`run` starts them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.on_sigterm: Callable[[Object], int | None] = lambda _pod: 0
        """Exit code with which a container ends when it is asked to; None: it goes on until it is killed."""
        self.lost: set[str] = set()
        """Machines that do not answer."""
        cluster.controllers += [self._jobs, self._kueue]
        cluster.deleting = self._deleting
        cluster.create("namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ft-platform"}})

    # What a test does

    def job(self, name: str) -> Object:
        return next(job for job in self.cluster.find("jobs") if job["metadata"]["name"] == name)

    def pods(self, name: str) -> list[Object]:
        return [pod for pod in self.cluster.find("pods") if pod["metadata"]["labels"]["job-name"] == name]

    def queued(self, name: str) -> Object:
        uid = self.job(name)["metadata"]["uid"]
        return next(each for each in self.cluster.find("workloads") if each["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == uid)

    def admit(self, name: str) -> bool:
        """Kueue has room for the Job; False if it may not admit it."""
        with self.cluster.lock:
            queued = self.queued(name)
            if not queued["spec"]["active"] or holds(queued, "Finished"):
                return False
            for kind in ("QuotaReserved", "Admitted"):
                queued = with_condition(queued, kind, reason=kind)
            if condition(queued, "Evicted"):
                queued = with_condition(queued, "Evicted", status=False, reason="QuotaReserved")
            self._store(queued)
            self._change(self.job(name), {"suspend": False})
            return True

    def evict(self, name: str, *, reason: str = "Preempted", message: str = "the quota was lowered") -> None:
        """Kueue takes the nodes back and queues the workload again."""
        with self.cluster.lock:
            queued = with_condition(self.queued(name), "Evicted", reason=reason, message=message)
            self._store(with_condition(queued, "QuotaReserved", status=False, reason="Pending", message="couldn't assign flavors"))
            self._change(self.job(name), {"suspend": True})

    def run(self, name: str, *, at: float | None = None, only: str = "") -> None:
        """The pods of a Job, or the one whose number is `only`, are placed, each on a machine of its own, and their containers start."""
        with self.cluster.lock:
            for pod in self.pods(name):
                number = pod["metadata"]["annotations"][INDEX]
                if pod["spec"].get("nodeName") or only not in ("", number):
                    continue
                running = {"running": {"startedAt": timestamp(at)}}
                placed = with_condition({**pod, "spec": {**pod["spec"], "nodeName": f"node-{number}"}}, "PodScheduled")
                self._store(self._with_state(placed, running, "Running"))

    def wait(self, name: str, reason: str, message: str = "") -> None:
        """The container of a Job's first pod cannot start yet."""
        self._store(self._with_state(self.pods(name)[0], {"waiting": {"reason": reason, "message": message}}, "Pending"))

    def unschedulable(self, name: str, message: str) -> None:
        self._store(with_condition(self.pods(name)[0], "PodScheduled", status=False, reason="Unschedulable", message=message))

    def end(self, name: str, number: int, code: int, *, reason: str = "", at: float | None = None) -> None:
        """The container of one pod ends by itself."""
        self._exit(self.pods(name)[number], code, reason, at)

    def disrupt(self, name: str, number: int, reason: str) -> None:
        """The cluster takes one pod away."""
        with self.cluster.lock:
            pod = with_condition(self.pods(name)[number], "DisruptionTarget", reason=reason, message=f"{reason} of the pod")
            self._store(pod)
            if any(each["metadata"]["uid"] == pod["metadata"]["uid"] for each in self.pods(name)):
                self.cluster.delete(self._key(pod))
            self.cluster.settle()

    def lose(self, machine: str) -> None:
        """A machine does not answer any more, and the cluster has noticed."""
        with self.cluster.lock:
            self.lost.add(machine)
            for pod in self.cluster.find("pods"):
                if pod["spec"].get("nodeName") == machine:
                    self._store(with_condition(pod, "Ready", status=False))

    def collect(self, name: str) -> None:
        """An administrator removes the Job, whatever its finalizers say."""
        with self.cluster.lock:
            job = self.job(name)
            self.cluster.update(
                self._key(job), {**job, "metadata": {**job["metadata"], "finalizers": [], "deletionTimestamp": timestamp()}}
            )
            self.cluster.settle()

    # The kubelet

    def _deleting(self, found: Object, grace_s: int) -> bool:
        """Ask a pod's container to end; whether the object can go."""
        if found["kind"] != "Pod" or found["status"].get("phase") in TERMINAL:
            return True
        if found["spec"].get("nodeName") in self.lost:
            return False
        if "nodeName" not in found["spec"]:
            key = self._key(found)
            self.cluster.objects[key] = {**found, "metadata": {**found["metadata"], "finalizers": []}}
            return True
        if grace_s >= 0:
            code = self.on_sigterm(found)
            after_s = grace_s if code is None else 0.05
            threading.Timer(after_s, self._exit, (found, 137 if code is None else code)).start()
        return False

    def _exit(self, pod: Object, code: int, reason: str = "", at: float | None = None) -> None:
        with self.cluster.lock:
            pod = self.cluster.objects.get(self._key(pod), pod)
            if self._key(pod) not in self.cluster.objects or pod["status"].get("phase") in TERMINAL:
                return
            began = next(iter(pod["status"]["containerStatuses"][0]["state"].values())).get("startedAt")
            ended = {
                "exitCode": code,
                "reason": reason or ("Completed" if code == 0 else "Error"),
                "startedAt": began,
                "finishedAt": timestamp(at),
            }
            self._store(self._with_state(pod, {"terminated": ended}, "Failed" if code else "Succeeded"))

    def _with_state(self, pod: Object, state: Object, phase: str) -> Object:
        statuses = [{"name": pod["spec"]["containers"][0]["name"], "state": state}]
        return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": statuses}}

    # The Job controller

    def _jobs(self) -> None:
        for job in self.cluster.find("jobs"):
            self._job(job)

    def _job(self, job: Object) -> None:
        pods = [pod for pod in self.cluster.find("pods") if pod["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]]
        ended = [pod for pod in pods if pod["status"].get("phase") in TERMINAL]
        left = [pod for pod in pods if pod not in ended]
        before, job = job, deepcopy(job)
        status = job["status"]
        if not is_over(job):
            done = set(status.get("done", ())) | {
                int(p["metadata"]["annotations"][INDEX]) for p in ended if p["status"]["phase"] == "Succeeded"
            }
            status |= {"active": len(left), "done": sorted(done)}
            failed = next((pod for pod in ended if pod["status"]["phase"] == "Failed"), None)
            if failed is not None and not holds(job, "FailureTarget") and not job["spec"]["suspend"]:
                job = with_condition(job, "FailureTarget", reason="PodFailurePolicy", message=_why(job, failed))
            if holds(job, "FailureTarget") and not left:
                target = condition(job, "FailureTarget") or {}
                job = with_condition(job, "Failed", reason=target["reason"], message=target["message"])
            elif len(done) == job["spec"]["completions"]:
                job = with_condition(job, "Complete", reason="CompletionsReached")
            elif "deletionTimestamp" not in job["metadata"] and not holds(job, "FailureTarget") and not job["spec"]["suspend"]:
                present = {int(pod["metadata"]["annotations"][INDEX]) for pod in pods}
                for number in set(range(job["spec"]["completions"])) - present - done:
                    self._make_pod(job, number)
        if job != before:
            self.cluster.update(self._key(job), job)
        if job["spec"]["suspend"] or holds(job, "FailureTarget"):
            for pod in left:
                if "deletionTimestamp" not in pod["metadata"]:
                    self.cluster.delete(self._key(pod))
        for pod in ended:
            if TRACKING in pod["metadata"].get("finalizers", ()):
                current = self.cluster.objects[self._key(pod)]
                self.cluster.update(self._key(pod), {**current, "metadata": {**current["metadata"], "finalizers": []}})

    def _make_pod(self, job: Object, number: int) -> None:
        template, name = job["spec"]["template"], job["metadata"]["name"]
        about = deepcopy(template["metadata"])
        about["annotations"] = {**about.get("annotations", {}), INDEX: str(number)}
        about["labels"] = {**about["labels"], "job-name": name, INDEX: str(number)}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
        about |= {"name": f"{name}-{number}-{uuid.uuid4().hex[:5]}", "finalizers": [TRACKING], "ownerReferences": [owner]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": deepcopy(template["spec"]), "status": {"phase": "Pending"}}
        self.cluster.create("pods", job["metadata"]["namespace"], pod)

    # Kueue

    def _kueue(self) -> None:
        made = {each["metadata"]["labels"]["kueue.x-k8s.io/job-uid"]: each for each in self.cluster.find("workloads")}
        for job in self.cluster.find("jobs"):
            queued = made.get(job["metadata"]["uid"])
            if queued is None and QUEUE in job["metadata"]["labels"] and "deletionTimestamp" not in job["metadata"]:
                self._queue(job)
            elif queued is not None:
                self._keep(job, queued)
        jobs = {job["metadata"]["uid"] for job in self.cluster.find("jobs")}
        for uid, queued in made.items():
            if uid not in jobs and queued["metadata"].get("finalizers"):
                self.cluster.update(self._key(queued), {**queued, "metadata": {**queued["metadata"], "finalizers": []}})

    def _queue(self, job: Object) -> None:
        about = job["metadata"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": about["name"], "uid": about["uid"], "controller": True}
        metadata = {
            "name": f"job-{about['name']}-{uuid.uuid4().hex[:5]}", "labels": {"kueue.x-k8s.io/job-uid": about["uid"]},
            "ownerReferences": [owner], "finalizers": ["kueue.x-k8s.io/resource-in-use"],
        }  # fmt: skip
        made = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": metadata, "status": {}}
        made["spec"] = {"queueName": about["labels"][QUEUE], "active": True}
        made = with_condition(
            made, "QuotaReserved", status=False, reason="Pending", message="couldn't assign flavors: insufficient unused quota"
        )
        self.cluster.create("workloads", about["namespace"], made)

    def _keep(self, job: Object, queued: Object) -> None:
        if is_over(job) and not holds(queued, "Finished"):
            self.cluster.update(self._key(queued), with_condition(queued, "Finished", reason="JobFinished"))
        elif not queued["spec"]["active"] and not is_over(job) and (condition(queued, "Evicted") or {}).get("reason") != "Deactivated":
            self.cluster.update(
                self._key(queued), with_condition(queued, "Evicted", reason="Deactivated", message="The workload is deactivated")
            )
            self.cluster.update(self._key(job), {**job, "spec": {**job["spec"], "suspend": True}})

    def _key(self, found: Object) -> Key:
        plural = {"Job": "jobs", "Pod": "pods", "Workload": "workloads"}[found["kind"]]
        return plural, found["metadata"]["namespace"], found["metadata"]["name"]

    def _store(self, found: Object) -> None:
        with self.cluster.lock:
            self.cluster.update(self._key(found), found)
            self.cluster.settle()

    def _change(self, found: Object, spec: Object) -> None:
        self._store({**found, "spec": {**found["spec"], **spec}})


def _why(job: Object, pod: Object) -> str:
    """Say which rule of the Job's policy a failed pod matches."""
    about = f"pod {pod['metadata']['namespace']}/{pod['metadata']['name']}"
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    for number, rule in enumerate(job["spec"]["podFailurePolicy"]["rules"]):
        if any(holds(pod, wanted["type"]) for wanted in rule.get("onPodConditions", ())):
            return f"P{about[1:]} has condition DisruptionTarget matching FailJob rule at index {number}"
        if "onExitCodes" in rule and ended["exitCode"] not in rule["onExitCodes"]["values"]:
            container = pod["spec"]["containers"][0]["name"]
            return f"Container {container} for {about} failed with exit code {ended['exitCode']} matching FailJob rule at index {number}"
    raise AssertionError(json.dumps(job["spec"]["podFailurePolicy"]))
