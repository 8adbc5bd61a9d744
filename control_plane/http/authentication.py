"""Dependencies of routes: the platform, and the tenant of a key with the required scope; or the operator, for operator routes.

A browser that is signed in to the console sends a session's cookie instead of a key. It can do what the key or person of the session can;
each change must carry the session's CSRF token, in the header ``x-csrf-token`` or, from a form, in the field ``csrf_token``.

Dependencies that do not block are ``async``; only database access takes a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from control_plane.http.rate_limits import RateLimits, client_of
from control_plane.http.streams import Follower
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import operators, sessions
from control_plane.tenants import rules as kinds
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Principal, Scope
from core.errors import Forbidden, InvalidRequest, Unauthenticated
from core.telemetry import correlation

MAX_USER_AGENT = 200
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CSRF_HEADER, CSRF_FIELD = "x-csrf-token", "csrf_token"
FORM = "application/x-www-form-urlencoded"
CONSOLE = "/console/"
"""Below it, forms carry their token in a field. Any other form, whatever its size, is not read before its caller is known."""

OF_OPERATORS = ("/v1/admin/", "/console/operator/")
"""Paths that only operators open."""

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


C = TypeVar("C", Principal, kinds.Operator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential(Generic[C]):
    """What a request shows to say who calls: a key, or a session of the console."""

    secret: str
    authenticate: Callable[[Platform, str], C]

    def caller(self, platform: Platform) -> C:
        """Return the principal or operator; ``Unauthenticated`` if the key or the session no longer works."""
        return self.authenticate(platform, self.secret)


async def _credential(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> Credential[Principal]:
    """Return the key of the request, else its session."""
    if (session := await _session(request, credentials)) is not None:
        return Credential(secret=session, authenticate=sessions.authenticate)
    return Credential(secret=_secret(credentials, "ft-sk-..."), authenticate=tenants.authenticate)


async def _operator_credential(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(operator_bearer)]
) -> Credential[kinds.Operator]:
    if (session := await _session(request, credentials)) is not None:
        return Credential(secret=session, authenticate=sessions.authenticate_operator)
    return Credential(secret=_secret(credentials, "ft-op-..."), authenticate=operators.authenticate)


async def _session(request: Request, credentials: HTTPAuthorizationCredentials | None) -> str | None:
    """Return the session of a request without a key; refuses a change without its CSRF token."""
    session = request.cookies.get(sessions.COOKIE)
    if credentials is not None or not session:
        return None
    if request.method not in SAFE_METHODS and not sessions.is_csrf_token(session, await _sent_token(request)):
        raise Forbidden(
            "the request does not carry the CSRF token of its session; reload the page and repeat it", code="csrf_token_invalid"
        )
    return session


async def _sent_token(request: Request) -> str:
    is_form = request.scope["path"].startswith(CONSOLE) and request.headers.get("content-type", "").startswith(FORM)
    if is_form and CSRF_HEADER not in request.headers:
        return str((await request.form()).get(CSRF_FIELD, ""))
    return request.headers.get(CSRF_HEADER, "")


CredentialDep = Annotated[Credential[Principal], Depends(_credential)]
OperatorCredential = Annotated[Credential[kinds.Operator], Depends(_operator_credential)]


def caller(request: Request, platform: WholePlatform, credential: CredentialDep) -> Principal:
    """Return the principal of the key or session, unless it has sent too many requests."""
    limits: RateLimits = request.app.state.rate_limits
    with limits.watching_unknown_keys(request, credential.secret):
        found = credential.caller(platform)
    limits.remember(credential.secret, found.tenant.id)
    correlation.bind(tenant=found.tenant.id, key=found.id)
    limits.count(request, found.id, found.requests_per_minute)
    tenants.refuse_suspended(platform, found.tenant)
    return found


def secret_of(request: Request) -> tuple[str, bool]:
    """Return the key, token or session in the headers, empty if there is none, and whether it is a session."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret:
        return secret.strip(), False
    return request.cookies.get(sessions.COOKIE, ""), True


def recognize(request: Request) -> None:
    """Raise what the route would raise if the key or session in the headers does not work. It may have stopped working a moment ago."""
    limits: RateLimits = request.app.state.rate_limits
    of_operator = request.scope["path"].startswith(OF_OPERATORS)
    shown, is_session = secret_of(request)
    if not shown:
        raise missing_key("ft-op-..." if of_operator else "ft-sk-...")
    of_tenant = sessions.authenticate if is_session else tenants.authenticate
    authenticate = (sessions.authenticate_operator if is_session else operators.authenticate) if of_operator else of_tenant
    with limits.watching_unknown_keys(request, shown):
        found: Principal | kinds.Operator = authenticate(request.app.state.platform, shown)
    limits.remember(shown, found.tenant.id if isinstance(found, Principal) else found.id)


def _secret(credentials: HTTPAuthorizationCredentials | None, form: str) -> str:
    if credentials is None or not credentials.credentials:
        raise missing_key(form)
    return credentials.credentials


def missing_key(form: str) -> Unauthenticated:
    """The error for a request without a key of this form."""
    return Unauthenticated(f"no API key was sent; send the header Authorization: Bearer {form}", code="missing_api_key")


async def _scoped(request: Request, platform: WholePlatform, principal: Annotated[Principal, Depends(caller)]) -> Platform:
    return platform.in_scope_of(principal.tenant.id, _actor(request, "key" if principal.key_id else "member", principal.id))


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
    request: Request, platform: WholePlatform, principal: Annotated[Principal, Depends(caller)], credential: CredentialDep
) -> Follower:
    def look_again() -> None:
        found = credential.caller(platform)
        tenants.refuse_suspended(platform, found.tenant)
        found.require(Scope.READ)

    return Follower(caller=principal.id, tenant=principal.tenant.id, look_again=look_again, streams=request.app.state.streams)


FollowerDep = Annotated[Follower, Depends(_follower)]
"""For streaming routes: the key is checked again and again while the stream lasts."""


def operator(request: Request, platform: WholePlatform, credential: OperatorCredential) -> kinds.Operator:
    """Return the operator of the key or session."""
    limits: RateLimits = request.app.state.rate_limits
    with limits.watching_unknown_keys(request, credential.secret):
        found = credential.caller(platform)
    limits.remember(credential.secret, found.id)
    correlation.bind(operator=found.id)
    limits.count(request, found.id, limits.of_operators)
    return found


async def _as_operator(request: Request, platform: WholePlatform, found: Annotated[kinds.Operator, Depends(operator)]) -> Platform:
    return platform.acting_as(_actor(request, "operator", found.id))


Operator = Annotated[kinds.Operator, Depends(operator)]
"""For routes under ``/v1/admin``: only operators open them, and they open no tenant's routes."""
OperatorPlatform = Annotated[Platform, Depends(_as_operator)]
"""The whole platform, with the operator recorded in the audit log."""


def _actor(request: Request, kind: Literal["key", "member", "operator"], id_: str) -> Actor:
    agent = request.headers.get("user-agent", "")[:MAX_USER_AGENT]
    return Actor(kind=kind, id=id_, ip=client_of(request), user_agent=agent, request_id=request.state.request_id)
