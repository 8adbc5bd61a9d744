"""What every page knows: the scoped platform, who is signed in, and how to render; and how a page answers errors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from control_plane.console.documents import guides
from control_plane.console.jinja_environment import render
from control_plane.http.authentication import CredentialDep, PlatformDep, ReaderPrincipal
from control_plane.http.error_responses import Refused
from control_plane.platform.context import Platform
from control_plane.tenants import sessions
from control_plane.tenants.rules import Principal, Scope
from core.errors import Fault, FtError, InvalidRequest, Unauthenticated, Unavailable
from core.telemetry import correlation

HOME, SIGN_IN, OPERATORS = "/console", "/console/sign-in", "/console/operator"
OF_OPERATOR = "tenant_key_required"
"""Code of the error that tells an operator's session from a tenant's."""
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every page: scripts and styles come from our own files only, and nothing of a tenant stays in a cache."""
SECTIONS = (
    (HOME, "home", "Overview"), ("/console/datasets", "data", "Datasets"), ("/console/jobs", "jobs", "Jobs"),
    ("/console/models", "models", "Models"), ("/console/playground", "chat", "Playground"), ("/console/queue", "queue", "Queue"),
    ("/console/usage", "usage", "Usage"), ("/console/webhooks", "hook", "Webhooks"),
)  # fmt: skip
ADMIN_SECTIONS = (
    ("/console/keys", "key", "API keys"), ("/console/members", "people", "Members"), ("/console/audit", "clock", "Audit log"),
    ("/console/settings", "gear", "Settings"),
)  # fmt: skip
"""Their pages need the scope `admin`."""
NOTICES = {
    "submitted": "The job was submitted again.",
    "cancelled": "The job was cancelled.",
    "paused": "The job pauses at its next checkpoint.",
    "resumed": "The job is queued again.",
    "released": "The job is queued again.",
    "closed": "The job stays failed.",
    "promoted": "The model is in production.",
    "rolled-back": "The model was withdrawn, and the one before it serves again.",
    "deprecated": "The model is no longer served. Its files are kept for 30 days.",
    "route-set": "The route is set, from the next request on.",
    "approved": "Approved.",
    "model-released": "Released.",
    "rejected": "Rejected.",
    "revoked": "The key was revoked.",
    "added": "The member was added.",
    "changed": "Changed.",
    "removed": "The member was removed, and their keys were revoked.",
    "tested": "The receiver accepted the test event.",
    "replayed": "The event is sent again.",
    "replayed-all": "The failed deliveries are sent again, oldest first.",
    "replayed-none": "No delivery has failed since then.",
    "suite-added": "The list was added. Files that are validated from now on are checked for its items.",
    "deletion-requested": "The deletion of all data has begun. Its state is below.",
    "deleted": "Deleted.",
}
"""Confirmations after a change, by the word in the address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One request of a page."""

    platform: Platform
    principal: Principal
    csrf: str
    """Token that each change of this session must carry."""
    path: str
    notice: str | None = None

    @property
    def sections(self) -> tuple[tuple[str, str, str], ...]:
        """The navigation: address, icon and name of each section that the caller may open."""
        return SECTIONS + ADMIN_SECTIONS if self.may("admin") else SECTIONS

    @property
    def guides(self) -> frozenset[str]:
        """Guides that pages may link to."""
        return guides.names()

    @property
    def tenant(self) -> str:
        return self.principal.tenant.id

    def may(self, scope: str) -> bool:
        """Whether to offer what needs `scope`; the routes refuse it in any case."""
        held = list(Scope)
        return any(held.index(s) >= held.index(Scope(scope)) for s in self.principal.scopes)

    def is_in(self, section: str) -> bool:
        """Whether the page belongs to a section of the navigation."""
        return self.path == section or (section != HOME and self.path.startswith(f"{section}/"))

    def show(self, template: str, **values: Any) -> HTMLResponse:
        """Render a template in the layout."""
        return HTMLResponse(render(template, page=self, now=self.platform.clock(), **values))


async def _page(request: Request, platform: PlatformDep, principal: ReaderPrincipal, credential: CredentialDep) -> Page:
    notice = NOTICES.get(request.query_params.get("notice", ""))
    csrf = sessions.csrf_token(credential.secret)
    return Page(platform=platform, principal=principal, csrf=csrf, path=request.url.path, notice=notice)


PageDep = Annotated[Page, Depends(_page)]


def see(path: str, notice: str | None = None) -> RedirectResponse:
    """Send the browser on after a change, so that reloading does not repeat it."""
    return RedirectResponse(f"{path}?{urlencode({'notice': notice})}" if notice else path, status_code=303)


class PageRoute(APIRoute):
    """Answers as a page: with its headers, errors as pages, and the sign-in where there is no session."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await _unwrapped(handle(request))
            except Unauthenticated as error:
                response = _to_sign_in(request, error)
            except RequestValidationError as error:
                response = _error_page(request, InvalidRequest(f"{str(error.errors()[0]['loc'][-1])[:80]}: {error.errors()[0]['msg']}"))
            except (OperationalError, PoolTimeout):
                unavailable = Unavailable("the database did not respond; reload in a moment", code="database_unavailable")
                response = _error_page(request, unavailable)
            except FtError as error:
                if error.code == OF_OPERATOR and request.url.path == HOME:
                    return see(OPERATORS)
                if error.http_status >= 500 and error.fault is Fault.PLATFORM and not isinstance(error, Unavailable):
                    raise
                response = _error_page(request, error)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer


async def _unwrapped(answer: Coroutine[Any, Any, Response]) -> Response:
    try:
        return await answer
    except Refused as refused:
        raise refused.error from refused


def _to_sign_in(request: Request, error: Unauthenticated) -> Response:
    """A request for a page comes back to it after the sign-in; a change does not."""
    correlation.bind(code=error.code)
    query = f"?{request.url.query}" if request.url.query else ""
    wanted = {"next": request.url.path + query} if request.method == "GET" else {}
    ended = {"ended": "1"} if sessions.COOKIE in request.cookies else {}
    target = f"{SIGN_IN}?{urlencode(wanted | ended)}"
    if request.headers.get("sec-fetch-site") == "cross-site" and not ended:
        # A link on another site: the browser withholds the cookie (SameSite=Strict) until a page of ours asks.
        return HTMLResponse(render("continue.html", target=target))
    response = RedirectResponse(target, status_code=303)
    response.delete_cookie(sessions.COOKIE)
    return response


def _error_page(request: Request, error: FtError) -> HTMLResponse:
    correlation.bind(code=error.code)
    title = {403: "Not allowed", 404: "Not found", 409: "Not possible now", 429: "Too many requests"}.get(error.http_status, "Not possible")
    referrer = request.headers.get("referer", "")
    back = referrer if referrer.startswith(f"{request.url.scheme}://{request.url.netloc}/console") else HOME
    html = render("error.html", title=title, message=error.message, code=error.code, back=back)
    return HTMLResponse(html, status_code=error.http_status)
