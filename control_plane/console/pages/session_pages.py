"""Sign-in by key, of a tenant or an operator, and the ends of sessions; static files, and the address ``/``."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Header, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from control_plane.console import static_files
from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import HOME, OF_OPERATOR, OPERATORS, SIGN_IN, PageDep, PageRoute, see
from control_plane.http.authentication import WholePlatform
from control_plane.http.rate_limits import RateLimits
from control_plane.platform.context import Platform
from control_plane.platform.secrets import OPERATOR_PREFIX
from control_plane.tenants import operators, sessions
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Operator, Principal
from core.errors import Forbidden, FtError, NotFound, RateLimited
from core.telemetry import correlation

OWN_PAGE = re.compile(r"/console(?:[/?][^\\\s]*)?")
"""Addresses to which a sign-in returns."""
FOREVER = "public, max-age=31536000, immutable"

router = APIRouter(route_class=PageRoute, include_in_schema=False)
open_router = APIRouter(include_in_schema=False)
missing_router = APIRouter(route_class=PageRoute, include_in_schema=False)
"""Comes after all other pages."""


@open_router.get("/")
def root(accept: Annotated[str, Header()] = "") -> Response:
    """Send a browser to the console, and tell a client where the API is."""
    if "text/html" in accept:
        return RedirectResponse(HOME, status_code=303)
    text = "The API is below /v1: send Authorization: Bearer ft-sk-... The console for browsers is at /console."
    return JSONResponse(
        {"object": "service", "name": "ft-platform", "message": text, "api": "/v1", "openapi": "/openapi.json", "console": HOME}
    )


@open_router.get("/favicon.ico")
def favicon() -> Response:
    """Send browsers that look here to the icon."""
    return RedirectResponse(static_files.url("favicon.svg"), status_code=301)


@open_router.get("/console/static/{version}/{name}")
def static_file(version: str, name: str, accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Return a style, script or icon. A page from before an upgrade gets the present file, which is then not kept."""
    if (file := static_files.files().get(name)) is None:
        raise NotFound(f"no file {name[:80]!r}")
    is_compressed = "gzip" in accept_encoding
    headers = {"cache-control": FOREVER if version == static_files.version() else "no-cache", "vary": "accept-encoding"}
    headers |= {"x-content-type-options": "nosniff"} | ({"content-encoding": "gzip"} if is_compressed else {})
    return Response(file.compressed if is_compressed else file.body, media_type=file.media_type, headers=headers)


@router.get(SIGN_IN)
def sign_in_page(request: Request, platform: WholePlatform, next: str = HOME, ended: bool = False) -> Response:
    """Show the form; with a session, go on to the page that was asked for."""
    if secret := request.cookies.get(sessions.COOKIE):
        limits: RateLimits = request.app.state.rate_limits
        try:
            with limits.watching_unknown_keys(request, secret):
                sessions.authenticate(platform, secret)
            return see(own(next, HOME))
        except RateLimited:
            raise
        except FtError as error:
            if error.code == OF_OPERATOR:
                return see(own(next, OPERATORS))
            ended = True
    return sign_in_form(platform, next, message="Your session has ended. Sign in again." if ended else None)


@router.post(SIGN_IN)
def sign_in(request: Request, platform: WholePlatform, key: Annotated[str, Form()] = "", next: Annotated[str, Form()] = HOME) -> Response:
    """Exchange a key of a tenant or an operator for a session, under the limits of calls with the key."""
    check_origin(request, platform.settings.public_url)
    try:
        who = _holder(request, platform, key.strip())
    except RateLimited:
        raise
    except FtError as error:
        return refused(platform, next, error)
    return begin_session(see(own(next, home_of(who))), request, platform, who)


def _holder(request: Request, platform: Platform, secret: str) -> Principal | Operator:
    """Return who holds a key."""
    if platform.settings.console_sign_in == sessions.NO_KEYS:
        raise Forbidden("keys open the API only; sign in to the console with single sign-on", code="sign_in_with_oidc")
    limits: RateLimits = request.app.state.rate_limits
    authenticate = operators.authenticate if secret.startswith(OPERATOR_PREFIX) else tenants.authenticate
    with limits.watching_unknown_keys(request, secret):
        who = authenticate(platform, secret)
    if isinstance(who, Principal):
        limits.count(request, who.id, who.requests_per_minute)
        tenants.refuse_suspended(platform, who.tenant)
    return who


def begin_session(response: Response, request: Request, platform: Platform, who: Principal | Operator) -> Response:
    """Give the browser a session."""
    secret = sessions.sign_in(platform, who)
    response.set_cookie(
        sessions.COOKIE, secret, max_age=sessions.SESSION_S, httponly=True, samesite="strict", secure=is_secure(request, platform)
    )
    return response


def is_secure(request: Request, platform: Platform) -> bool:
    """Whether browsers reach the console by https."""
    return "https" in (request.url.scheme, urlsplit(platform.settings.public_url).scheme)


def home_of(who: Principal | Operator) -> str:
    """Return the first page of a tenant or an operator."""
    return HOME if isinstance(who, Principal) else OPERATORS


@router.post("/console/sign-out")
def sign_out(page: PageDep, request: Request) -> Response:
    """End this session."""
    sessions.sign_out(page.platform, request.cookies.get(sessions.COOKIE, ""))
    return signed_out()


@router.post("/console/sign-out-everywhere")
def sign_out_everywhere(page: PageDep) -> Response:
    """End all sessions of the member, or of the key if it belongs to no member."""
    sessions.sign_out_everywhere(page.platform, page.principal)
    return signed_out()


def signed_out() -> Response:
    """Send the browser to the sign-in without its cookie."""
    response = see(SIGN_IN)
    response.delete_cookie(sessions.COOKIE)
    response.headers["clear-site-data"] = '"cache"'
    return response


def sign_in_form(platform: Platform, next: str, *, message: str | None, status: int = 200, code: str | None = None) -> HTMLResponse:
    """Return the page with the ways to sign in."""
    html = render(
        "sign_in.html", next=own(next), message=message, code=code, failed=status != 200, contact=platform.settings.operator_contact,
        provider=platform.identity and platform.identity.host, takes_keys=platform.settings.console_sign_in != sessions.NO_KEYS,
    )  # fmt: skip
    return HTMLResponse(html, status_code=status)


def refused(platform: Platform, next: str, error: FtError) -> HTMLResponse:
    """Return the page with the ways to sign in, and why one failed."""
    correlation.bind(code=error.code)
    message = f"{error.message[:1].upper()}{error.message[1:]}."
    return sign_in_form(platform, next, message=message, status=error.http_status, code=error.code)


def own(next: str, home: str | None = None) -> str:
    """Return the page to which a sign-in returns: `next` if it is one of the console's and, for a known visitor, lies below `home`."""
    if not OWN_PAGE.fullmatch(next) or ".." in next:
        return home or HOME
    return next if home is None or next.startswith(OPERATORS) == (home == OPERATORS) else home


def check_origin(request: Request, public_url: str) -> None:
    """Refuse a form sent from another site: it could sign a visitor in with a key that is not theirs. Browsers say where it comes from."""
    own = {request.headers.get("host"), urlsplit(public_url).netloc}
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none") or (origin is not None and urlsplit(origin).netloc not in own):
        raise Forbidden("pages of other sites may not sign in here; open the console's own sign-in page", code="origin_not_allowed")


@missing_router.get("/console/{path:path}")
def missing(_: PageDep, path: str) -> Response:
    """Answer any other address below the console as a page."""
    raise NotFound(f"there is no page /console/{path[:80]}", code="unknown_url")
