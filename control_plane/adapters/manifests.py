"""Kubernetes manifests from the registry: a server for a whole model, a pool for a base, a rewrite for a route."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from control_plane.adapters import service as adapters
from control_plane.adapters.cluster_settings import cluster_settings
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from core.base_models import MAX_RANK, BaseModel
from core.errors import Conflict, FtError, InvalidRequest
from engine.adapters import (
    FULL_MODEL,
    AdapterPool,
    AdapterRecord,
    ClusterObject,
    ClusterSettings,
    objects_yaml,
    pool_environment,
    render_pool,
    render_route,
    render_server,
)
from engine.data import ChatTokenizer, rendered_call
from engine.training import ModelShape, shape_of

PARSERS: Mapping[str, str] = {
    r"<tool_call>\s*<function=": "qwen3_coder",
    r"<tool_call>\w+\s*<arg_key>": "glm45",
    r"<tool_call>\s*\{": "hermes",
    r"\[TOOL_CALLS\]": "mistral",
    r"<\|tool_call\|>\s*\[": "granite",
    r"<\uff5ctool\u2581calls\u2581begin\uff5c>.*?```json": "deepseek_v3",
    r"<\uff5ctool\u2581calls\u2581begin\uff5c>": "deepseek_v31",
    r"<\|tool_call>call:": "gemma4",
    r"<\|tool_call_start\|>\[": "lfm2",
    r"to=functions\.": "openai",
    r"\s*\{\s*\"name\": *\"\w+\", *\"parameters\"": "llama3_json",
}
"""Parsers of vLLM 0.32 (``--tool-call-parser``) by the beginning of a call, in order. A form that none of them reads gives no parser: the
server then refuses `tools`, as vLLM does without ``--enable-auto-tool-choice``."""


def server(platform: Platform, tenant: str, reference: str) -> str:
    """Return the YAML of a whole model's own server; ``Conflict`` for an adapter, which needs none."""
    record = adapters.get_adapter(platform, tenant, reference)
    return objects_yaml(server_objects(record, platform.models.card(record.base_model), cluster_settings(platform.settings)))


def server_objects(record: AdapterRecord, base: BaseModel, settings: ClusterSettings) -> list[ClusterObject]:
    """Return the objects of a whole model's server; ``Conflict`` if it has none on this cluster."""
    try:
        return render_server(record, _shape(base), settings, context_length=base.context_length, tools=tool_flags(base.directory))
    except ValueError as e:
        raise Conflict(f"model {record.id} has no server on this cluster: {e}", code="invalid_cluster") from e


def pool(platform: Platform, model: str, *, replicas: int = 2, max_loras: int = 8, max_cpu_loras: int = 256) -> str:
    """Return the YAML of the servers of a base model in its present state; the first lines say what to configure on the platform."""
    base = platform.models.card(model)
    settings = cluster_settings(platform.settings)
    rank = platform.settings.max_lora_rank
    requested = pool_of(base, replicas=replicas, max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_rank=rank)
    return _settings_comment(requested, settings) + objects_yaml(pool_objects(requested, settings))


def pool_objects(pool: AdapterPool, settings: ClusterSettings) -> list[ClusterObject]:
    """Return the objects of a base model's servers."""
    try:
        return render_pool(pool, settings)
    except ValueError as e:
        raise InvalidRequest(f"no pool for {pool.base_model}: {e}", code="invalid_cluster") from e


def pool_of(base: BaseModel, *, replicas: int = 2, max_loras: int = 8, max_cpu_loras: int = 256, max_rank: int = MAX_RANK) -> AdapterPool:
    """Return the pool of a base model's present bytes."""
    try:
        return AdapterPool(
            base_model=base.id, base_digest=base.digest, shape=_shape(base), context_length=base.context_length, replicas=replicas,
            max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_rank=max_rank, tools=tuple(tool_flags(base.directory)),
        )  # fmt: skip
    except ValueError as e:
        raise InvalidRequest(f"no pool for {base.id}: {e}", code="invalid_cluster") from e


def _settings_comment(pool: AdapterPool, settings: ClusterSettings) -> str:
    lines = [
        f"the platform's processes, in namespace {settings.namespace}: claim {settings.adapters_claim} (ReadWriteMany) at",
        "<FT_HOME>/work/adapters, and",
        *(f"{name}={value}" for name, value in pool_environment(pool, settings).items()),
    ]
    return "".join(f"# {line}\n" for line in lines)


def route(platform: Platform, tenant: str, name: str) -> str:
    """Return the YAML of a route as an InferenceModelRewrite; its targets must share a base, because a rewrite applies to one pool."""
    targets = model_routes.get(platform, tenant, name).targets
    if whole := [target.model for target in targets if target.adapter is not None and target.adapter.type == FULL_MODEL]:
        raise Conflict(
            f"route {name!r} has the whole model {whole[0]} as a target, which is in no pool; call it through this API, or leave it out",
            code="route_over_bases",
            param="name",
        )
    bases = sorted({target.base_model for target in targets})
    if len(bases) != 1:
        raise Conflict(
            f"route {name!r} has targets on {', '.join(bases)}, and a rewrite holds within one pool; make a route for each base model",
            code="route_over_bases",
            param="name",
        )
    made = render_route(
        tenant=tenant,
        name=name,
        targets=[(t.model, t.weight) for t in targets],
        pool=pool_of(platform.models.card(bases[0])).name,
        settings=cluster_settings(platform.settings),
    )
    return objects_yaml([made])


@cache  # callers look up the URLs of pools for every request
def _shape(base: BaseModel) -> ModelShape:
    return shape_of(base.id, directory=base.directory, repo=base.repo, num_parameters=base.num_parameters)


def tool_flags(directory: Path | None) -> list[str]:
    """Returns vLLM's arguments for the tools of a model directory; none if its calls are not read, or its files are not here."""
    parser = None if directory is None or not (directory / "tokenizer.json").is_file() else _parser(directory)
    return [] if parser is None else ["--enable-auto-tool-choice", "--tool-call-parser", parser]


@lru_cache(maxsize=64)
def _parser(directory: Path) -> str | None:
    """Returns the parser of a model directory; its files do not change while a process runs, as its digest is pinned."""
    try:
        text = rendered_call(ChatTokenizer.load(directory))
    except FtError:
        return None  # a template that cannot be used; requests are refused with its fault
    return None if text is None else next((name for pattern, name in PARSERS.items() if re.search(pattern, text, re.DOTALL)), None)
