"""The tenant's queue, usage, and API keys with their rotation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Form, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.billing import budgets
from control_plane.billing.invoices import service as invoices
from control_plane.billing.routes_usage import Requested, usage_of
from control_plane.billing.schemas import UsageBucket
from control_plane.billing.usage import service as usages
from control_plane.console.documents.charts import columns
from control_plane.console.documents.queue_page import QUEUE_WORDS
from control_plane.console.pages.page import Page, PageDep, PageRoute, see
from control_plane.http.authentication import AdminPrincipal
from control_plane.queue.status import view
from control_plane.quotas.routes import retrieve as quota_of
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Principal
from control_plane.tenants.tables import ApiKey

KEYS = "/console/keys"
DAY_S = 24 * 3600
OVERLAPS = (("0", "Not at all"), ("3600", "1 hour"), ("86400", "1 day"), ("604800", "7 days"), ("2592000", "30 days"))
"""Seconds for which a replaced key keeps working."""
LIFETIMES = (("30", "30 days"), ("90", "90 days"), ("365", "1 year"), ("", "Never"))
TOP_JOBS = 10
MICROS = 1_000_000
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)


@router.get("/queue")
def queue(page: PageDep) -> HTMLResponse:
    """Show why the tenant's jobs wait, and what is free."""
    return page.show("queue.html", queue=view.of_tenant(page.platform, page.tenant), **QUEUE_WORDS)


@router.get("/usage")
def usage(page: PageDep) -> HTMLResponse:
    """Show this month by day, model and job, with limits, budgets and invoices."""
    platform, tenant = page.platform, page.tenant
    month = usage_of(platform, tenant, Requested(group_by=["model"]))
    return page.show(
        "usage.html",
        usage=month,
        chart=columns([_day(bucket) for bucket in month.data], title="Cost by day in US dollars", form="${:,.2f}"),
        models=_by_model(month.data),
        jobs=usages.costliest_jobs(platform, tenant, most=TOP_JOBS),
        quota=quota_of(platform, tenant),
        budgets=budgets.list_budgets(platform, tenant).items,
        invoices=invoices.list_issued(platform, tenant).items,
    )


def _day(bucket: UsageBucket) -> tuple[str, float]:
    """Return the day of the month and its cost in dollars."""
    return str(datetime.fromtimestamp(bucket.start_time, UTC).day), sum(one.amount_micros for one in bucket.results) / MICROS


def _by_model(days: Sequence[UsageBucket]) -> list[tuple[str | None, float, int]]:
    """Return GPU-hours and cost of each base model, most expensive first; None is what belongs to no job."""
    seconds, micros = defaultdict[str | None, float](float), Counter[str | None]()
    for one in (result for day in days for result in day.results):
        seconds[one.model] += one.gpu_seconds
        micros[one.model] += one.amount_micros
    return [(model, seconds[model] / 3600, cost) for model, cost in micros.most_common()]


@router.get("/keys")
def list_keys(page: PageDep, principal: AdminPrincipal, after: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List the tenant's keys without their secrets."""
    return _keys(page, principal, after=after)


@router.post("/keys")
def create_key(
    page: PageDep,
    principal: AdminPrincipal,
    name: Annotated[str, Form()] = "",
    scope: Annotated[str, Form()] = "write",
    days: Annotated[str, Form()] = "",
) -> HTMLResponse:
    """Create a key; its secret is in this answer and nowhere else."""
    made = tenants.create_key(
        page.platform,
        page.tenant,
        name=name,
        scopes=[scope],
        # ten digits are already too many days, and Python reads no number of thousands
        expires_in_s=int(days[:10]) * DAY_S if days.isdecimal() else None,
        by=principal,
    )
    return _keys(page, principal, made=made)


@router.get("/keys/{key_id}/rotate")
def rotation(page: PageDep, principal: AdminPrincipal, key_id: str) -> HTMLResponse:
    """Show what a rotation does, and ask how long the old key keeps working."""
    key = tenants.get_key(page.platform, page.tenant, key_id)
    return page.show("key_rotation.html", key=key, own=principal.key_id, overlaps=OVERLAPS)


@router.post("/keys/{key_id}/rotate")
def rotate(page: PageDep, principal: AdminPrincipal, key_id: str, overlap: Annotated[int, Form()] = DAY_S) -> HTMLResponse:
    """Replace a key; the new secret is in this answer and nowhere else."""
    made = tenants.rotate_key(page.platform, page.tenant, key_id, overlap_s=overlap, by=principal)
    return _keys(page, principal, made=made, replaced=tenants.get_key(page.platform, page.tenant, key_id))


@router.post("/keys/{key_id}/revoke")
def revoke(page: PageDep, principal: AdminPrincipal, key_id: str) -> Response:
    """Revoke a key at once."""
    tenants.revoke_key(page.platform, page.tenant, key_id, by=principal)
    return see(KEYS, "revoked")


def _keys(
    page: Page, principal: Principal, *, made: tenants.NewKey | None = None, replaced: ApiKey | None = None, after: str | None = None
) -> HTMLResponse:
    found = tenants.list_keys(page.platform, page.tenant, after=after)
    return page.show(
        "keys.html", keys=found.items, has_more=found.has_more, after=after, made=made, replaced=replaced, own=principal.key_id,
        lifetimes=LIFETIMES,
    )  # fmt: skip
