"""What the admission policy lets the worker's account do, decided by evaluating the chart's own expressions for requests."""

from __future__ import annotations

from typing import Any

import celpy
import pytest

from control_plane.capacity import kueue
from resources.launcher.kubernetes_nodes import CORDONED
from resources.launcher.kubernetes_tenants import bindings
from tests.deploy.helm.rendered_chart import FILES, MINIMAL, NAMESPACE, Manifest, of_kind

POLICY = "ft-ft-platform-worker"
WORKER = f"system:serviceaccount:{NAMESPACE}:ft-ft-platform-worker"
SPACE = kueue.render_tenant("acme", "free", [])[0]
BINDINGS = bindings("acme", ["ft-ft-platform-worker", "ft-ft-platform-runs", "ft-ft-platform-dagster"], namespace=NAMESPACE)
KUBE_SYSTEM: Manifest = {"metadata": {"name": "kube-system", "labels": {"kubernetes.io/metadata.name": "kube-system"}}}
NODE: Manifest = {"metadata": {"name": "gpu-1", "labels": {"a": "b"}, "annotations": {"c": "d"}}, "spec": {"taints": [{"key": "gpu"}]}}


def changed(base: Manifest, **parts: Any) -> Manifest:
    """Return `base` with some of its parts replaced, or added to where both are mappings."""
    return base | {key: {**base.get(key, {}), **part} if isinstance(part, dict) else part for key, part in parts.items()}


def refusals(resource: str, operation: str, *, new: Manifest | None = None, old: Manifest | None = None, space: Manifest | None = None,
             user: str = WORKER) -> list[str]:  # fmt: skip
    """Return the messages of the rules that a request breaks, as an API server evaluates them."""
    spec = of_kind(MINIMAL, "ValidatingAdmissionPolicy")[POLICY]["spec"]
    covered = any(resource in rule["resources"] and operation in rule["operations"] for rule in spec["matchConstraints"]["resourceRules"])
    request = {"resource": {"resource": resource}, "operation": operation, "userInfo": {"username": user}}
    given = {"request": request, "object": new, "oldObject": old, "namespaceObject": space}

    def evaluate(expression: str, variables: dict[str, Any]) -> Any:
        environment = celpy.Environment()
        values = {name: celpy.json_to_cel(value) for name, value in {**given, "variables": variables}.items()}
        return environment.program(environment.compile(expression)).evaluate(values)

    if not covered or not all(evaluate(one["expression"], {}) for one in spec["matchConditions"]):
        return []
    variables = {one["name"]: evaluate(one["expression"], {}) for one in spec["variables"]}
    return [rule["message"] for rule in spec["validations"] if not evaluate(rule["expression"], variables)]


@pytest.mark.parametrize("name", FILES)
def test_the_policy_denies_and_fails_closed(name: str) -> None:
    policy, bound = of_kind(name, "ValidatingAdmissionPolicy")[POLICY], of_kind(name, "ValidatingAdmissionPolicyBinding")[POLICY]
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert bound["spec"] == {"policyName": POLICY, "validationActions": ["Deny"]}


@pytest.mark.parametrize("bound", BINDINGS, ids=lambda bound: bound["metadata"]["name"])
def test_the_worker_keeps_a_tenants_namespace_and_its_bindings(bound: Manifest) -> None:
    assert refusals("namespaces", "CREATE", new=SPACE) == []
    assert refusals("namespaces", "UPDATE", new=changed(SPACE, metadata={"annotations": {"a": "b"}}), old=SPACE) == []
    assert refusals("namespaces", "DELETE", old=SPACE) == []
    for operation in ("CREATE", "UPDATE"):
        assert refusals("rolebindings", operation, new=bound, old=bound, space=SPACE) == []


