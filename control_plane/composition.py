"""The composition root: builds a running platform from settings."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any

from control_plane.adapters.cluster_settings import cluster_settings
from control_plane.billing import prices
from control_plane.capacity import configured_pools
from control_plane.models.catalogue import catalogue_of
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.protocols import IdentityProvider, ModelServers, TenantRecords
from control_plane.platform.secrets import inference_token, oidc_client_secret
from control_plane.platform.settings import Settings
from core.base_models import Catalogue
from core.public_addresses import parse_networks
from resources import object_store
from resources.database.engine import control_plane_url, shared_logins
from resources.inference.fleet_client import SAME_PATHS, HttpFleet, VolumeMount
from resources.inference.local_servers import LocalServers
from resources.launcher import on_kubernetes
from resources.mail import SmtpMailer
from resources.tenant_records import DagsterRecords, MlflowRecords
from resources.tracking.mlflow_tracker import MlflowTracker
from resources.tracking.model_registry import MlflowRegistry
from resources.tracking.wandb_server import HttpWandb
from resources.webhook_sender import HttpWebhookSender


def open_platform(settings: Settings, *, client_options: tuple[tuple[str, Any], ...] = ()) -> Platform:
    """Return the platform that `settings` describe, for the API, the worker, the sensors and the assets.

    `client_options`: options of a bucket's client, as ``boto3.client`` takes them; the environment gives the others.

    Connects to nothing yet. Within a process, equal settings return the same platform, so that its connections are shared; a forked child
    gets its own.
    """
    return _open(os.getpid(), settings, client_options)


@cache
def _open(_pid: int, settings: Settings, client_options: tuple[tuple[str, Any], ...]) -> Platform:
    prices.load(settings.prices_file)  # reports an error in the price lists now, rather than when the first attempt is billed
    configured_pools.configured(settings, utc_now())  # and one in the pools, rather than when the first job is submitted
    models = catalogue_of(settings)
    servers, objects = _servers(settings, models), object_store.of_settings(settings, dict(client_options))
    return Platform(
        logins=shared_logins(control_plane_url(settings)),
        objects=objects,
        models=models,
        fleet=HttpFleet(settings.inference_urls, token=inference_token(settings), volume=adapters_volume(settings))
        if any(settings.inference_urls) or servers is not None
        else None,
        servers=servers,
        settings=settings,
        tracker=MlflowTracker(uri=settings.mlflow_uri, objects=objects) if settings.mlflow_uri else None,
        registry=MlflowRegistry(uri=settings.mlflow_uri) if settings.mlflow_uri else None,
        wandb=HttpWandb(url=settings.wandb_url) if settings.wandb_url else None,
        webhooks=HttpWebhookSender(allowed=parse_networks(settings.webhook_allow)),
        records=_records(settings),
        identity=identity_provider(settings),
        mailer=SmtpMailer(url=settings.smtp_url, sender=settings.smtp_from) if settings.smtp_url else None,
    )


def identity_provider(settings: Settings) -> IdentityProvider | None:
    """Return the provider with which people sign in to the console; None if only keys open it."""
    if not settings.oidc_issuer:
        return None
    from resources.openid_provider import OpenIdProvider  # its libraries take a while to import, and few processes need them

    return OpenIdProvider(
        issuer=settings.oidc_issuer,
        client_id=settings.oidc_client_id,
        client_secret=lambda: oidc_client_secret(settings),
        groups_claim=settings.oidc_groups_claim,
    )


def _servers(settings: Settings, models: Catalogue) -> ModelServers | None:
    """Return what starts inference servers: the cluster whose settings ``FT_CLUSTER`` names, or this machine where it serves itself."""
    if on_kubernetes():
        if settings.cluster_file is None:
            return None
        from resources.inference.kubernetes_servers import KubernetesServers  # the client takes half a second to import
        from resources.launcher.kubernetes_api import KubernetesApi

        configured, max_rank = partial(cluster_settings, settings), settings.max_lora_rank
        return KubernetesServers(connect=KubernetesApi.from_environment, configured=configured, models=models, max_rank=max_rank)
    return LocalServers(settings, models) if settings.embedded_inference else None


def _records(settings: Settings) -> tuple[TenantRecords, ...]:
    found: list[TenantRecords] = [DagsterRecords(settings=settings)]
    if settings.mlflow_uri:
        found.append(MlflowRecords(uri=settings.mlflow_uri))
    if on_kubernetes():
        from resources.launcher import kubernetes_cluster  # the client takes half a second to import

        found.append(kubernetes_cluster.tenants(settings))
    return tuple(found)


def adapters_volume(settings: Settings) -> VolumeMount:
    """Return the adapters' directory as the platform and the servers mount it."""
    there = settings.served_adapters_dir
    return VolumeMount(here=PurePosixPath(settings.adapters_dir), there=there) if there else SAME_PATHS
