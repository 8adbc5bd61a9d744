"""``/v1/chat/completions`` and ``/v1/completions``: the gateway to the inference servers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from control_plane.api import gateway
from control_plane.api.deps import PlatformDep, Reader
from control_plane.service import promotions
from control_plane.service.platform import Platform
from ft_assets.errors import InvalidRequest
from ft_assets.storable import check_storable

router = APIRouter(prefix="/v1", tags=["inference"])


@router.post("/chat/completions")
async def chat_completions(request: Request, platform: PlatformDep, tenant: Reader, body: dict[str, Any]) -> Response:
    """A chat completion by a base model, or by an adapter of the tenant that is in production."""
    return await _complete(request, platform, tenant, "/v1/chat/completions", body)


@router.post("/completions")
async def completions(request: Request, platform: PlatformDep, tenant: Reader, body: dict[str, Any]) -> Response:
    """A plain completion."""
    return await _complete(request, platform, tenant, "/v1/completions", body)


async def _complete(request: Request, platform: Platform, tenant: str, path: str, body: dict[str, Any]) -> Response:
    check_storable(body)
    model = body.get("model")
    if not isinstance(model, str):
        raise InvalidRequest(
            "model is missing; list what you can use with GET /v1/models", code="missing_required_parameter", param="model"
        )
    resolved = await run_in_threadpool(promotions.resolve_model, platform, tenant, model)
    return await gateway.forward(request.app.state.inference, platform.settings.inference_urls, path, {**body, "model": resolved.model})
