"""Objects for a cluster, as YAML: ``GET /v1/adapters/{id}/server`` and ``GET /v1/model_routes/{name}/rewrite``."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from control_plane.adapters import manifests
from control_plane.http.authentication import PlatformDep, Reader

YAML = "application/yaml"

router = APIRouter(prefix="/v1", tags=["manifests"])


class Yaml(PlainTextResponse):
    media_type = YAML


@router.get("/adapters/{adapter_id:path}/server", response_class=Yaml)
def server(platform: PlatformDep, tenant: Reader, adapter_id: str) -> Yaml:
    """A whole model's own server: Deployment, Service and NetworkPolicy."""
    return Yaml(manifests.server(platform, tenant, adapter_id))


@router.get("/model_routes/{name}/rewrite", response_class=Yaml)
def rewrite(platform: PlatformDep, tenant: Reader, name: str) -> Yaml:
    """A route as llm-d's InferenceModelRewrite."""
    return Yaml(manifests.route(platform, tenant, name))
