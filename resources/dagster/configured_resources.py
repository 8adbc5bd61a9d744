"""A Dagster resource for each external system, so that Dagster's UI shows how the code location is configured.

What may contain a password is bound by the name of its variable, of which the UI shows only the name.
"""

from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from control_plane.platform.protocols import Launcher
from control_plane.platform.settings import load
from resources.launcher import on_kubernetes, open_gangs, open_launcher


class DatabaseResource(dg.ConfigurableResource[None]):
    url: str = Field(description="SQLAlchemy URL of the control plane's PostgreSQL; empty: the embedded one.")


class ObjectStoreResource(dg.ConfigurableResource[None]):
    url: str = Field(description="file:///directory or s3://bucket/prefix.")

    def client_options(self) -> tuple[tuple[str, Any], ...]:
        """Return options of the store's client that its environment does not give."""
        return ()


class LauncherResource(dg.ConfigurableResource[None]):
    directory: str = Field(description="State of this machine's workloads; not used on a cluster.")

    def open(self) -> Launcher:
        return open_launcher(load()) if on_kubernetes() else open_gangs(Path(self.directory))


class TrackerResource(dg.ConfigurableResource[None]):
    uri: str = Field(description="MLflow's tracking store and registry; empty: none.")


class FleetResource(dg.ConfigurableResource[None]):
    urls: list[str] = Field(description="Inference servers.")
