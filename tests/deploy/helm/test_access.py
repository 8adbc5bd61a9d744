"""Who may do what on the cluster, and who reaches whom."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster_k8s.client
import pytest

from control_plane.capacity import kueue
from control_plane.platform.settings import load
from engine.adapters import llm_d
from engine.adapters.cluster import ClusterSettings
from engine.scheduler.pools import Pool, equal_nodes
from engine.training.model_shapes import ModelShape
from resources.launcher.kubernetes_tenants import DNS
from tests.control_plane.api.test_authorization_matrix import TABLE as EVERY_ROUTE
from tests.deploy.helm.dagster_pods import launcher, pod_of, run_job, step_job
from tests.deploy.helm.rendered_chart import EVERYTHING, FILES, MINIMAL, NAMESPACE, OFF, Pod, configuration, environment, of_kind, pods

RUNS = {"app.kubernetes.io/name": "ft-platform", "app.kubernetes.io/instance": "ft", "app.kubernetes.io/component": "runs"}
"""Labels of the pods of runs and steps."""
ANYWHERE = {
    "ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]}
}


IN_TENANTS = {"ft-ft-platform-worker", "ft-ft-platform-runs", "ft-ft-platform-dagster"}
"""ClusterRoles that the worker binds in tenants' namespaces, named as the accounts that get them."""


@pytest.mark.parametrize("name", FILES)
def test_no_rule_has_a_wildcard_and_secrets_are_reached_in_tenants_namespaces_only(name: str) -> None:
    found = [made for kind in ("Role", "ClusterRole") for made in of_kind(name, kind).values()]
    assert len(found) >= 8
    for role in found:
        for rule in role["rules"]:
            assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not {"escalate", "impersonate", "deletecollection"} & set(rule["verbs"])
            assert "bind" not in rule["verbs"] or set(rule["resourceNames"]) == IN_TENANTS
            if "secrets" in rule["resources"]:
                assert role["kind"] == "ClusterRole" and role["metadata"]["name"] in IN_TENANTS


@pytest.mark.parametrize("name", FILES)
def test_the_chart_binds_rights_in_tenants_namespaces_nowhere_and_names_them_to_the_worker(name: str) -> None:
    bindings = [*of_kind(name, "RoleBinding").values(), *of_kind(name, "ClusterRoleBinding").values()]
    bound = {b["roleRef"]["name"] for b in bindings if b["roleRef"]["kind"] == "ClusterRole"}
    assert bound and not bound & IN_TENANTS
    accounts = load(environment(name)).workload_accounts
    assert set(accounts) == IN_TENANTS
    assert set(accounts) <= of_kind(name, "ServiceAccount").keys() & of_kind(name, "ClusterRole").keys()


def test_only_kueues_queues_tenants_namespaces_and_nodes_are_written_in_the_whole_cluster() -> None:
    bindings = of_kind(EVERYTHING, "ClusterRoleBinding")
    assert {name: [s["name"] for s in binding["subjects"]] for name, binding in bindings.items()} == {
        "ft-ft-platform-doctor": ["ft-ft-platform-doctor"], "ft-ft-platform-kueue": ["ft-ft-platform-kueue"],
        "ft-ft-platform-tenants": ["ft-ft-platform-worker"],
    }  # fmt: skip
    written = {
        resource
        for rule in of_kind(EVERYTHING, "ClusterRole")["ft-ft-platform-tenants"]["rules"]
        for resource in rule["resources"]
        if not set(rule["verbs"]) <= {"get", "list", "watch", "bind"}
    }
    assert written == {"namespaces", "rolebindings", "nodes"}
    (rule,) = of_kind(EVERYTHING, "ClusterRole")["ft-ft-platform-kueue"]["rules"]
    pool = Pool(name="small", nodes=equal_nodes(8, prefix="s"), gpu_type="h100-80gb", max_gpus_per_job=8)
    plurals = {"Topology": "topologies", "WorkloadPriorityClass": "workloadpriorityclasses"}
    assert set(rule["resources"]) == {plurals.get(made["kind"], f"{made['kind'].lower()}s") for made in kueue.render([pool])}
    assert set(rule["verbs"]) == {"create", "get", "list", "patch"}
    read = {verb for rule in of_kind(EVERYTHING, "ClusterRole")["ft-ft-platform-doctor"]["rules"] for verb in rule["verbs"]}
    assert read == {"get", "list"}
    assert of_kind(OFF, "ClusterRoleBinding").keys() == {"ft-ft-platform-doctor", "ft-ft-platform-tenants"}


