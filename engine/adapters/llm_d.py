"""Pools and routes for llm-d: many adapters on one base behind an inference gateway, and a tenant's traffic weights between versions.

A pool is a StatefulSet of vLLM with the platform's plugin, whose replicas the platform reaches by name, and an InferencePool over its pods:
the endpoint picker sends a request to the replica that has its adapter and its prefix in memory; for a new adapter the plugin finds it in
the index. A route is an InferenceModelRewrite: requests for the tenant's own name are distributed by weight. Such a route draws anew for
each request; the platform's own gateway keeps a caller on one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.base_models import ENGINE_RANKS, MAX_RANK
from engine.adapters import cluster, serving_index
from engine.adapters.cluster import ClusterObject, ClusterSettings
from engine.training import ModelShape

POOL_COMPONENT = "adapter-pool"
BASE, ADAPTERS = "/base-model", "/adapters"
POOL_GROUP, REWRITE_GROUP = "inference.networking.k8s.io", "inference.networking.x-k8s.io"
PLUGINS = "ft_adapter_index,ft_base_rows,ft_free_on_unload,ft_trained_prompts,ft_fair_turns"
"""Only the plugins of ``deploy/vllm``: vLLM's own file resolver follows ``..`` in names."""
MAX_WEIGHT = 1_000_000
LONGEST_NAME = 52
"""Length of a StatefulSet's name: a label of its pods holds its name, a hyphen and a hash, in 63 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPool:
    """Servers of one base model."""

    base_model: str
    base_digest: str
    shape: ModelShape
    context_length: int
    replicas: int = 2
    max_loras: int = 8
    """Adapters in one batch: each has a slot on the GPU."""
    max_cpu_loras: int = 256
    """Adapters that a replica holds in memory. At least as many as are loaded: others are read from disk under traffic."""
    max_rank: int = MAX_RANK
    tools: tuple[str, ...] = ()
    """Arguments about tools."""
    picker: str = "ft-endpoint-picker"
    """Service of the endpoint picker, in the same namespace."""
    picker_port: int = 9002

    def __post_init__(self) -> None:
        if self.max_rank not in ENGINE_RANKS:
            raise ValueError(f"max_rank {self.max_rank} is not one that vLLM can be started with: {', '.join(map(str, ENGINE_RANKS))}")
        if not 1 <= self.max_loras <= self.max_cpu_loras:
            raise ValueError(f"max_loras {self.max_loras} is outside 1..max_cpu_loras ({self.max_cpu_loras}); raise max_cpu_loras")

    @property
    def name(self) -> str:
        """Digest of the bytes, not the model's id alone: servers of an updated base are a pool of their own."""
        return cluster.kubernetes_name("ft-pool", self.base_model, self.base_digest[:12], longest=LONGEST_NAME)


def pool_environment(pool: AdapterPool, settings: ClusterSettings) -> dict[str, str]:
    """Environment variables with which the platform manages this pool; URLs of further pools go into the same variable."""
    return {"FT_INFERENCE_URLS": ",".join(pool_urls(pool, settings)), "FT_SERVED_ADAPTERS_DIR": ADAPTERS}


def pool_urls(pool: AdapterPool, settings: ClusterSettings) -> list[str]:
    """Returns the URL of each replica, which stays when its pod is replaced."""
    return [f"http://{pool.name}-{number}.{pool.name}.{settings.namespace}.svc:{cluster.PORT}" for number in range(pool.replicas)]


