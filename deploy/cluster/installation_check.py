"""``python -m deploy.cluster.installation_check``: what ``helm test`` runs.

Checks the API with its database and object store, Dagster's code location and its daemons.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from control_plane.platform.secrets import dagster_token
from control_plane.platform.settings import Settings, load
from deploy.local.readiness import code_loaded, daemons_alive, http_ok
from deploy.local.supervisor.service_spec import Probe


def probes(settings: Settings, dagster_url: str) -> Mapping[str, Probe]:
    """Return the checks by what they are about."""

    def token() -> str:
        return dagster_token(settings)

    return {
        "API, database and object store": http_ok(f"{settings.internal_url}/readyz"),
        "Dagster's code location": code_loaded(dagster_url, token=token),
        "Dagster's daemons": daemons_alive(dagster_url, token=token),
    }


def main() -> int:
    failed = False
    for name, probe in probes(load(), os.environ["FT_DAGSTER_URL"]).items():
        found = probe(0.0)
        print(f"{name}: {'ok' if found.ready else found.detail}")
        failed = failed or not found.ready
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