def test_dagsters_role_permits_just_what_its_client_calls() -> None:
    source = inspect.getsource(dagster_k8s.client)
    calls = re.findall(r"(?:batch|core)_api\.([a-z]+)_namespaced_([a-z_]+)", source)
    assert len(set(calls)) >= 8
    parts = {"job_status": "jobs/status", "pod_log": "pods/log"}
    called = {("get" if verb == "read" else verb, parts.get(noun, f"{noun}s")) for verb, noun in calls}
    rules = of_kind(MINIMAL, "Role")["ft-ft-platform-runs"]["rules"]
    assert {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]} == called


@pytest.mark.parametrize("name", FILES)
def test_accounts_exist_and_mount_no_token_by_themselves(name: str) -> None:
    accounts = of_kind(name, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    assert {pod.spec["serviceAccountName"] for pod in pods(name)} - {"default"} <= accounts.keys()
    assert configuration(name, "dagster.yaml")["run_launcher"]["config"]["service_account_name"] in accounts
    for binding in (*of_kind(name, "RoleBinding").values(), *of_kind(name, "ClusterRoleBinding").values()):
        assert {(s["kind"], s["namespace"]) for s in binding["subjects"]} == {("ServiceAccount", NAMESPACE)}
        assert {s["name"] for s in binding["subjects"]} <= accounts.keys()


def test_pods_of_runs_have_the_labels_that_the_policies_select(tmp_path: Path) -> None:
    made_by = launcher(MINIMAL, tmp_path)
    for job in (run_job(made_by), step_job(made_by, "train")):
        assert RUNS.items() <= pod_of(job).labels.items()


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    tests = {
        "In": lambda e: labels.get(e["key"]) in e["values"],
        "Exists": lambda e: e["key"] in labels,
    }
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(tests[e["operator"]](e) for e in selector.get("matchExpressions", []))


def rules(name: str, labels: dict[str, str], direction: str) -> list[dict[str, Any]]:
    """The rules that hold for a pod with `labels`."""
    policies = (p["spec"] for p in of_kind(name, "NetworkPolicy").values())
    return [rule for p in policies if matches(p["podSelector"], labels) for rule in p.get(direction, [])]


def callers(name: str, to: Pod) -> dict[str, list[int]]:
    """The components of the platform that are let in to a pod, with the ports."""
    found: dict[str, list[int]] = {}
    for rule in rules(name, to.labels, "ingress"):
        for pod in everyone(name):
            if any(
                "podSelector" in peer and "namespaceSelector" not in peer and matches(peer["podSelector"], pod) for peer in rule["from"]
            ):
                found.setdefault(pod["app.kubernetes.io/component"], []).extend(p["port"] for p in rule["ports"])
    return found


def everyone(name: str) -> list[dict[str, str]]:
    return [*(pod.labels for pod in pods(name)), RUNS]


def components(name: str, allowed: Callable[[dict[str, str]], bool]) -> set[str]:
    return {labels["app.kubernetes.io/component"] for labels in everyone(name) if allowed(labels)}


def one(name: str, component: str) -> Pod:
    return next(pod for pod in pods(name) if pod.component == component)


@pytest.mark.parametrize("name", [name for name in FILES if name != OFF])
def test_what_no_policy_allows_is_denied(name: str) -> None:
    denied = of_kind(name, "NetworkPolicy")["ft-ft-platform-default-deny"]["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_without_policies_there_are_none() -> None:
    assert not of_kind(OFF, "NetworkPolicy")


def test_the_platforms_pods_are_let_in_where_they_call() -> None:
    assert callers(MINIMAL, one(MINIMAL, "api")).keys() == components(MINIMAL, bool)
    assert callers(MINIMAL, one(MINIMAL, "dagster")) == {"daemon": [3000], "test": [3000]}
    assert callers(MINIMAL, one(MINIMAL, "code-location")) == {"dagster": [3030], "daemon": [3030]}
    for component in ("worker", "daemon", "migrations"):
        assert rules(MINIMAL, one(MINIMAL, component).labels, "ingress") == []


def test_from_a_tenants_namespace_only_the_api_is_reached() -> None:
    tenant = {kueue.TENANT_LABEL: "acme"}
    reached = set()
    for labels in everyone(EVERYTHING):
        for rule in rules(EVERYTHING, labels, "ingress"):
            if any(matches(peer["namespaceSelector"], tenant) for peer in rule["from"] if "namespaceSelector" in peer):
                reached.add((labels["app.kubernetes.io/component"], *(p["port"] for p in rule["ports"])))
    assert reached == {("api", 8000)}


def test_the_ingress_controller_reaches_the_api_and_dagster_and_prometheus_the_api() -> None:
    def reached(namespace: str) -> set[str]:
        peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
        return components(EVERYTHING, lambda labels: any(peer in rule["from"] for rule in rules(EVERYTHING, labels, "ingress")))

    assert reached("ingress-nginx") == {"api", "dagster"}
    assert reached("monitoring") == {"api"}


def test_the_ingress_publishes_the_public_api_and_no_endpoint_that_is_for_callers_in_the_cluster() -> None:
    (ingress,) = of_kind(EVERYTHING, "Ingress").values()
    (paths,) = [rule["http"]["paths"] for rule in ingress["spec"]["rules"] if rule["host"] == "ft.example.com"]
    exact = {path["path"] for path in paths if path["pathType"] == "Exact"}
    below = tuple(f"{path['path']}/" for path in paths if path["pathType"] == "Prefix")
    every = {entry.split()[1] for entry in EVERY_ROUTE}
    hidden = {path for path in every if path not in exact and not path.startswith(below)}
    internal = {path for path in every if path.startswith("/internal/")}
    assert internal and hidden == internal | {"/favicon.ico", "/livez", "/metrics", "/readyz"}


def test_only_the_api_the_worker_and_runs_reach_the_internet() -> None:
    outbound = components(MINIMAL, lambda labels: any(ANYWHERE in rule.get("to", []) for rule in rules(MINIMAL, labels, "egress")))
    assert outbound == {"api", "worker", "runs"}


def test_the_kubernetes_api_is_reached_by_the_pods_with_a_token() -> None:
    peer = {"ipBlock": {"cidr": "10.96.0.1/32"}}
    reaching = components(EVERYTHING, lambda labels: any(peer in rule.get("to", []) for rule in rules(EVERYTHING, labels, "egress")))
    assert reaching == {pod.component for pod in pods(EVERYTHING) if pod.spec["automountServiceAccountToken"]} | {"runs"}


def test_configured_addresses_are_the_only_ones_of_database_and_object_store() -> None:
    found = rules(EVERYTHING, one(EVERYTHING, "daemon").labels, "egress")
    assert {"ports": [{"port": 6432}], "to": [{"ipBlock": {"cidr": "10.1.2.0/24"}}]} in found
    assert {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "10.1.3.0/24"}}]} in found
    assert not [rule for rule in found if "to" not in rule]


