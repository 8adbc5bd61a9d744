"""The rights that the chart gives for workloads on a cluster: enough for all that the launcher does, and none besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from control_plane.platform.protocols import WorkloadPhase
from control_plane.platform.settings import load
from core.errors import Unavailable
from resources.launcher.kubernetes_api import SECRETS, KubernetesApi
from resources.launcher.kubernetes_launcher import START_TIMEOUT_S, KubernetesLauncher
from resources.launcher.kubernetes_nodes import cordon
from resources.launcher.kubernetes_tenants import TenantNamespaces, bindings
from tests.deploy.helm.rendered_chart import MINIMAL, NAMESPACE, environment, objects
from tests.resources.launcher import test_kubernetes_followers as following
from tests.resources.launcher import test_kubernetes_launcher as launching
from tests.resources.launcher.kubernetes_bench import NAME, POOLS, TOKEN, Bench, Impatient, workload
from tests.resources.launcher.test_kubernetes_tenants import REACHABLE, tenant
from tests.support.jobs.followed_jobs import until
from tests.support.kubernetes.kubernetes_rbac import Rbac

WORKER, RUNS, DAGSTER = ACCOUNTS = load(environment(MINIMAL)).workload_accounts
LIST = list(POOLS.values())


class BoundBench(Bench):
    """The platform's processes, each of which calls as its account; the worker has made the namespace of tenant acme."""

    def __init__(self, stack: ExitStack, rbac: Rbac) -> None:
        self.rbac = rbac
        super().__init__(stack)

    def prepare(self) -> None:
        self.rbac.guard(self.cluster)
        self.apis = {account: KubernetesApi(self.rbac.client(self.client, account)) for account in ACCOUNTS}
        self.client = self.rbac.client(self.client, RUNS)
        self.spaces = TenantNamespaces(connect=lambda: self.apis[WORKER], reachable=REACHABLE, accounts=ACCOUNTS)
        assert self.spaces.keep([tenant("acme", "premium")], LIST) == 1

    def launcher_of(self, account: str) -> KubernetesLauncher:
        made = Impatient(self.apis[account], namespace=NAMESPACE, pools=POOLS, clock=self.clock)
        self.stack.callback(made.close)
        return made

    def another(self) -> KubernetesLauncher:
        """A step starts workloads and adopts them, and the worker lists and forgets them."""
        return self.shared(self.launcher_of(RUNS))

    def follower(self) -> KubernetesLauncher:
        made = self.launcher_of(WORKER)
        made.list()
        return self.shared(made)

    def shared(self, asks: KubernetesLauncher) -> KubernetesLauncher:
        starts, follows = self.launcher_of(RUNS), asks if asks._api is self.apis[WORKER] else self.launcher_of(WORKER)
        made = SimpleNamespace(
            start_or_adopt=starts.start_or_adopt,
            get=asks.get,
            stop=asks.stop,
            list=follows.list,
            forget=follows.forget,
            _jobs=follows._jobs,
        )
        return cast(KubernetesLauncher, made)


@pytest.fixture
def rbac() -> Rbac:
    return Rbac(installed=objects(MINIMAL), namespace=NAMESPACE)


@pytest.fixture
def bench(rbac: Rbac) -> Iterator[BoundBench]:
    with ExitStack() as stack:
        yield BoundBench(stack, rbac)


def stopped_by_dagster(bench: BoundBench) -> None:
    """The daemon gives up a job whose runs keep failing."""
    bench.started()
    bench.nodes.on_sigterm = lambda _pod: 0
    assert bench.launcher_of(DAGSTER).stop(NAME, grace_s=1).phase is not WorkloadPhase.RUNNING
    assert not bench.nodes.admit(NAME)


def deleted_with_its_tenant(bench: BoundBench) -> None:
    bench.started()
    bench.nodes.end(NAME, 0, 0)
    assert len(bench.spaces.search("acme", []).found) == 3
    assert bench.spaces.erase("acme", [], budget_s=10) == {"namespaces": 1, "workload names": 1}
    assert bench.spaces.search("acme", []).found == [], "where no binding is left, either"
    assert not any("acme" in str(key) for key in bench.cluster.objects)


def follows_a_change_of_tier(bench: BoundBench) -> None:
    assert bench.spaces.keep([tenant("acme", "free")], LIST) == 1


def stopped_and_forgotten_by_the_worker(bench: BoundBench) -> None:
    follower = bench.follower()
    bench.started(num_nodes=2)
    until(lambda: follower.get(NAME).phase is WorkloadPhase.RUNNING, timeout_s=10)
    follower.stop(NAME, grace_s=1)
    follower.forget(NAME)
    assert bench.left("t-acme") == []


def forgotten_after_its_start_failed(bench: BoundBench) -> None:
    bench.cluster.faults.append(lambda method, path: "before" if method == "POST" and path.endswith("/jobs") else None)
    with pytest.raises(Unavailable):
        bench.launcher.start_or_adopt(workload(num_nodes=2), token=TOKEN)
    bench.ahead_s = START_TIMEOUT_S + 5
    assert [(status.name, status.phase) for status in bench.launcher.list()] == [(NAME, WorkloadPhase.LOST)]
    bench.launcher.forget(NAME)
    assert (bench.left("t-acme"), bench.left(NAMESPACE)) == ([], [("configmaps", NAMESPACE, NAME)])


def adopts_what_an_earlier_try_created(bench: BoundBench, account: str) -> None:
    """A step starts trainings and evaluations, the worker starts exports."""
    broken: list[str] = []
    bench.cluster.faults.append(
        lambda method, path: "after" if method == "POST" and path not in broken and not broken.append(path) else None  # type: ignore[func-returns-value]
    )
    assert bench.launcher_of(account).start_or_adopt(workload(num_nodes=2), token=TOKEN).phase is WorkloadPhase.PENDING
    assert {path.rpartition("/")[2] for path in broken} == {"configmaps", "secrets", "networkpolicies", "jobs"}


