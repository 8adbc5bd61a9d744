"""What every operators' page knows: the whole platform, which operator is signed in, and how to render."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse

from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import OPERATORS
from control_plane.http.authentication import Operator, OperatorCredential, OperatorPlatform
from control_plane.platform.context import Platform
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorPage:
    """One request of an operators' page."""

    platform: Platform
    operator: rules.Operator
    csrf: str
    path: str
    notice: str | None = None
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


async def _page(request: Request, platform: OperatorPlatform, operator: Operator, credential: OperatorCredential) -> OperatorPage:
    notice = NOTICES.get(request.query_params.get("notice", ""))
    csrf = sessions.csrf_token(credential.secret)
    return OperatorPage(platform=platform, operator=operator, csrf=csrf, path=request.url.path, notice=notice)


OperatorPageDep = Annotated[OperatorPage, Depends(_page)]
