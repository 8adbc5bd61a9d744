"""What routes are given: the platform, and the tenant of a key that holds the scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from control_plane.service import tenants
from control_plane.service.platform import Actor, Platform
from control_plane.tenants import Principal, Scope
from ft_assets.errors import InvalidRequest, Unauthenticated

MAX_USER_AGENT = 200

bearer = HTTPBearer(auto_error=False, description="An API key: ft-sk-...")


def platform_of(request: Request) -> Platform:
    platform: Platform = request.app.state.platform
    return platform


WholePlatform = Annotated[Platform, Depends(platform_of)]
"""The platform in no tenant's scope: for routes that are nobody's (health, metrics) and those of operators."""


def storable_url(request: Request) -> None:
    """Refuse a NUL in an id or a query; other bytes that are not UTF-8 were replaced when the URL was decoded."""
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidRequest("the URL holds a NUL character (%00); remove it", code="invalid_id")


def caller(platform: WholePlatform, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]) -> Principal:
    """Whoever holds the key that was sent."""
    if credentials is None or not credentials.credentials:
        raise Unauthenticated("no API key was sent; send the header Authorization: Bearer ft-sk-...", code="missing_api_key")
    return tenants.authenticate(platform, credentials.credentials)


def _scoped(request: Request, platform: WholePlatform, principal: Annotated[Principal, Depends(caller)]) -> Platform:
    actor = Actor(
        kind="key",
        id=principal.key_id,
        ip=request.client.host if request.client else None,
        user_agent=request.headers.get("user-agent", "")[:MAX_USER_AGENT],
        request_id=request.state.request_id,
    )
    return platform.in_scope_of(principal.tenant.id, actor)


PlatformDep = Annotated[Platform, Depends(_scoped)]
"""The platform in the scope of the caller's tenant: row security hides every other's rows."""


def _principal_with(scope: Scope) -> Callable[..., Principal]:
    def principal(found: Annotated[Principal, Depends(caller)]) -> Principal:
        found.require(scope)
        return found

    return principal


def _tenant_with(scope: Scope) -> Callable[..., str]:
    def tenant(principal: Principal = Depends(_principal_with(scope))) -> str:
        return principal.tenant.id

    return tenant


Reader = Annotated[str, Depends(_tenant_with(Scope.READ))]
"""Id of the tenant whose key may read."""
Writer = Annotated[str, Depends(_tenant_with(Scope.WRITE))]
Admin = Annotated[str, Depends(_tenant_with(Scope.ADMIN))]
Approver = Annotated[Principal, Depends(_principal_with(Scope.WRITE))]
"""Who writes, with the key: for what is kept with a name under it."""
AdminPrincipal = Annotated[Principal, Depends(_principal_with(Scope.ADMIN))]