@pytest.mark.parametrize("space", [KUBE_SYSTEM, {"metadata": {"name": "default"}}, {"metadata": {"name": NAMESPACE, "labels": {}}}])
def test_the_worker_binds_no_role_outside_tenants_namespaces(space: Manifest) -> None:
    for operation in ("CREATE", "UPDATE"):
        assert "only in namespaces with the label" in refusals("rolebindings", operation, new=BINDINGS[0], old=None, space=space)[0]


BAD_BINDINGS = {
    "another role": changed(BINDINGS[0], roleRef={"name": "cluster-admin"}),
    "a Role of that name": changed(BINDINGS[0], roleRef={"kind": "Role"}),
    "a user": changed(BINDINGS[0], subjects=[{"kind": "User", "name": "ft-ft-platform-worker", "namespace": NAMESPACE}]),
    "an account of another namespace": changed(BINDINGS[0], subjects=[{**BINDINGS[0]["subjects"][0], "namespace": "t-acme"}]),
    "the account of another role": changed(BINDINGS[0], subjects=BINDINGS[1]["subjects"]),
    "a second account": changed(BINDINGS[0], subjects=[*BINDINGS[0]["subjects"], *BINDINGS[1]["subjects"]]),
}


@pytest.mark.parametrize("bad", BAD_BINDINGS)
def test_the_worker_binds_only_the_platforms_roles_to_their_own_accounts(bad: str) -> None:
    assert "only the platform's roles" in refusals("rolebindings", "CREATE", new=BAD_BINDINGS[bad], space=SPACE)[0]


LABELS: Manifest = SPACE["metadata"]["labels"]


def labelled(**changes: str) -> Manifest:
    return changed(SPACE, metadata={"labels": LABELS | changes})


NAMESPACES = {
    "a name of the platform's choice": ("CREATE", changed(SPACE, metadata={"name": "kube-system"}), None),
    "a tenant's name without its label": ("CREATE", changed(SPACE, metadata={"labels": {}}), None),
    "no labels": ("CREATE", {"metadata": {"name": "t-acme"}}, None),
    "the label of another tenant": ("UPDATE", labelled(**{kueue.TENANT_LABEL: "b"}), SPACE),
    "pods without restrictions": ("UPDATE", labelled(**{"pod-security.kubernetes.io/enforce": "privileged"}), SPACE),
    "a namespace made a tenant's": ("UPDATE", SPACE, {"metadata": {"name": "t-acme"}}),
    "deleting another namespace": ("DELETE", None, KUBE_SYSTEM),
}


@pytest.mark.parametrize("bad", NAMESPACES)
def test_the_worker_changes_no_other_namespace(bad: str) -> None:
    operation, new, old = NAMESPACES[bad]
    assert refusals("namespaces", operation, new=new, old=old)


def test_the_worker_cordons_nodes_and_changes_nothing_else_of_them() -> None:
    cordoned = changed(NODE, metadata={"labels": {"a": "b", CORDONED: "true"}}, spec={"unschedulable": True})
    assert refusals("nodes", "UPDATE", new=cordoned, old=NODE) == refusals("nodes", "UPDATE", new=NODE, old=cordoned) == []
    bad = [
        changed(NODE, metadata={"labels": {"a": "other"}}),
        changed(NODE, metadata={"labels": {}}),
        changed(NODE, metadata={"labels": {"a": "b", "ft-platform/pool": "x"}}),
        changed(NODE, metadata={"annotations": {}}),
        changed(NODE, spec={"taints": []}),
        {"metadata": NODE["metadata"], "spec": {}},
    ]
    for new in bad:
        assert len(refusals("nodes", "UPDATE", new=new, old=NODE)) == 1
    bare: Manifest = {"metadata": {"name": "gpu-2"}, "spec": {}}
    assert refusals("nodes", "UPDATE", new=changed(bare, spec={"unschedulable": True}), old=bare) == []


def test_the_policy_leaves_other_accounts_alone() -> None:
    for user in ("system:admin", "system:serviceaccount:other:ft-ft-platform-worker", f"{WORKER}-2"):
        assert refusals("namespaces", "DELETE", old=KUBE_SYSTEM, user=user) == []
