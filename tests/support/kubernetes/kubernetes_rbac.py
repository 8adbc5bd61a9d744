"""Authorization as Kubernetes does it, by roles and their bindings; it records which rights were used."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kubernetes.client import ApiClient, Configuration

from tests.support.kubernetes.kubernetes_api import Action, Cluster, Object, token_of


@dataclass(frozen=True, order=True, slots=True)
class Right:
    role: str
    """Kind and name."""
    verb: str
    group: str
    resource: str
    name: str = ""
    """Of the only object that it covers; empty: all."""

    def covers(self, action: Action) -> bool:
        same = (self.verb, self.group, self.resource) == (action.verb, action.group, action.resource)
        return same and self.name in ("", action.name)


def rights_of(role: Object) -> Iterator[Right]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [""]):
                        yield Right(f"{role['kind']} {role['metadata']['name']}", verb, group, resource, name)


@dataclass(kw_only=True)
class Rbac:
    """Rights in a cluster: by installed roles and bindings, and by the bindings that are created in the cluster."""

    installed: Sequence[Object]
    namespace: str
    """Of installed objects, and of the accounts."""
    used: set[Right] = field(default_factory=set)
    effective_after_s: float = 0.0
    """Seconds after which a binding that is created in the cluster takes effect."""
    _seen_at: dict[str, float] = field(default_factory=dict)

    def guard(self, cluster: Cluster) -> None:
        """Permit in `cluster` only what the roles allow; its administrator is not asked."""
        cluster.permits = lambda account, action: self._permits(cluster, account, action)

    def client(self, administrator: ApiClient, account: str) -> ApiClient:
        """Return a client that calls as a service account."""
        settings = Configuration(host=administrator.configuration.host)
        settings.api_key["authorization"] = f"Bearer {token_of(account)}"
        return ApiClient(settings)

    def unused(self, accounts: Sequence[str]) -> set[Right]:
        """Return the rights of roles that are bound to `accounts`, or are named as they are, and that nothing has used."""
        bound = {binding["roleRef"]["name"] for binding in self._bindings() if _binds(binding, accounts)}
        granted = {right for role in self._roles() if role["metadata"]["name"] in {*bound, *accounts} for right in rights_of(role)}
        return granted - self.used

    def _permits(self, cluster: Cluster, account: str, action: Action) -> bool:
        """Whether a role permits `action`; of several rights the one that holds in the whole cluster counts as used."""
        for binding in (*self._bindings(), *self._created(cluster)):
            space = binding["metadata"].get("namespace", self.namespace) if binding["kind"] == "RoleBinding" else action.namespace
            if space == action.namespace and _binds(binding, [account]):
                for right in rights_of(self._role(binding["roleRef"])):
                    if right.covers(action):
                        self.used.add(right)
                        return True
        return False

    def _bindings(self) -> list[Object]:
        return sorted((made for made in self.installed if made["kind"].endswith("RoleBinding")), key=lambda made: str(made["kind"]))

    def _created(self, cluster: Cluster) -> list[Object]:
        now, found = time.monotonic(), cluster.find("rolebindings")
        return [made for made in found if now >= self._seen_at.setdefault(made["metadata"]["uid"], now) + self.effective_after_s]

    def _roles(self) -> list[Object]:
        return [made for made in self.installed if made["kind"] in ("Role", "ClusterRole")]

    def _role(self, reference: Object) -> Object:
        return next(role for role in self._roles() if (role["kind"], role["metadata"]["name"]) == (reference["kind"], reference["name"]))


def _binds(binding: Object, accounts: Sequence[str]) -> bool:
    return any(subject["kind"] == "ServiceAccount" and subject["name"] in accounts for subject in binding["subjects"])
