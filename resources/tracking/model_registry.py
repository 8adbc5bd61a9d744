"""Mirrors the registry to MLflow's registered models, in a short-lived child process.

MLflow takes seconds and a quarter of a gigabyte to import, and an unreachable store blocks its caller; neither is acceptable in a
long-lived process. ``python -m resources.tracking.model_registry`` reads a request from standard input and answers with one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from control_plane.platform.protocols import RegisteredModels, RegisteredVersion
from resources.child_call import call_in_child
from resources.tracking.mlflow_tracker import open_client

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

LIMIT_S = 45.0
"""Time limit of one round: a sensor's tick has a minute. What was written stays, and the next round continues."""
ADAPTER = "ft.adapter"
"""Tag of a version with the id of its adapter."""
MANAGED = ("production", "staging", "previous")
"""Aliases that follow the database; other aliases are left to their owners."""
PAGE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRegistry:
    uri: str
    """Tracking store, which is the registry too: ``sqlite:///...``, ``postgresql+psycopg2://...`` or ``http://...``."""
    limit_s: float = LIMIT_S

    def mirror(self, models: RegisteredModels) -> int:
        """See :class:`control_plane.platform.protocols.ModelRegistry`."""
        order = {"uri": self.uri, "models": asdict(models)}
        answer = call_in_child(
            "resources.tracking.model_registry", order, limit_s=self.limit_s, failure="MLflow did not accept the registered models",
            code="model_registry_unavailable",
        )  # fmt: skip
        return int(answer["changes"])


def synchronize(uri: str, models: RegisteredModels) -> int:
    """Write the differences to MLflow, which this imports, and return the number of changes."""
    client = open_client(uri)
    known = {model.name: dict(model.aliases) for model in search_all(client.search_registered_models)}
    there: dict[tuple[str, str], ModelVersion] = {
        (v.name, v.tags[ADAPTER]): v for v in search_all(client.search_model_versions) if ADAPTER in v.tags
    }
    changes = 0
    for version in models.versions:
        if version.model not in known:
            client.create_registered_model(version.model, tags={"ft.tenant": version.tags["ft.tenant"]})
            known[version.model] = {}
        changes += _version(client, version, there)
    for model, wanted in models.aliases.items():
        changes += _aliases(client, model, known[model], {alias: str(there[model, id_].version) for alias, id_ in wanted.items()})
    return changes


def search_all(search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
    """Yield the results of all pages of a search: querying a thousand models one by one would take a thousand queries."""
    token = None
    while True:
        page = search(max_results=PAGE, page_token=token, **arguments)
        yield from page
        token = page.token
        if not token:
            return


def _version(client: MlflowClient, version: RegisteredVersion, there: dict[tuple[str, str], ModelVersion]) -> int:
    found = there.get((version.model, version.adapter_id))
    if found is None:
        tags = {ADAPTER: version.adapter_id, **version.tags}
        made = client.create_model_version(version.model, version.source, tags=tags, description=version.description)
        there[version.model, version.adapter_id] = made
        return 1
    changed = {k: v for k, v in version.tags.items() if found.tags.get(k) != v}
    for key, value in changed.items():
        client.set_model_version_tag(version.model, found.version, key, value)
    return len(changed)


def _aliases(client: MlflowClient, model: str, present: Mapping[str, Any], wanted: Mapping[str, str]) -> int:
    changes = 0
    for alias in MANAGED:
        now = str(present[alias]) if alias in present else None
        if now == wanted.get(alias):
            continue
        if alias in wanted:
            client.set_registered_model_alias(model, alias, wanted[alias])
        else:
            client.delete_registered_model_alias(model, alias)
        changes += 1
    return changes


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    given = order["models"]
    models = RegisteredModels(versions=[RegisteredVersion(**v) for v in given["versions"]], aliases=given["aliases"])
    sys.stdout.write(json.dumps({"changes": synchronize(order["uri"], models)}) + "\n")


if __name__ == "__main__":
    main()
