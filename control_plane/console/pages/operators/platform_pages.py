"""The platform now: what is wrong, the queue over the nodes, and nodes that are drained."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated
from urllib.parse import urlencode, urlsplit

from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse, Response

from control_plane.billing import refunds
from control_plane.capacity import maintenance, nodes
from control_plane.console.documents.queue_page import QUEUE_WORDS, timelines
from control_plane.console.pages.operators.operator_page import OperatorPage, OperatorPageDep
from control_plane.console.pages.page import OPERATORS, PageRoute, see
from control_plane.console.pages.session_pages import signed_out
from control_plane.jobs.dead_letters import service as dead_letters
from control_plane.notifications import deliveries
from control_plane.platform.secrets import seal
from control_plane.queue.status import missed_starts, view
from control_plane.tenants import sessions
from core.errors import NotFound

RECENT = timedelta(days=7)
"""Late starts of this time are listed."""
MAX_MISSED = 20
MAX_WAITING = 200
MAX_DEAD_LETTERS = 20
router = APIRouter(prefix=OPERATORS, route_class=PageRoute, include_in_schema=False)


@router.get("")
def overview(request: Request, page: OperatorPageDep) -> Response:
    """Show what needs an operator: alerts, late starts, drained nodes, maintenance."""
    return page.show_live("overview.html", lambda: _overview(request, page))


def _overview(request: Request, page: OperatorPage) -> Mapping[str, object]:
    platform = page.platform
    with platform.engine.connect() as conn:
        missed = missed_starts.recent(conn, platform.clock(), within=RECENT, limit=MAX_MISSED)
        maintained = maintenance.list_all(conn)
    return {
        "alerts": request.app.state.alerts.read(),
        "missed": missed,
        "queue": view.of_all(platform, limit=1),
        "drained": [node for node in nodes.list_nodes(platform) if node.drained_at is not None],
        "maintained": maintained,
        "backlog": deliveries.backlog(platform),
        "refunds": refunds.list_cases(platform, state="pending", limit=1),
        "dead_letters": dead_letters.list_all(platform, limit=MAX_DEAD_LETTERS).items,
        "days": RECENT.days,
    }


@router.post("/dead-letters/{job_id}/release")
def release_dead_letter(page: OperatorPageDep, job_id: str) -> Response:
    """Queue a job again that was given up."""
    dead_letters.release(page.platform, job_id)
    return see(OPERATORS, "released")


@router.post("/dead-letters/{job_id}/close")
def close_dead_letter(page: OperatorPageDep, job_id: str) -> Response:
    """Leave a job failed that was given up."""
    dead_letters.close(page.platform, job_id)
    return see(OPERATORS, "closed")


@router.get("/queue")
def queue(page: OperatorPageDep) -> Response:
    """Show what each node does from now on, and all jobs that wait or hold GPUs."""
    return page.show_live("queue.html", lambda: _queue(page))


def _queue(page: OperatorPage) -> Mapping[str, object]:
    found = view.of_all(page.platform, limit=MAX_WAITING).model_dump()
    return {"q": found, **timelines(found, now=page.platform.clock().timestamp()), **QUEUE_WORDS}


@router.get("/nodes")
def list_nodes(page: OperatorPageDep) -> Response:
    """List the nodes of each pool."""
    return page.show_live("nodes.html", lambda: _nodes(page))


def _nodes(page: OperatorPage) -> Mapping[str, object]:
    return {"nodes": nodes.list_nodes(page.platform), "pools": view.of_all(page.platform, limit=1).pools}


@router.post("/nodes/{node}/drain")
def drain(page: OperatorPageDep, node: str, reason: Annotated[str, Form()] = "") -> Response:
    """Place nothing new on a node."""
    nodes.drain(page.platform, node, reason=reason.strip(), by=page.operator.id)
    return see(f"{OPERATORS}/nodes", "drained")


@router.post("/nodes/{node}/undrain")
def undrain(page: OperatorPageDep, node: str) -> Response:
    """Place jobs on a node again."""
    nodes.undrain(page.platform, node)
    return see(f"{OPERATORS}/nodes", "undrained")


@router.get("/dagster")
def dagster(request: Request, page: OperatorPageDep, to: str = "/") -> Response:
    """Go to a page of Dagster. On the console's host the session's cookie is sent there, too; to another host, a ticket brings it."""
    address = page.platform.settings.dagster_public_url
    if not address:
        raise NotFound("the console does not know where Dagster is; set FT_DAGSTER_PUBLIC_URL", code="dagster_not_reachable")
    target = to if to.startswith("/") else "/"
    if urlsplit(address).hostname == request.url.hostname:
        return RedirectResponse(f"{address}{target}", status_code=303)
    ticket = seal(page.platform.settings, request.cookies.get(sessions.COOKIE, ""))
    return RedirectResponse(f"{address}/ft/login?{urlencode({'ticket': ticket, 'to': target})}", status_code=303)


@router.post("/sign-out")
def sign_out(page: OperatorPageDep, request: Request) -> Response:
    """End this session."""
    sessions.sign_out(page.platform, request.cookies.get(sessions.COOKIE, ""))
    return signed_out()


@router.post("/sign-out-everywhere")
def sign_out_everywhere(page: OperatorPageDep) -> Response:
    """End all sessions of the operator."""
    sessions.sign_out_everywhere(page.platform, page.operator)
    return signed_out()
