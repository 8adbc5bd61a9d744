"""Dependencies of routes: the platform, and the tenant of a key with the required scope; or the operator, for operator routes.

Dependencies that do not block are ``async``; only database access takes a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from control_plane.http.rate_limits import RateLimits, client_of
from control_plane.http.streams import Follower
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import operators
from control_plane.tenants import rules as kinds
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Principal, Scope
from ft_assets.errors import InvalidRequest, Unauthenticated
from ft_assets.telemetry import correlation

MAX_USER_AGENT = 200

bearer = HTTPBearer(auto_error=False, description="API key of a tenant, starting with `ft-sk-`.")
operator_bearer = HTTPBearer(auto_error=False, scheme_name="OperatorKey", description="Key of an operator, starting with `ft-op-`.")


async def platform_of(request: Request) -> Platform:
    platform: Platform = request.app.state.platform
    return platform


WholePlatform = Annotated[Platform, Depends(platform_of)]
"""The platform outside any tenant's scope: for health, metrics and operator routes."""


async def storable_url(request: Request) -> None:
    """Refuse a NUL in an id or a query; other invalid UTF-8 was replaced when the URL was decoded."""
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidRequest("the URL holds a NUL character (%00); remove it", code="invalid_id")


def caller(
    request: Request, platform: WholePlatform, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> Principal:
    """Return the principal of the key, unless it has sent too many requests."""
    secret = _secret(credentials, "ft-sk-...")
    limits: RateLimits = request.app.state.rate_limits
    with limits.watching_unknown_keys(request, secret):
        found = tenants.authenticate(platform, secret)
    correlation.bind(tenant=found.tenant.id, key=found.key_id)
    limits.count(request, found.key_id, found.requests_per_minute)
    tenants.refuse_suspended(platform, found.tenant)
    return found


def _secret(credentials: HTTPAuthorizationCredentials | None, form: str) -> str:
    if credentials is None or not credentials.credentials:
        raise missing_key(form)
    return credentials.credentials


def missing_key(form: str) -> Unauthenticated:
    """The error for a request without a key of this form."""
    return Unauthenticated(f"no API key was sent; send the header Authorization: Bearer {form}", code="missing_api_key")


async def _scoped(request: Request, platform: WholePlatform, principal: Annotated[Principal, Depends(caller)]) -> Platform:
    return platform.in_scope_of(principal.tenant.id, _actor(request, "key", principal.key_id))


PlatformDep = Annotated[Platform, Depends(_scoped)]
"""The platform in the scope of the caller's tenant: row security hides all other rows."""


def _principal_with(scope: Scope) -> Callable[..., Awaitable[Principal]]:
    async def principal(found: Annotated[Principal, Depends(caller)]) -> Principal:
        found.require(scope)
        return found

    return principal


def _tenant_with(scope: Scope) -> Callable[..., Awaitable[str]]:
    async def tenant(principal: Principal = Depends(_principal_with(scope))) -> str:
        return principal.tenant.id

    return tenant


Reader = Annotated[str, Depends(_tenant_with(Scope.READ))]
"""Id of the tenant, for keys with scope `read`."""
Writer = Annotated[str, Depends(_tenant_with(Scope.WRITE))]
Admin = Annotated[str, Depends(_tenant_with(Scope.ADMIN))]
ReaderPrincipal = Annotated[Principal, Depends(_principal_with(Scope.READ))]
Approver = Annotated[Principal, Depends(_principal_with(Scope.WRITE))]
"""The principal of a writing request, for records that name the key."""
AdminPrincipal = Annotated[Principal, Depends(_principal_with(Scope.ADMIN))]


async def _follower(
    request: Request,
    platform: WholePlatform,
    principal: Annotated[Principal, Depends(caller)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],
) -> Follower:
    secret = _secret(credentials, "ft-sk-...")

    def look_again() -> None:
        found = tenants.authenticate(platform, secret)
        tenants.refuse_suspended(platform, found.tenant)
        found.require(Scope.READ)

    return Follower(key_id=principal.key_id, tenant=principal.tenant.id, look_again=look_again, streams=request.app.state.streams)


FollowerDep = Annotated[Follower, Depends(_follower)]
"""For streaming routes: the key is checked again and again while the stream lasts."""


def operator(
    request: Request, platform: WholePlatform, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(operator_bearer)]
) -> kinds.Operator:
    """Return the operator of the key."""
    secret = _secret(credentials, "ft-op-...")
    limits: RateLimits = request.app.state.rate_limits
    with limits.watching_unknown_keys(request, secret):
        found = operators.authenticate(platform, secret)
    correlation.bind(operator=found.id)
    limits.count(request, found.id, limits.of_operators)
    return found


async def _as_operator(request: Request, platform: WholePlatform, found: Annotated[kinds.Operator, Depends(operator)]) -> Platform:
    return platform.acting_as(_actor(request, "operator", found.id))


Operator = Annotated[kinds.Operator, Depends(operator)]
"""For routes under ``/v1/admin``: only operators' keys open them, and these open no tenant's routes."""
OperatorPlatform = Annotated[Platform, Depends(_as_operator)]
"""The whole platform, with the operator recorded in the audit log."""


def _actor(request: Request, kind: Literal["key", "operator"], id_: str) -> Actor:
    agent = request.headers.get("user-agent", "")[:MAX_USER_AGENT]
    return Actor(kind=kind, id=id_, ip=client_of(request), user_agent=agent, request_id=request.state.request_id)
