"""``/metrics``, for the operator's Prometheus. It names every tenant's jobs, so tenants' keys do not open it."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from control_plane.http.authentication import WholePlatform, bearer
from core.errors import Forbidden

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""A proxy on this machine forwards remote callers, who only appear to be local."""

router = APIRouter(tags=["health"])


def scraper(
    request: Request, platform: WholePlatform, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> None:
    """Admit the holder of ``FT_METRICS_TOKEN``; if it is not set, callers on this machine."""
    token = platform.settings.metrics_token
    if token:
        sent = credentials.credentials if credentials is not None else ""
        allowed, need = hmac.compare_digest(sent.encode(), token.encode()), "send the API's FT_METRICS_TOKEN as bearer token"
    else:
        near = request.client is not None and _is_loopback(request.client.host)
        allowed = near and not any(name in request.headers for name in FORWARDED)
        need = "scrape it on the API's own machine, or set FT_METRICS_TOKEN and send it as bearer token"
    if not allowed:
        raise Forbidden(f"metrics are available to operators only; {need}", code="metrics_forbidden")


@router.get("/metrics", summary="Retrieve metrics for Prometheus", response_class=Response, dependencies=[Depends(scraper)])
def metrics(request: Request) -> Response:
    """Return metrics about requests, jobs, the queue, pools, training, notifications and billing in the Prometheus text format, for
    operators."""
    return Response(generate_latest(request.app.state.exposed), media_type=CONTENT_TYPE_LATEST)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
