"""Sign-in by API key, and the ends of sessions; static files, and the address ``/``."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Header, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from control_plane.console import static_files
from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import HOME, SIGN_IN, PageDep, PageRoute, see
from control_plane.http.authentication import WholePlatform
from control_plane.http.rate_limits import RateLimits
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants import sessions
from ft_assets.errors import Forbidden, FtError, NotFound, RateLimited

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
        try:
            sessions.authenticate(platform, secret)
            return see(_own(next))
        except FtError:
            ended = True
    return _form(platform, next, message="Your session has ended. Sign in again." if ended else None)


@router.post(SIGN_IN)
def sign_in(request: Request, platform: WholePlatform, key: Annotated[str, Form()] = "", next: Annotated[str, Form()] = HOME) -> Response:
    """Exchange an API key for a session, under the limits of calls with the key."""
    _check_origin(request, platform.settings.public_url)
    limits: RateLimits = request.app.state.rate_limits
    secret = key.strip()
    try:
        with limits.watching_unknown_keys(request, secret):
            principal = tenants.authenticate(platform, secret)
        limits.count(request, principal.key_id, principal.requests_per_minute)
        tenants.refuse_suspended(platform, principal.tenant)
    except RateLimited:
        raise
    except FtError as error:
        return _form(platform, next, message=f"{error.message[:1].upper()}{error.message[1:]}.", status=error.http_status)
    response = see(_own(next))
    response.set_cookie(
        sessions.COOKIE, sessions.sign_in(platform, principal), max_age=sessions.SESSION_S, httponly=True, samesite="strict",
        secure="https" in (request.url.scheme, urlsplit(platform.settings.public_url).scheme),
    )  # fmt: skip
    return response


@router.post("/console/sign-out")
def sign_out(page: PageDep, request: Request) -> Response:
    """End this session."""
    sessions.sign_out(page.platform, request.cookies.get(sessions.COOKIE, ""))
    return _signed_out()


@router.post("/console/sign-out-everywhere")
def sign_out_everywhere(page: PageDep) -> Response:
    """End all sessions of the member, or of the key if it belongs to no member."""
    sessions.sign_out_everywhere(page.platform, page.principal)
    return _signed_out()


def _signed_out() -> Response:
    response = see(SIGN_IN)
    response.delete_cookie(sessions.COOKIE)
    response.headers["clear-site-data"] = '"cache"'
    return response


def _form(platform: Platform, next: str, *, message: str | None, status: int = 200) -> HTMLResponse:
    contact = platform.settings.operator_contact
    html = render("sign_in.html", next=_own(next), message=message, failed=status != 200, contact=contact)
    return HTMLResponse(html, status_code=status)


def _own(next: str) -> str:
    return next if OWN_PAGE.fullmatch(next) and ".." not in next else HOME


def _check_origin(request: Request, public_url: str) -> None:
    """Refuse a form sent from another site: it could sign a visitor in with a key that is not theirs. Browsers say where it comes from."""
    own = {request.headers.get("host"), urlsplit(public_url).netloc}
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none") or (origin is not None and urlsplit(origin).netloc not in own):
        raise Forbidden("pages of other sites may not sign in here; open the console's own sign-in page", code="origin_not_allowed")


@missing_router.get("/console/{path:path}")
def missing(_: PageDep, path: str) -> Response:
    """Answer any other address below the console as a page."""
    raise NotFound(f"there is no page /console/{path[:80]}", code="unknown_url")
