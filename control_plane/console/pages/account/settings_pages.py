"""Settings of the tenant: limits, e-mail, its key for Weights & Biases; the export and deletion of all of its data."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form
from fastapi.responses import HTMLResponse, Response

from control_plane.billing.routes_usage import Requested, usage_of
from control_plane.console.pages.page import PageDep, PageRoute, see
from control_plane.http.authentication import Admin, AdminPrincipal
from control_plane.quotas.routes import retrieve as quota_of
from control_plane.tenant_data import deletion, deletion_requests
from control_plane.tenants import members
from control_plane.tracking import service as integrations

SETTINGS = "/console/settings"
MEMBERS_SHOWN = 100
router = APIRouter(prefix=SETTINGS, route_class=PageRoute, include_in_schema=False)


@router.get("")
def settings(page: PageDep, tenant: Admin) -> HTMLResponse:
    """Show what the tenant is, what it may use, and what can be changed."""
    platform = page.platform
    return page.show(
        "settings.html",
        quota=quota_of(platform, tenant),
        members=members.list_members(platform, tenant, limit=MEMBERS_SHOWN).items,
        contact=platform.settings.operator_contact,
        wandb=integrations.find_wandb(platform, tenant),
        may_send=platform.wandb is not None,
    )


@router.post("/wandb")
def set_wandb(page: PageDep, tenant: Admin, api_key: Annotated[str, Form()] = "") -> Response:
    """Store the tenant's key for Weights & Biases."""
    integrations.set_wandb(page.platform, tenant, api_key=api_key)
    return see(SETTINGS, "changed")


@router.post("/wandb/remove")
def remove_wandb(page: PageDep, tenant: Admin) -> Response:
    """Delete the tenant's key for Weights & Biases."""
    integrations.remove_wandb(page.platform, tenant)
    return see(SETTINGS, "deleted")


@router.post("/members/{member_id}/notify")
def set_notify(page: PageDep, principal: AdminPrincipal, member_id: str, notify: Annotated[str, Form()] = "") -> Response:
    """Switch a member's e-mail on or off."""
    members.update(page.platform, principal.tenant.id, member_id, notify=notify == "on", by_owner=principal.may_name_owners)
    return see(SETTINGS, "changed")


@router.get("/data")
def data(page: PageDep, tenant: Admin) -> HTMLResponse:
    """Show how to export and delete everything, and the deletions so far."""
    stored = usage_of(page.platform, tenant, Requested(bucket_width="month")).stored
    found = deletion.list_deletions(page.platform, tenant).items
    return page.show("tenant_data.html", stored=stored, deletions=found, max_reason=deletion_requests.MAX_REASON_CHARS)


@router.post("/data/delete")
def delete_data(
    page: PageDep,
    principal: AdminPrincipal,
    confirm: Annotated[str, Form()] = "",
    reason: Annotated[str, Form()] = "",
    close_account: Annotated[str, Form()] = "",
) -> Response:
    """Request the deletion of all data; `confirm` is the tenant's id, typed by the person."""
    deletion_requests.request_tenant(
        page.platform, principal.tenant.id, confirm=confirm.strip(), reason=reason, requested_by=principal.id,
        close_account=bool(close_account), by_owner=principal.may_name_owners,
    )  # fmt: skip
    return see(f"{SETTINGS}/data", "deletion-requested")