def cordons_drained_nodes(bench: BoundBench) -> None:
    bench.cluster.create("nodes", "", {"kind": "Node", "metadata": {"name": "gpu-0"}, "spec": {}})
    assert cordon(bench.apis[WORKER], {"gpu-0"}) == 1


CLAIMS: tuple[Callable[[BoundBench], None], ...] = (
    launching.test_a_workload_waits_for_its_quota_then_runs_then_exits_with_times_and_nodes_of_its_pods,
    launching.test_many_callers_at_once_start_one_workload,
    partial(adopts_what_an_earlier_try_created, account=RUNS),
    partial(adopts_what_an_earlier_try_created, account=WORKER),
    forgotten_after_its_start_failed,
    launching.test_a_workload_outlives_its_caller_and_is_found_by_its_name,
    *(
        partial(
            launching.test_a_launcher_that_dies_while_it_starts_leaves_a_workload_that_runs_or_is_lost_and_never_two, method_and_end=when
        )
        for when in ("POST secrets", "POST jobs", f"PATCH secrets/{NAME}")
    ),
    launching.test_a_workload_whose_job_is_gone_is_lost_and_never_started_again,
    launching.test_a_forgotten_name_stays_used_and_only_its_marker_is_left,
    launching.test_forgetting_goes_on_after_a_crash_and_another_change_of_the_job,
    launching.test_a_gang_whose_node_does_not_answer_is_lost_after_its_grace_period,
    launching.test_what_kueue_evicts_is_withdrawn_and_not_started_again,
    launching.test_a_workload_that_kueue_has_admitted_again_is_withdrawn_all_the_same,
    launching.test_stop_withdraws_what_has_not_started,
    launching.test_stop_gives_agents_their_grace_and_then_kills,
    partial(following.test_a_follower_whose_watch_breaks_misses_nothing, too_old=True),
    stopped_and_forgotten_by_the_worker,
    stopped_by_dagster,
    follows_a_change_of_tier,
    cordons_drained_nodes,
    deleted_with_its_tenant,
)
"""Claims about the launcher and tenants' objects."""


@pytest.mark.slow
def test_each_account_may_do_all_that_it_does_and_uses_each_of_its_rights(rbac: Rbac) -> None:
    for claim in CLAIMS:
        with ExitStack() as stack:
            claim(BoundBench(stack, rbac))
    of_dagster_itself = "Role ft-ft-platform-runs"
    assert {right for right in rbac.unused(ACCOUNTS) if right.role != of_dagster_itself} == set()
    assert rbac.used


def test_a_tenants_objects_are_applied_although_bindings_take_effect_later(rbac: Rbac) -> None:
    rbac.effective_after_s = 0.4
    with ExitStack() as stack:
        bench = BoundBench(stack, rbac)
        assert bench.cluster.find("localqueues", "t-acme") and bench.cluster.find("networkpolicies", "t-acme")


def test_a_workload_of_a_new_tenant_waits_for_the_rights_of_its_namespace(bench: BoundBench) -> None:
    theirs = replace(workload(), tenant="bolt")
    with pytest.raises(Unavailable, match="forbidden"):
        bench.launcher.start_or_adopt(theirs, token=TOKEN)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(bench.launcher.start_or_adopt, replace(theirs, name="ftjob-2-a1"), token=TOKEN)
        until(lambda: ("configmaps", NAMESPACE, "ftjob-2-a1") in bench.cluster.objects, timeout_s=10)
        assert bench.spaces.keep([tenant("bolt", "premium")], LIST) == 1
        assert started.result().phase is WorkloadPhase.PENDING


@pytest.mark.parametrize("account", ACCOUNTS)
def test_no_account_reaches_secrets_where_nothing_is_bound_or_binds_another_role(bench: BoundBench, account: str) -> None:
    api = bench.apis[account]
    for namespace in (NAMESPACE, "kube-system", ""):
        with pytest.raises(Unavailable, match="forbidden"):
            api.list(SECRETS, namespace, labels="")
    (binding,) = bindings("acme", [account], namespace=NAMESPACE)
    for role in ("cluster-admin", "ft-ft-platform-kueue"):
        other = {**binding, "metadata": {**binding["metadata"], "name": "more"}, "roleRef": {**binding["roleRef"], "name": role}}
        with pytest.raises(Unavailable, match="forbidden"):
            api.apply(other)
    assert len(bench.cluster.find("rolebindings")) == len(ACCOUNTS)


def test_a_namespace_that_is_deleted_by_hand_keeps_its_bindings_until_its_jobs_are_forgotten(bench: BoundBench) -> None:
    bench.started()
    follower = bench.follower()
    bench.nodes.on_sigterm = lambda _pod: 0
    bench.cluster.delete(("namespaces", "", "t-acme"))
    bench.cluster.settle()
    acme = [tenant("acme", "premium")]
    until(lambda: follower.get(NAME).phase is WorkloadPhase.EXITED, timeout_s=10)
    assert bench.spaces.keep(acme, LIST) == 0
    assert len(bench.cluster.find("rolebindings", "t-acme")) == len(ACCOUNTS), "the end of its Job can still be read"
    follower.forget(NAME)
    assert bench.spaces.keep(acme, LIST) == 0
    bench.cluster.settle()
    assert bench.cluster.find("namespaces", selector="ft-platform/tenant") == []
    assert bench.spaces.keep(acme, LIST) == 1
