"""The launcher of a cluster, against an API server that keeps versions, names, finalizers and owners as Kubernetes does."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from core.errors import Conflict, InvalidRequest, Unavailable
from core.telemetry import spans
from core.workload import Workload
from engine.evals.suites.endpoint import JUDGE_KEY, SAFETY_KEY
from resources.launcher import kubernetes_launcher
from resources.launcher.kubernetes_api import KubernetesApi
from resources.launcher.kubernetes_launcher import KubernetesLauncher
from resources.launcher.kubernetes_status import UNANSWERED_S, Found, status_of
from tests.resources.launcher.kubernetes_bench import (
    ABSENT,
    EXITED,
    LOST,
    NAME,
    PENDING,
    POOLS,
    RUNNING,
    TOKEN,
    Bench,
    workload,
)
from tests.support.jobs.followed_jobs import until
from tests.support.kubernetes.kubernetes_nodes import with_condition


def test_a_workload_waits_for_its_quota_then_runs_then_exits_with_times_and_nodes_of_its_pods(bench: Bench) -> None:
    assert bench.launcher.start_or_adopt(workload(num_nodes=2), token=TOKEN).phase is PENDING
    status = bench.get()
    assert (status.phase, status.started_at) == (PENDING, None)
    assert status.reason == "waits for QuotaReserved: couldn't assign flavors: insufficient unused quota"
    assert bench.nodes.pods(NAME) == [], "its pods hold no quota that it was not given"
    assert bench.nodes.admit(NAME)
    bench.nodes.run(NAME, at=1_000_000)
    status = bench.get()
    assert (status.phase, status.started_at, status.nodes, status.broken) == (RUNNING, 1_000_000, ("node-0", "node-1"), False)
    bench.nodes.end(NAME, 1, 0, at=1_000_050)
    assert bench.get().phase is RUNNING, "it runs until all of its agents have ended"
    bench.nodes.end(NAME, 0, 0, at=1_000_070)
    status = bench.get()
    assert (status.phase, status.exit_code, status.started_at, status.ended_at) == (EXITED, 0, 1_000_000, 1_000_070)
    assert not status.evicted


def test_gang_runs_and_is_billed_from_the_start_of_its_last_agent(bench: Bench) -> None:
    bench.launcher.start_or_adopt(workload(num_nodes=2), token=TOKEN)
    bench.nodes.admit(NAME)
    bench.nodes.run(NAME, at=1_000_000, only="1")
    assert bench.get().phase is PENDING
    bench.nodes.run(NAME, at=1_000_030, only="0")
    status = bench.get()
    assert (status.phase, status.started_at) == (RUNNING, 1_000_030)


def test_a_pending_pod_says_why(bench: Bench) -> None:
    bench.launcher.start_or_adopt(workload(), token=TOKEN)
    bench.nodes.admit(NAME)
    assert bench.get().reason == "ContainerCreating"
    bench.nodes.unschedulable(NAME, "0/4 nodes are available: 4 Insufficient nvidia.com/gpu")
    assert (bench.get().phase, bench.get().reason) == (PENDING, "Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu")
    bench.nodes.run(NAME)
    bench.nodes.wait(NAME, "ImagePullBackOff", 'Back-off pulling image "registry.example/ft"')
    assert (bench.get().phase, bench.get().reason) == (PENDING, 'ImagePullBackOff: Back-off pulling image "registry.example/ft"')


def test_the_token_is_in_the_secret_and_nowhere_else_and_no_key_of_the_operator_anywhere(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (spans.HEADERS, JUDGE_KEY, SAFETY_KEY):
        monkeypatch.setenv(name, "a-secret-value")
    bench.launcher.start_or_adopt(workload(num_nodes=2), token=TOKEN)
    bench.nodes.admit(NAME)
    data = {name: base64.b64decode(value).decode() for name, value in bench.secret()["data"].items()}
    assert set(data) == {"token", "workload.json"} and data["token"] == TOKEN
    assert "a-secret-value" not in data["workload.json"]
    assert Workload.from_json(data["workload.json"]) == workload(num_nodes=2), "the agent finds the whole description, by value"
    for key, found in bench.cluster.objects.items():
        if key[0] != "secrets":
            text = json.dumps(found)
            for hidden in (TOKEN, "a-secret-value", *bench.secret()["data"].values()):
                assert hidden not in text, key
    assert len(bench.nodes.pods(NAME)) == 2, "the pods were looked at too"


def test_a_start_sends_four_requests(bench: Bench) -> None:
    bench.cluster.requests.clear()
    assert bench.launcher.start_or_adopt(workload(), token=TOKEN).phase is PENDING
    sent = [f"{method} {path.split('?')[0].split('/')[-1]}" for method, path in bench.cluster.requests]
    assert sent == ["POST configmaps", "POST secrets", "POST jobs", f"PATCH {NAME}"], "the last one gives the Secret its owner"


def test_many_callers_at_once_start_one_workload(bench: Bench) -> None:
    launchers = [bench.another() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda each: each.start_or_adopt(workload(), token=TOKEN), launchers))
    assert {status.phase for status in statuses} == {PENDING}
    assert [bench.created(plural) for plural in ("configmaps", "secrets", "jobs")] == [1, 1, 1]


@pytest.mark.parametrize("plural", ["configmaps", "secrets", "jobs"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_asked_for_again_and_what_was_created_is_adopted(bench: Bench, plural: str, when: str) -> None:
    broken: list[str] = []

    def once(method: str, path: str) -> str | None:
        if method == "POST" and path.endswith(plural) and not broken:
            broken.append(path)
            return when
        return None

    bench.cluster.faults.append(once)
    assert bench.launcher.start_or_adopt(workload(), token=TOKEN).phase is PENDING
    assert broken and bench.created("jobs") == 1
    assert bench.secret()["metadata"]["ownerReferences"][0]["uid"] == bench.nodes.job(NAME)["metadata"]["uid"]


def test_a_workload_outlives_its_caller_and_is_found_by_its_name(bench: Bench) -> None:
    bench.started()
    adopted = bench.another().start_or_adopt(workload(), token="another")
    assert adopted.phase is RUNNING and bench.created("jobs") == 1
    assert base64.b64decode(bench.secret()["data"]["token"]).decode() == TOKEN
    assert bench.another().get("ftjob-2-a1").phase is ABSENT


class Crashed(BaseException):
    """The process of the launcher is killed."""


@pytest.mark.parametrize("method_and_end", ["POST secrets", "POST jobs", "PATCH secrets/ftjob-1-a1"])
def test_a_launcher_that_dies_while_it_starts_leaves_a_workload_that_runs_or_is_lost_and_never_two(
    bench: Bench, method_and_end: str
) -> None:
    method, end = method_and_end.split()

    class Dying(KubernetesApi):
        def _request(self, verb: str, path: str, *given: object, **named: object) -> object:  # type: ignore[override]
            if verb == method and path.endswith(end):
                raise Crashed
            return super()._request(verb, path, *given, **named)  # type: ignore[arg-type]

    dying = KubernetesLauncher(Dying(bench.client), namespace="ft-platform", pools=POOLS)
    with pytest.raises(Crashed):
        dying.start_or_adopt(workload(), token=TOKEN)
    assert bench.get().phase is PENDING
    bench.launcher.start_or_adopt(workload(), token=TOKEN)
    bench.ahead_s = kubernetes_launcher.START_TIMEOUT_S + 5
    has_job = method == "PATCH"
    assert bench.get().phase is (PENDING if has_job else LOST)
    assert [status.phase for status in bench.launcher.list()] == [PENDING if has_job else LOST]
    assert bench.created("jobs") == has_job
    if has_job:
        bench.nodes.admit(NAME)
        bench.nodes.run(NAME)
        bench.nodes.end(NAME, 0, 0)
        until(lambda: bench.get().phase is EXITED, timeout_s=10)
    bench.launcher.forget(NAME)
    assert bench.left("t-acme") == [], "the token is gone, too"
    assert bench.launcher.start_or_adopt(workload(), token=TOKEN).phase is LOST


def test_what_cannot_run_leaves_the_name_unused_and_what_the_cluster_refuses_is_lost(bench: Bench) -> None:
    with pytest.raises(Conflict, match="not pinned by its digest"):
        bench.launcher.start_or_adopt(replace(workload(), image="local"), token=TOKEN)
    with pytest.raises(InvalidRequest, match="which FT_POOLS does not have"):
        bench.launcher.start_or_adopt(workload(pool="gone"), token=TOKEN)
    with pytest.raises(Conflict, match="a Secret holds 1048576"):
        bench.launcher.start_or_adopt(replace(workload(), run={"much": "x" * (1 << 20)}), token=TOKEN)
    assert bench.get().phase is ABSENT
    bench.cluster.delete(("namespaces", "", "t-acme"))
    bench.cluster.settle()
    with pytest.raises(Unavailable, match="namespace t-acme does not exist yet"):
        bench.launcher.start_or_adopt(workload(), token=TOKEN)
    bench.ahead_s = kubernetes_launcher.START_TIMEOUT_S + 5
    assert bench.get().phase is LOST


def test_a_workload_whose_job_is_gone_is_lost_and_never_started_again(bench: Bench) -> None:
    bench.started()
    follower = bench.follower()
    bench.nodes.collect(NAME)
    bench.ahead_s = kubernetes_launcher.START_TIMEOUT_S + 5
    until(lambda: follower.get(NAME).phase is LOST, timeout_s=10)
    for launcher in (follower, bench.launcher):
        assert launcher.get(NAME).phase is LOST
        assert launcher.start_or_adopt(workload(), token=TOKEN).phase is LOST
        assert [(status.name, status.phase) for status in launcher.list()] == [(NAME, LOST)]
    assert bench.created("jobs") == 1
    assert bench.cluster.find("secrets") == [], "the Secret went with the Job that owned it"


def test_a_deleted_job_keeps_its_end_until_it_is_forgotten(bench: Bench) -> None:
    bench.started()
    bench.nodes.end(NAME, 0, 3, at=1_000_000)
    bench.cluster.delete(("jobs", "t-acme", NAME))
    bench.cluster.settle()
    status = bench.get()
    assert (status.phase, status.exit_code, status.ended_at) == (EXITED, 3, 1_000_000)


def test_a_forgotten_name_stays_used_and_only_its_marker_is_left(bench: Bench) -> None:
    bench.started(num_nodes=2)
    bench.launcher.forget(NAME)
    assert bench.get().phase is RUNNING, "one that runs keeps all"
    for number in range(2):
        bench.nodes.end(NAME, number, 0)
    assert len(bench.launcher.list()) == 1
    for _ in range(2):
        bench.launcher.forget(NAME)
        assert bench.launcher.get(NAME).phase is LOST
        assert bench.launcher.start_or_adopt(workload(), token=TOKEN).phase is LOST
        assert bench.launcher.stop(NAME, grace_s=0).phase is LOST
        until(lambda: bench.launcher.list() == [], timeout_s=10)
    assert (bench.left("t-acme"), bench.left("ft-platform")) == ([], [("configmaps", "ft-platform", NAME)])
    bench.launcher.forget("ftjob-9-a1")
    assert bench.launcher.get("ftjob-9-a1").phase is ABSENT


def test_forgetting_goes_on_after_a_crash_and_another_change_of_the_job(bench: Bench) -> None:
    bench.started()
    bench.nodes.end(NAME, 0, 0)
    patches: list[str] = []

    def changed_meanwhile(method: str, path: str) -> str | None:
        if method == "PATCH" and path.endswith(f"jobs/{NAME}"):
            patches.append(path)
            if len(patches) == 1:
                with bench.cluster.lock:
                    job = bench.nodes.job(NAME)
                    labels = {**job["metadata"]["labels"], "seen-by": "an operator"}
                    bench.cluster.update(("jobs", "t-acme", NAME), {**job, "metadata": {**job["metadata"], "labels": labels}})
        return None

    bench.cluster.faults.append(changed_meanwhile)
    bench.launcher.forget(NAME)
    assert len(patches) == 2, "its resource version was checked"
    assert bench.cluster.find("jobs") == [] and bench.cluster.find("pods") == [] and bench.cluster.find("workloads") == []


@pytest.mark.parametrize(
    ("code", "reason", "exit_code", "said"),
    [(137, "OOMKilled", -9, "OOMKilled"), (75, "", 75, "PodFailurePolicy"), (1, "", 1, "PodFailurePolicy")],
)
def test_one_agent_that_fails_ends_the_whole_gang_with_its_exit_code(
    bench: Bench, code: int, reason: str, exit_code: int, said: str
) -> None:
    bench.started(num_nodes=3)
    bench.nodes.on_sigterm = lambda _pod: None
    bench.nodes.end(NAME, 1, code, reason=reason)
    status = bench.get()
    assert (status.phase, status.broken) == (RUNNING, True)
    bench.nodes.on_sigterm = lambda _pod: 0
    assert bench.launcher.stop(NAME, grace_s=1).phase is EXITED
    status = bench.get()
    assert (status.exit_code, status.evicted) == (exit_code, False)
    assert status.reason.startswith(said)
    assert bench.created("pods") == 3, "no pod of a gang is replaced"


def test_a_gang_with_a_pod_that_never_reported_its_end_ended_when_its_job_did(bench: Bench) -> None:
    """What that pod did after the end of the other is not known: until the Job was over it held its GPUs."""
    bench.started(num_nodes=2)
    bench.nodes.on_sigterm = lambda _pod: 0
    bench.nodes.end(NAME, 0, 3, at=1_000_050)
    reported, silent = bench.nodes.pods(NAME)
    silent = {**silent, "status": {"phase": "Failed", "reason": "NodeLost"}}
    over = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "lastTransitionTime": "1970-01-12T13:48:20Z"}
    job = {**bench.nodes.job(NAME), "status": {"conditions": [over]}}
    status = status_of(Found(job=job, pods=[reported, silent], queued=None), now=2_000_000)
    assert (status.phase, status.exit_code, status.ended_at) == (EXITED, 3, 1_000_100)
    both = status_of(Found(job=job, pods=[reported, reported], queued=None), now=2_000_000)
    assert both.ended_at == 1_000_050, "the time is the pods' own once all have reported it"


def test_the_exit_code_is_known_after_the_pods_are_gone(bench: Bench) -> None:
    bench.started()
    bench.nodes.end(NAME, 0, 137, reason="OOMKilled")
    for pod in bench.nodes.pods(NAME):
        bench.cluster.delete(("pods", "t-acme", pod["metadata"]["name"]))
    bench.cluster.settle()
    assert bench.nodes.pods(NAME) == []
    status = bench.get()
    assert (status.phase, status.exit_code) == (EXITED, -9) and status.ended_at is not None
    assert "exit code 137" in status.reason


def test_a_pod_that_the_cluster_takes_away_ends_the_gang_as_evicted(bench: Bench) -> None:
    bench.started(num_nodes=2)
    bench.nodes.on_sigterm = lambda _pod: 143
    bench.nodes.disrupt(NAME, 0, "EvictionByEvictionAPI")
    until(lambda: bench.get().phase is EXITED, timeout_s=10)
    assert bench.created("pods") == 2
    assert bench.nodes.job(NAME)["status"]["conditions"][-1]["message"].endswith("matching FailJob rule at index 0")


def test_a_gang_whose_node_does_not_answer_is_lost_after_its_grace_period(bench: Bench) -> None:
    bench.started(num_nodes=2)
    bench.nodes.lost.add("node-1")
    bench.nodes.disrupt(NAME, 1, "DeletionByTaintManager")
    assert bench.get().broken
    bench.ahead_s = UNANSWERED_S + 5
    status = bench.launcher.stop(NAME, grace_s=0)
    assert (status.phase, status.ended_at, status.evicted) == (LOST, None, False)
    assert status.reason.startswith("DeletionByTaintManager")


def test_a_workload_on_a_node_that_the_cluster_has_lost_is_lost_at_the_end_of_its_grace_period(bench: Bench) -> None:
    bench.started()
    bench.nodes.lose("node-0")
    assert bench.get().phase is RUNNING, "it may only be cut off"
    began = time.monotonic()
    assert bench.launcher.stop(NAME, grace_s=1).phase is LOST
    assert time.monotonic() - began < UNANSWERED_S / 3


def test_a_pod_that_its_kubelet_reports_as_not_ready_may_still_report_its_end(bench: Bench) -> None:
    bench.started()
    bench.nodes.on_sigterm = lambda _pod: None
    (pod,) = bench.nodes.pods(NAME)
    bench.cluster.store(
        ("pods", "t-acme", pod["metadata"]["name"]), with_condition(pod, "Ready", status=False, reason="ContainersNotReady"), "MODIFIED"
    )
    bench.cluster.delete(("pods", "t-acme", pod["metadata"]["name"]), 60)
    bench.ahead_s = 61
    assert bench.get().phase is RUNNING


def test_what_kueue_evicts_is_withdrawn_and_not_started_again(bench: Bench) -> None:
    follower = bench.follower()
    bench.started()
    until(lambda: follower.get(NAME).phase is RUNNING, timeout_s=10)
    bench.nodes.on_sigterm = lambda _pod: None
    bench.nodes.evict(NAME)
    until(lambda: not bench.nodes.queued(NAME)["spec"]["active"], timeout_s=10)
    assert not bench.nodes.admit(NAME)
    assert follower.get(NAME).phase is RUNNING, "its agent saves a checkpoint first"
    for pod in bench.nodes.pods(NAME):
        bench.cluster.delete(("pods", "t-acme", pod["metadata"]["name"]), 0)
    until(lambda: follower.get(NAME).phase not in (PENDING, RUNNING), timeout_s=10)
    until(lambda: bench.nodes.pods(NAME) == [], timeout_s=10)
    status = bench.get()
    assert status.evicted and status.reason == "Evicted by Kueue (Preempted): the quota was lowered"
    assert (bench.condition("Evicted") or {})["reason"] == "Deactivated", "what Kueue says of it now is not why it was evicted"


def test_a_workload_that_kueue_has_admitted_again_is_withdrawn_all_the_same(bench: Bench) -> None:
    bench.started()
    bench.nodes.on_sigterm = lambda _pod: 143
    bench.nodes.evict(NAME)
    until(lambda: bench.nodes.pods(NAME) == [], timeout_s=10)
    assert bench.nodes.admit(NAME), "no launcher looked in between"
    bench.nodes.run(NAME)
    assert bench.get().evicted
    until(lambda: bench.get().phase is LOST or bench.get().phase is EXITED, timeout_s=10)
    assert not bench.nodes.admit(NAME)


def test_a_withdrawn_workload_whose_pods_failed_before_they_started_has_no_exit_code(bench: Bench) -> None:
    """As the pods of a Job that no node had taken are collected."""
    bench.launcher.start_or_adopt(workload(), token=TOKEN)
    bench.nodes.admit(NAME)
    (pod,), queued = bench.nodes.pods(NAME), bench.nodes.queued(NAME)
    withdrawn = {**queued, "spec": {**queued["spec"], "active": False}}
    found = Found(job=bench.nodes.job(NAME), pods=[{**pod, "status": {"phase": "Failed"}}], queued=withdrawn)
    status = status_of(found, now=time.time())
    assert (status.phase, status.exit_code) == (EXITED, None)


def test_stop_withdraws_what_has_not_started(bench: Bench) -> None:
    bench.launcher.start_or_adopt(workload(), token=TOKEN)
    status = bench.launcher.stop(NAME, grace_s=5)
    assert (status.phase, status.evicted) == (LOST, False)
    assert not bench.nodes.admit(NAME)
    assert bench.created("pods") == 0
    assert bench.launcher.stop("ftjob-9-a1", grace_s=0).phase is ABSENT


def test_stop_gives_agents_their_grace_and_then_kills(bench: Bench) -> None:
    bench.started(num_nodes=2)
    bench.nodes.on_sigterm = lambda pod: None if "-0-" in pod["metadata"]["name"] else 0
    began = time.monotonic()
    status = bench.launcher.stop(NAME, grace_s=1)
    assert time.monotonic() - began >= 1.0
    assert status.phase in (EXITED, LOST) and not status.evicted
    until(lambda: bench.nodes.pods(NAME) == [], timeout_s=10)
