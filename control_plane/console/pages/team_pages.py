"""Members, webhooks and the audit log: what owners and admins manage."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import HTMLResponse, Response

from control_plane.console.pages.page import Page, PageDep, PageRoute, see
from control_plane.http.authentication import Admin, AdminPrincipal
from control_plane.http.schemas import ListOf
from control_plane.http.turns import run_waiting
from control_plane.notifications import deliveries, webhook_endpoints
from control_plane.notifications.routes import list_deliveries, list_endpoints, retrieve
from control_plane.tenants import audit_log, members, schemas
from control_plane.tenants.rules import Role
from core.event_types import EVENT_TYPES

MEMBERS, WEBHOOKS = "/console/members", "/console/webhooks"
AUDIT_LINES = 50
MAX_REPLAY_HOURS = 30 * 24
"""Deliveries are kept for 30 days."""
DeliveryState = Literal["pending", "delivered", "dead"]
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
After = Annotated[str | None, Query()]


@router.get("/members")
def list_members(page: PageDep, tenant: Admin, after: After = None) -> HTMLResponse:
    """List the members of the tenant."""
    found = ListOf[schemas.Member].model_validate(members.list_members(page.platform, tenant, after=after))
    return page.show("members.html", members=found.data, has_more=found.has_more, after=after, roles=[role.value for role in Role])


@router.post("/members")
def add_member(
    page: PageDep, principal: AdminPrincipal, email: Annotated[str, Form()] = "", role: Annotated[str, Form()] = "member"
) -> Response:
    """Add a person; their first key is created on the page of keys or by the API."""
    members.add(page.platform, principal.tenant.id, email=email.strip(), role=role, by_owner=principal.may_name_owners)
    return see(MEMBERS, "added")


@router.post("/members/{member_id}/role")
def change_role(page: PageDep, principal: AdminPrincipal, member_id: str, role: Annotated[str, Form()]) -> Response:
    """Change a member's role; it bounds their keys and sessions at once."""
    members.update(page.platform, principal.tenant.id, member_id, role=role, by_owner=principal.may_name_owners)
    return see(MEMBERS, "changed")


@router.post("/members/{member_id}/remove")
def remove_member(page: PageDep, principal: AdminPrincipal, member_id: str) -> Response:
    """Remove a member; their keys and sessions end."""
    members.remove(page.platform, principal.tenant.id, member_id, by_owner=principal.may_name_owners)
    return see(MEMBERS, "removed")


@router.get("/webhooks")
def webhooks(page: PageDep) -> HTMLResponse:
    """List endpoints."""
    return page.show("webhooks.html", endpoints=list_endpoints(page.platform, page.tenant).data, event_types=EVENT_TYPES, made=None)


@router.post("/webhooks")
def create_webhook(
    page: PageDep,
    tenant: Admin,
    name: Annotated[str, Form()] = "",
    url: Annotated[str, Form()] = "",
    event_types: Annotated[list[str] | None, Form()] = None,
) -> HTMLResponse:
    """Create an endpoint for the chosen events, or for all; its signing secret is in this answer and nowhere else."""
    made = webhook_endpoints.create(page.platform, tenant, name=name, url=url.strip(), event_types=event_types or ["*"])
    return page.show("webhooks.html", endpoints=list_endpoints(page.platform, tenant).data, event_types=EVENT_TYPES, made=made)


@router.get("/webhooks/{endpoint_id}")
def webhook(page: PageDep, endpoint_id: str, after: After = None, state: Annotated[DeliveryState | None, Query()] = None) -> HTMLResponse:
    """Show an endpoint with its deliveries."""
    return _webhook(page, endpoint_id, state=state, after=after)


def _webhook(
    page: Page, endpoint_id: str, *, state: DeliveryState | None = None, after: str | None = None,
    made: webhook_endpoints.WithSecret | None = None, keeps_old: bool = False,
) -> HTMLResponse:  # fmt: skip
    endpoint = retrieve(page.platform, page.tenant, endpoint_id)
    found = list_deliveries(page.platform, page.tenant, endpoint_id, state=state, after=after)
    return page.show(
        "webhook.html", endpoint=endpoint, deliveries=found.data, has_more=found.has_more, after=after, state=state, made=made,
        keeps_old=keeps_old, old_until=page.platform.clock() + webhook_endpoints.OVERLAP,
    )  # fmt: skip


@router.post("/webhooks/{endpoint_id}/state")
def set_state(page: PageDep, tenant: Admin, endpoint_id: str, state: Annotated[str, Form()]) -> Response:
    """Enable or disable an endpoint."""
    webhook_endpoints.update(page.platform, tenant, endpoint_id, {"state": state})
    return see(f"{WEBHOOKS}/{endpoint_id}", "changed")


@router.post("/webhooks/{endpoint_id}/test")
async def send_test(request: Request, page: PageDep, tenant: Admin, endpoint_id: str) -> Response:
    """Send a signed test event; a receiver that does not answer is an error page with the reason."""
    await run_waiting(request, partial(webhook_endpoints.send_test, page.platform, tenant, endpoint_id))
    return see(f"{WEBHOOKS}/{endpoint_id}", "tested")


@router.post("/webhooks/{endpoint_id}/rotate")
def rotate_secret(page: PageDep, tenant: Admin, endpoint_id: str, keep_old: Annotated[str, Form()] = "") -> HTMLResponse:
    """Replace the signing secret; the new one is in this answer and nowhere else."""
    made = webhook_endpoints.rotate_secret(page.platform, tenant, endpoint_id, keep_old=bool(keep_old))
    return _webhook(page, endpoint_id, made=made, keeps_old=bool(keep_old))


@router.post("/webhooks/{endpoint_id}/replay")
def replay_failed(page: PageDep, tenant: Admin, endpoint_id: str, hours: Annotated[int, Form(ge=1, le=MAX_REPLAY_HOURS)] = 24) -> Response:
    """Send all deliveries again that failed in the last hours."""
    num = deliveries.replay_dead(page.platform, tenant, endpoint_id, since=page.platform.clock() - timedelta(hours=hours))
    return see(f"{WEBHOOKS}/{endpoint_id}", "replayed-all" if num else "replayed-none")


@router.post("/webhooks/{endpoint_id}/deliveries/{delivery_id}/replay")
def replay(page: PageDep, tenant: Admin, endpoint_id: str, delivery_id: str) -> Response:
    """Send one event again."""
    deliveries.replay(page.platform, tenant, endpoint_id, delivery_id)
    return see(f"{WEBHOOKS}/{endpoint_id}", "replayed")


@router.post("/webhooks/{endpoint_id}/delete")
def delete_webhook(page: PageDep, tenant: Admin, endpoint_id: str) -> Response:
    """Delete an endpoint."""
    webhook_endpoints.delete(page.platform, tenant, endpoint_id)
    return see(WEBHOOKS, "deleted")


@router.get("/audit")
def audit(page: PageDep, tenant: Admin, after: After = None, type: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List changes in the tenant, newest first; `type` of the changed object."""
    wanted = audit_log.Wanted(object_type=type or None)
    found = ListOf[schemas.AuditLine].model_validate(audit_log.read(page.platform, tenant, wanted, after=after, limit=AUDIT_LINES))
    return page.show("audit.html", lines=found.data, has_more=found.has_more, after=after, type=type)
