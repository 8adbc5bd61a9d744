"""Kubernetes manifests as YAML: ``GET /v1/adapters/{id}/server`` and ``GET /v1/model_routes/{name}/rewrite``."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from control_plane.adapters import manifests
from control_plane.http import parameters
from control_plane.http.authentication import PlatformDep, Reader

YAML = "application/yaml"

router = APIRouter(prefix="/v1", tags=["manifests"])


class Yaml(PlainTextResponse):
    media_type = YAML


@router.get("/adapters/{adapter_id:path}/server", summary="Generate manifests to serve a whole model", response_class=Yaml)
def server(platform: PlatformDep, tenant: Reader, adapter_id: parameters.AdapterId) -> Yaml:
    """Generate Kubernetes manifests for serving a whole model: Deployment, Service and NetworkPolicy."""
    return Yaml(manifests.server(platform, tenant, adapter_id))


@router.get("/model_routes/{name}/rewrite", summary="Generate a manifest for a model route", response_class=Yaml)
def rewrite(platform: PlatformDep, tenant: Reader, name: parameters.RouteName) -> Yaml:
    """Generate a model route as an InferenceModelRewrite manifest for llm-d."""
    return Yaml(manifests.route(platform, tenant, name))
