"""Sign-in with the identity provider: there and back, and the choice among several tenants.

What belongs to a sign-in travels in the browser, sealed with the installation's key: until the provider's answer its state, nonce and PKCE
verifier, then, if there is a choice, the verified address.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from cryptography.fernet import InvalidToken
from fastapi import APIRouter, Form, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import HOME, PageRoute, see
from control_plane.console.pages.session_pages import begin_session, check_origin, home_of, is_secure, own, refused
from control_plane.http.authentication import WholePlatform
from control_plane.platform.context import Platform
from control_plane.platform.protocols import IdentityProvider
from control_plane.platform.secrets import cipher
from control_plane.tenants import members, operators
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Operator, Principal
from core.errors import Forbidden, FtError, NotFound
from core.storable_text import printable
from core.telemetry import correlation

PREFIX = "/console/oidc"
BEGUN, VERIFIED = "ft_sign_in", "ft_identity"
"""Cookies of a sign-in that is at the provider, and of one that waits for the choice."""
KEPT_S = 600
MAX_QUOTED = 200
OPERATOR = "operator"
"""The choice that is no tenant: tenants' ids have no dots, members' begin with ``mem_``."""
router = APIRouter(prefix=PREFIX, route_class=PageRoute, include_in_schema=False)


@router.get("/start")
def start(request: Request, platform: WholePlatform, next: str = HOME, another: bool = False) -> Response:
    """Send the browser to the provider; `another`: to choose an account there."""
    try:
        begun = _provider(platform).begin(_callback(platform), another_account=another)
    except FtError as error:
        return refused(platform, next, error)
    kept = {"state": begun.state, "nonce": begun.nonce, "verifier": begun.verifier, "next": own(next)}
    response = RedirectResponse(begun.url, status_code=303)
    return _keep(response, request, platform, BEGUN, kept, samesite="lax")  # the provider's redirect brings no strict one


@router.get("/callback")
def callback(
    request: Request, platform: WholePlatform, state: str = "", code: str = "", error: str = "", error_description: str = ""
) -> Response:
    """Take the provider's answer: sign in, offer the choice, or say why neither is possible."""
    kept = _kept(request, platform, BEGUN)
    try:
        if kept is None or not hmac.compare_digest(kept["state"].encode(), state.encode("utf-8", "surrogatepass")):
            raise Forbidden(
                "this sign-in began in another browser, under another address than "
                f"{platform.settings.public_url}, or over {KEPT_S // 60} minutes ago; sign in again",
                code="oidc_state_invalid",
            )
        if error:
            why = printable(error_description or error)[:MAX_QUOTED]
            raise Forbidden(f"the identity provider {_provider(platform).host} refused the sign-in: {why}", code="oidc_refused")
        identity = _provider(platform).redeem(code, nonce=kept["nonce"], verifier=kept["verifier"], redirect_uri=_callback(platform))
    except FtError as failure:
        return _forget(refused(platform, kept["next"] if kept else HOME, failure), BEGUN)
    operator = operators.of_identity(platform.settings, identity)
    response = _arrived(request, platform, identity.email, operator.grant if operator else None, kept["next"])
    return _forget(response, BEGUN)


@router.get("/choose")
def choose(request: Request, platform: WholePlatform) -> Response:
    """Show a person's tenants, and the operators' pages if they are an operator."""
    if (kept := _kept(request, platform, VERIFIED)) is None:
        return see(f"{PREFIX}/start")
    found = _choices(platform, kept["email"], kept["grant"])
    return HTMLResponse(render("choose.html", email=kept["email"], choices=[(_value(one), one) for one in found], operator=OPERATOR))


@router.post("/choose")
def chosen(request: Request, platform: WholePlatform, choice: Annotated[str, Form()] = "") -> Response:
    """Sign in as the chosen member, or as the operator."""
    check_origin(request, platform.settings.public_url)
    if (kept := _kept(request, platform, VERIFIED)) is None:
        return see(f"{PREFIX}/start")
    for who in _choices(platform, kept["email"], kept["grant"]):
        if _value(who) == choice:
            return _forget(_signed_in(see(own(kept["next"], home_of(who))), request, platform, who), VERIFIED)
    return see(f"{PREFIX}/choose")


def _arrived(request: Request, platform: Platform, email: str, grant: str | None, next: str) -> Response:
    """Answer a verified person: a page of ours continues, because the browser withholds strict cookies from a redirect of another site."""
    found = _choices(platform, email, grant)
    if not found:
        correlation.bind(code="membership_not_found")
        html = render("no_membership.html", email=email, contact=platform.settings.operator_contact, again=f"{PREFIX}/start?another=true")
        return HTMLResponse(html, status_code=403)
    if len(found) == 1:
        onward = HTMLResponse(render("continue.html", target=own(next, home_of(found[0]))))
        return _signed_in(onward, request, platform, found[0])
    onward = HTMLResponse(render("continue.html", target=f"{PREFIX}/choose"))
    return _keep(onward, request, platform, VERIFIED, {"email": email, "grant": grant, "next": next}, samesite="strict")


def _signed_in(response: Response, request: Request, platform: Platform, who: Principal | Operator) -> Response:
    if isinstance(who, Principal):
        tenants.refuse_suspended(platform, who.tenant)
    return begin_session(response, request, platform, who)


def _choices(platform: Platform, email: str, grant: str | None) -> Sequence[Principal | Operator]:
    operator = operators.of_grant(platform.settings, email.lower(), grant or "")
    return [*members.memberships(platform, email), *([operator] if operator else [])]


def _value(who: Principal | Operator) -> str:
    return who.id if isinstance(who, Principal) else OPERATOR


def _provider(platform: Platform) -> IdentityProvider:
    if platform.identity is None:
        raise NotFound("single sign-on is not configured; sign in with a key", code="oidc_not_configured")
    return platform.identity


def _callback(platform: Platform) -> str:
    return f"{platform.settings.public_url}{PREFIX}/callback"


def _keep(
    response: Response,
    request: Request,
    platform: Platform,
    name: str,
    values: Mapping[str, str | None],
    *,
    samesite: Literal["lax", "strict"],
) -> Response:
    """Let the browser carry `values`, which it can neither read nor change."""
    sealed = cipher(platform.settings).encrypt(json.dumps({**values, "for": name}).encode()).decode()
    response.set_cookie(
        name, sealed, max_age=KEPT_S, path=PREFIX, httponly=True, samesite=samesite, secure=is_secure(request, platform)
    )  # fmt: skip
    return response


def _kept(request: Request, platform: Platform, name: str) -> dict[str, str] | None:
    try:
        found: dict[str, str] = json.loads(cipher(platform.settings).decrypt(request.cookies.get(name, "").encode(), ttl=KEPT_S))
    except InvalidToken:
        return None
    return found if found.get("for") == name else None


def _forget(response: Response, name: str) -> Response:
    response.delete_cookie(name, path=PREFIX)
    return response
