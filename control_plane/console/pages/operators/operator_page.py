"""What every operators' page knows: the whole platform, which operator is signed in, and how to render."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, Response

from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import OPERATORS
from control_plane.http.authentication import Operator, OperatorCredential, OperatorPlatform
from control_plane.notifications import deliveries
from control_plane.platform.context import Platform
from control_plane.queue.status import changes
from control_plane.tenants import rules, sessions

SECTIONS = (
    (OPERATORS, "home", "Overview"), (f"{OPERATORS}/queue", "queue", "Queue"), (f"{OPERATORS}/nodes", "box", "Nodes"),
    (f"{OPERATORS}/tenants", "people", "Tenants"), (f"{OPERATORS}/deliveries", "hook", "Failed deliveries"),
    (f"{OPERATORS}/ledger", "usage", "Ledger"), (f"{OPERATORS}/plan", "models", "Plan"),
)  # fmt: skip
NOTICES = {
    "drained": "Nothing new is placed on the node. Jobs that run there go on to their end.",
    "undrained": "The node takes jobs again.",
    "suspended": "The tenant is suspended: its calls are refused, and running jobs go on to their end.",
    "resumed": "The tenant may use the platform again.",
    "replayed": "The event is sent again.",
    "changed": "Changed.",
}
"""Confirmations after a change, by the word in the address."""
REDRAWN_S = 60
"""An open page is drawn again at least so often: expected ends and ages move with the clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPage:
    """One request of an operators' page."""

    platform: Platform
    operator: rules.Operator
    csrf: str
    path: str
    notice: str | None = None
    shown: str | None = None
    """Mark of the page that the browser shows; None on its first request."""
    sections: tuple[tuple[str, str, str], ...] = SECTIONS

    def is_in(self, section: str) -> bool:
        """Whether the page belongs to a section of the navigation."""
        return self.path == section or (section != OPERATORS and self.path.startswith(f"{section}/"))

    def runs_of(self, job_id: str) -> str | None:
        """Return the way to the runs of a job in Dagster; None if browsers do not reach it."""
        if not self.platform.settings.dagster_public_url:
            return None
        wanted = quote(f"tag:dagster/ft_job={job_id}", safe="")
        return f"{OPERATORS}/dagster?to={quote(f'/runs?q%5B0%5D={wanted}', safe='')}"

    def show(self, template: str, **values: object) -> HTMLResponse:
        """Render a template of the operators' pages."""
        return HTMLResponse(render(f"operators/{template}", page=self, now=self.platform.clock(), **values))

    def show_live(self, template: str, read: Callable[[], Mapping[str, object]]) -> Response:
        """Render a page that its script requests again while it is open; 304 without a body, and without `read`, if nothing has changed."""
        mark = self._mark()
        if self.shown == mark:
            return Response(status_code=304)
        return self.show(template, mark=mark, **read())

    def _mark(self) -> str:
        sent = deliveries.backlog(self.platform)
        minute = int(self.platform.clock().timestamp() // REDRAWN_S)
        return f'"{changes.mark(self.platform)}-{sent.waiting_events}-{sent.pending}-{sent.dead}-{minute}"'


async def _page(request: Request, platform: OperatorPlatform, operator: Operator, credential: OperatorCredential) -> OperatorPage:
    notice = NOTICES.get(request.query_params.get("notice", ""))
    csrf = sessions.csrf_token(credential.secret)
    shown = request.headers.get("if-none-match")
    return OperatorPage(platform=platform, operator=operator, csrf=csrf, path=request.url.path, notice=notice, shown=shown)


OperatorPageDep = Annotated[OperatorPage, Depends(_page)]
