"""What Dagster and MLflow record about tenants, behind one seam: each is opened by a process of its own, which ends when it is done.

Their libraries take seconds and hundreds of megabytes to import, and a store that is away keeps its caller waiting: neither is for the API
or for a process that stays.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from control_plane.platform.protocols import Search
from control_plane.platform.settings import Settings
from ft_assets.errors import Unavailable
from ft_assets.telemetry.redaction import without_credentials
from resources.database.engine import dagster_url


@dataclass(frozen=True, kw_only=True, slots=True)
class DagsterRecords:
    name: ClassVar[str] = "dagster"
    settings: Settings
    limit_s: float = 600.0
    """Of one call: a search reads every text of the database, about 50 MB a second."""

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:
        """See :class:`control_plane.platform.protocols.TenantRecords`. Refuses while a run of the tenant works."""
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
    """Of one call; what was deleted until then stays deleted, and the next call goes on."""

    def erase(self, tenant: str, ids: Collection[str], *, budget_s: float) -> Mapping[str, int]:  # noqa: ARG002 - `limit_s` bounds it
        """See :class:`control_plane.platform.protocols.TenantRecords`. Everything that is recorded here has the tenant's tag."""
        return _call("resources.tracking.mlflow_records", {"call": "erase", "uri": self.uri, "tenant": tenant}, self.limit_s)

    def search(self, tenant: str, ids: Collection[str]) -> Search:  # noqa: ARG002
        """See :class:`control_plane.platform.protocols.TenantRecords`."""
        return Search(**_call("resources.tracking.mlflow_records", {"call": "search", "uri": self.uri, "tenant": tenant}, self.limit_s))


def _call(module: str, order: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The answer of ``python -m module`` to `order`, which goes to its standard input: it may hold a password."""
    command, system = [sys.executable, "-m", module], module.rpartition(".")[2].removesuffix("_records")
    try:
        done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as e:
        raise Unavailable(f"records of {system}: no answer within {limit_s:.0f} s; the next round goes on") from e
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"records of {system}: {without_credentials(last)[:300]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
