"""Erases and searches what Dagster and MLflow record about tenants, each in a short-lived child process.

Their libraries take seconds and hundreds of megabytes to import, and an unreachable store blocks its caller. Neither is acceptable in the
API or another long-lived process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from control_plane.platform.protocols import Search
from control_plane.platform.settings import Settings
from resources.child_call import call_in_child
from resources.database.engine import dagster_url


@dataclass(frozen=True, kw_only=True, slots=True)
class DagsterRecords:
    name: ClassVar[str] = "dagster"
    settings: Settings
    limit_s: float = 600.0
    """Time limit of one call: a search reads every text of the database, at about 50 MB/s."""

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:
        """See :class:`control_plane.platform.protocols.TenantRecords`. Refuses while a run of the tenant is in progress."""
        return _call("resources.dagster.dagster_records", {**self._order("erase", tenant, ids), "budget_s": budget_s}, self.limit_s)

    def search(self, tenant: str, ids: Collection[str]) -> Search:
        """See :class:`control_plane.platform.protocols.TenantRecords`."""
        return Search(**_call("resources.dagster.dagster_records", self._order("search", tenant, ids), self.limit_s))

    def _order(self, call: str, tenant: str, ids: Collection[str]) -> dict[str, Any]:
        home = str(self.settings.home / "dagster")
        return {"call": call, "url": dagster_url(self.settings), "home": home, "tenant": tenant, "ids": sorted(ids)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowRecords:
    name: ClassVar[str] = "mlflow"
    uri: str
    """Tracking store, which is the registry too: ``sqlite:///...``, ``postgresql+psycopg2://...`` or ``http://...``."""
    limit_s: float = 45.0
    """Time limit of one call; partial deletions persist, and the next call continues."""

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:  # noqa: ARG002 - `limit_s` bounds it
        """See :class:`control_plane.platform.protocols.TenantRecords`. All records here have the tenant's tag."""
        return _call("resources.tracking.mlflow_records", {"call": "erase", "uri": self.uri, "tenant": tenant}, self.limit_s)

    def search(self, tenant: str, ids: Collection[str]) -> Search:  # noqa: ARG002
        """See :class:`control_plane.platform.protocols.TenantRecords`."""
        return Search(**_call("resources.tracking.mlflow_records", {"call": "search", "uri": self.uri, "tenant": tenant}, self.limit_s))


def _call(module: str, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    system = module.rpartition(".")[2].removesuffix("_records")
    return call_in_child(module, order, limit_s=limit_s, failure=f"{system} records: no answer")
