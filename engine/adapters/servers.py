"""A dedicated server for a fully trained model: the objects that run it on a cluster.

An init container fetches its files from the object store and compares them with the registry's sha256, so what is served is what was
evaluated; tokenizer and template come from the base model, whose digest is checked too. The server has access to neither the store nor its
keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import Conflict
from engine.adapters import cluster
from engine.adapters.cluster import ClusterObject, ClusterSettings
from engine.adapters.record import FULL_MODEL, AdapterRecord
from engine.training import ModelShape

SERVER_COMPONENT = "model-server"
MODEL, BASES = "/model", "/base-models"
FETCHES = "resources.inference.fetch_package"
"""Module of the init container."""
ROOM = 4
"""Bytes per parameter on the node: models trained in float32 are stored that way."""


def render_server(
    record: AdapterRecord,
    shape: ModelShape,
    settings: ClusterSettings,
    *,
    context_length: int,
    replicas: int = 1,
    tools: Sequence[str] = (),
) -> list[ClusterObject]:
    """Returns Deployment, Service and NetworkPolicy; `tools` are vLLM's arguments about tools. ``Conflict`` for an adapter, which shares a
    server."""
    if record.type != FULL_MODEL:
        raise Conflict(
            f"{record.id} is an adapter: it is served beside others on the servers of {record.base_model}; promote it",
            code="shares_a_server",
            param="adapter_id",
        )
    name = server_object_name(record)
    context_length = min(context_length, settings.max_model_len)
    gpus = cluster.num_gpus(shape, settings, max_model_len=context_length)
    labels = cluster.labels(SERVER_COMPONENT, name, tenant=record.tenant_id, adapter=record.id, job=record.job_id)
    selects = cluster.label_selector(SERVER_COMPONENT, name)
    traces = {"model": record.name, "manifest_sha256": record.manifest_sha256, "base_model": record.base_model}
    template = cluster.pod(
        settings,
        labels,
        containers=[_server(record, settings, gpus=gpus, context_length=context_length, tools=tools)],
        init=[_fetch(record, settings)],
        volumes=[
            cluster.scratch("model", limit_bytes=shape.num_parameters * ROOM + 2**30),
            cluster.claim("base-models", settings.base_models_claim),
        ],
    )
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}  # new pods are ready before old ones go
    spec = {"replicas": replicas, "selector": {"matchLabels": selects}, "strategy": rolling, "template": template}
    reached = {"selector": selects, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    return [
        cluster.manifest("Deployment", name, settings, labels, spec, api_version="apps/v1", **traces),
        cluster.manifest("Service", name, settings, labels, reached),
        cluster.only_callers(name, settings, labels, selects),
    ]


def server_object_name(record: AdapterRecord) -> str:
    return cluster.kubernetes_name("ft", record.id)


def server_url(record: AdapterRecord, settings: ClusterSettings) -> str:
    """Returns the URL of a whole model's Service."""
    return f"http://{server_object_name(record)}.{settings.namespace}.svc"


def _server(record: AdapterRecord, settings: ClusterSettings, *, gpus: int, context_length: int, tools: Sequence[str]) -> ClusterObject:
    names = (record.name, f"{record.id}@sha256:{record.manifest_sha256}")
    args = ["--model", MODEL, "--served-model-name", *names, "--dtype", "bfloat16", "--max-model-len", str(context_length), *tools]
    args += cluster.TRAINED_PROMPTS
    mounts = [*cluster.SERVER_MOUNTS, cluster.mount("model", MODEL, read_only=True)]
    return cluster.vllm_container(settings, args, gpus=gpus, env={}, mounts=mounts)


def _fetch(record: AdapterRecord, settings: ClusterSettings) -> ClusterObject:
    command = ["python", *fetch_arguments(record, into=MODEL, base_dir=f"{BASES}/{record.base_digest}")]
    env: Mapping[str, str] = {"FT_OBJECT_STORE": settings.object_store, "FT_HOME": "/tmp/ft", "HOME": "/tmp"}
    mounts = [cluster.mount("tmp", "/tmp"), cluster.mount("model", MODEL), cluster.mount("base-models", BASES, read_only=True)]
    made = cluster.pod_container("fetch", settings.platform_image, command=command, env=env, mounts=mounts)
    limits = {"limits": {"cpu": "4", "memory": "4Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}
    return made | {"envFrom": [{"secretRef": {"name": settings.credentials_secret}}], "resources": limits}


def fetch_arguments(record: AdapterRecord, *, into: str, base_dir: str) -> list[str]:
    """Returns the arguments of Python that fetch and verify a whole model's files before its server starts."""
    return [
        "-m", FETCHES, "--prefix", record.object_prefix, "--manifest-sha256", record.manifest_sha256, "--into", into,
        "--base-dir", base_dir, "--base-digest", record.base_digest,
    ]  # fmt: skip
