"""A Dagster resource for each external system, so that Dagster's UI shows how the code location is configured.

What may contain a password is bound by the name of its variable, of which the UI shows only the name.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from control_plane.platform.protocols import Launcher
from control_plane.platform.settings import Settings, load
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


def configured_resources(settings: Settings) -> dict[str, dg.ConfigurableResource[Any]]:
    """Return the resources that `settings` describe, by their names in the code location."""
    return {
        "database": DatabaseResource(url=_hidden("FT_DATABASE_URL", settings.database_url)),
        **_object_store(settings.object_store),
        "launcher": LauncherResource(directory=str(settings.work_dir / "launcher")),
        "tracker": TrackerResource(uri=_hidden("FT_MLFLOW_URI", settings.mlflow_uri)),
        "fleet": FleetResource(urls=list(settings.inference_urls)),
    }


def _hidden(variable: str, value: str) -> str:
    return dg.EnvVar(variable) if value and os.environ.get(variable) == value else value


def _object_store(url: str) -> dict[str, dg.ConfigurableResource[Any]]:
    if not url.startswith("s3://"):
        return {"objects": ObjectStoreResource(url=url)}
    from resources.dagster.s3_store_resource import S3StoreResource, s3  # boto3 and dagster_aws take 50 MiB, and most stores are local

    client = s3()
    return {"s3": client, "objects": S3StoreResource(url=url, s3=client)}