@pytest.mark.parametrize("name", [name for name in FILES if name != OFF])
def test_names_are_resolved_as_in_tenants_namespaces(name: str) -> None:
    """Neither by a server on the internet."""
    policy = of_kind(name, "NetworkPolicy")["ft-ft-platform-names-and-objects"]["spec"]
    assert policy["podSelector"] == {}
    ports = {(port["protocol"], port["port"]) for port in DNS["ports"]}
    (found,) = [rule for rule in policy["egress"] if {(port.get("protocol", "TCP"), port["port"]) for port in rule["ports"]} == ports]
    assert found["to"] == DNS["to"]


def test_model_servers_in_the_namespace_fetch_their_files_and_are_called() -> None:
    settings = ClusterSettings(**configuration(EVERYTHING, "cluster.yaml"))
    shape = ModelShape(
        num_layers=16, hidden=2048, num_heads=32, num_kv_heads=8, head_dim=64, intermediate=8192, vocab=128_256, tied_embeddings=True,
        context_length=8192,
    )  # fmt: skip
    pool = llm_d.AdapterPool(base_model="llama", base_digest="0" * 64, shape=shape, context_length=8192)
    (server,) = (made for made in llm_d.render_pool(pool, settings) if made["kind"] == "StatefulSet")
    labels = server["spec"]["template"]["metadata"]["labels"]
    assert any(rule["ports"] == [{"port": 443}] for rule in rules(EVERYTHING, labels, "egress"))
    for caller in ("api", "worker", "test"):
        called = [r for r in rules(EVERYTHING, one(EVERYTHING, caller).labels, "egress") if {"port": 8000} in r["ports"]]
        assert any(matches(peer["podSelector"], labels) for rule in called for peer in rule["to"] if "podSelector" in peer)