def render_pool(pool: AdapterPool, settings: ClusterSettings) -> list[ClusterObject]:
    """Returns a StatefulSet with its headless Service, NetworkPolicy and InferencePool."""
    labels = cluster.labels(POOL_COMPONENT, pool.name, base_model=pool.base_model, base_digest=pool.base_digest[:12])
    selects = cluster.label_selector(POOL_COMPONENT, pool.name)
    traces = {"base_model": pool.base_model, "base_digest": pool.base_digest}
    template = cluster.pod(
        settings,
        labels,
        containers=[_server(pool, settings)],
        volumes=[cluster.claim("base-models", settings.base_models_claim), cluster.claim("adapters", settings.adapters_claim)],
    )
    pods = {  # with stable names; all start at once, and an update replaces them one by one
        "replicas": pool.replicas, "serviceName": pool.name, "podManagementPolicy": "Parallel", "selector": {"matchLabels": selects},
        "updateStrategy": {"type": "RollingUpdate"}, "template": template,
    }  # fmt: skip
    names = {  # a DNS name for each pod, from its start on: callers test whether it answers
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": selects,
        "ports": [{"name": "http", "port": cluster.PORT, "targetPort": "http"}],
    }  # fmt: skip
    picked = {
        "selector": {"matchLabels": selects},
        "targetPorts": [{"number": cluster.PORT}],
        "endpointPickerRef": {"name": pool.picker, "port": {"number": pool.picker_port}, "failureMode": "FailClose"},
    }
    return [
        cluster.manifest("Service", pool.name, settings, labels, names),
        cluster.manifest("StatefulSet", pool.name, settings, labels, pods, api_version="apps/v1", **traces),
        cluster.only_callers(pool.name, settings, labels, selects),
        cluster.manifest("InferencePool", pool.name, settings, labels, picked, api_version=f"{POOL_GROUP}/v1", **traces),
    ]


def _server(pool: AdapterPool, settings: ClusterSettings) -> ClusterObject:
    slots = pool.max_loras * pool.shape.lora_parameters(pool.max_rank) * cluster.WEIGHT_BYTES
    max_model_len = min(pool.context_length, settings.max_model_len)
    gpus = cluster.num_gpus(pool.shape, settings, max_model_len=max_model_len, adapters_bytes=slots)
    args = [
        "--model", BASE, "--served-model-name", pool.base_model, f"{pool.base_model}@sha256:{pool.base_digest}", "--dtype", "bfloat16",
        "--max-model-len", str(max_model_len), "--enable-lora", "--max-loras", str(pool.max_loras), "--max-cpu-loras",
        str(pool.max_cpu_loras), "--max-lora-rank", str(pool.max_rank), *cluster.TRAINED_PROMPTS, *pool.tools,
    ]  # fmt: skip
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": PLUGINS,
        "FT_ADAPTER_INDEX": f"{ADAPTERS}/{serving_index.index_filename(pool.base_digest)}",
        "FT_BASE_DIGEST": pool.base_digest,
    }
    mounts = [
        *cluster.SERVER_MOUNTS,
        cluster.mount("base-models", BASE, read_only=True, sub_path=pool.base_digest),
        cluster.mount("adapters", ADAPTERS, read_only=True),
    ]
    return cluster.vllm_container(settings, args, gpus=gpus, env=env, mounts=mounts)


def render_route(*, tenant: str, name: str, targets: Sequence[tuple[str, int]], pool: str, settings: ClusterSettings) -> ClusterObject:
    """Returns a route that distributes requests for ``<tenant>/<name>`` between `targets`: the models' names on the servers of `pool`, with
    their weights.

    The tenant is part of what is matched: a rewrite holds for the whole pool, and two tenants may use the same name. The proxy in front of
    the gateway must add it, because it knows the caller.
    """
    shares = [(model, weight) for model, weight in targets if weight > 0]
    if not shares:
        raise ValueError(f"route {name!r} has no target with a weight above 0; give one a weight")
    if over := [weight for _, weight in shares if weight > MAX_WEIGHT]:
        raise ValueError(f"weight {over[0]} exceeds {MAX_WEIGHT}; only their relation matters, so lower all of them")
    made = cluster.kubernetes_name("ft-route", tenant, name)
    rule = {
        "matches": [{"model": {"type": "Exact", "value": f"{tenant}/{name}"}}],
        "targets": [{"modelRewrite": model, "weight": weight} for model, weight in shares],
    }
    spec = {"poolRef": {"group": POOL_GROUP, "kind": "InferencePool", "name": pool}, "rules": [rule]}
    labels = cluster.labels("route", made, tenant=tenant)
    return cluster.manifest("InferenceModelRewrite", made, settings, labels, spec, api_version=f"{REWRITE_GROUP}/v1alpha2")
