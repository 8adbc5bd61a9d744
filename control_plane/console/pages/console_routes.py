"""The routes of the console, which the API's application mounts."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.console.pages import (
    account_pages,
    dataset_pages,
    job_pages,
    model_pages,
    new_job_page,
    reference_page,
    session_pages,
    single_sign_on,
    start_page,
    suite_pages,
    team_pages,
)
from control_plane.console.pages.account import billing_pages, settings_pages
from control_plane.console.pages.models import route_pages
from control_plane.console.pages.operators import plan_page, platform_pages, tenant_pages

router = APIRouter()
for part in (
    session_pages.open_router, session_pages.router, single_sign_on.router,
    reference_page.router, start_page.router, suite_pages.router, dataset_pages.router, new_job_page.router,
    job_pages.router, route_pages.router, model_pages.router, account_pages.router, billing_pages.router, settings_pages.router,
    team_pages.router, platform_pages.router, tenant_pages.router, plan_page.router, session_pages.missing_router,
):  # fmt: skip
    router.include_router(part)
