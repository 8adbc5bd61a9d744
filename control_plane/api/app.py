"""The application: routes, error bodies and request ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version

import httpx
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute

from control_plane.adapters import routes as adapters
from control_plane.adapters import routes_exports
from control_plane.api import routes_health
from control_plane.api.metrics import exposition
from control_plane.api.metrics import routes as metrics
from control_plane.api.metrics.current_alerts import CurrentAlerts
from control_plane.api.metrics.gauges import RecentGauges
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.api.middleware import AllowedHosts, RequestIds
from control_plane.api.openapi import Described
from control_plane.api.request_bodies import RequestBodies
from control_plane.attempts import routes as checkpoint_permissions
from control_plane.attempts import routes_agents
from control_plane.billing import routes_budgets, routes_operators
from control_plane.billing import routes_invoices as invoices
from control_plane.billing import routes_usage as usage
from control_plane.capacity import routes as admin_nodes
from control_plane.console.pages import console_routes as console
from control_plane.datasets import routes as datasets
from control_plane.datasets.scored_suites import routes as scored_suites
from control_plane.datasets.uploads import routes_files, routes_uploads
from control_plane.evaluations import routes as evaluations
from control_plane.graders import routes as graders
from control_plane.http import authentication, error_responses
from control_plane.http.rate_limits import OpenCounts, RateLimitHeaders, RateLimits
from control_plane.http.streams import OpenStreams
from control_plane.http.turns import Turns
from control_plane.jobs import routes as jobs
from control_plane.jobs.dead_letters import routes as dead_letters
from control_plane.jobs.estimates import routes as fine_tuning
from control_plane.jobs.recipes import routes as routes_recipes
from control_plane.jobs.sweeps import routes as sweeps
from control_plane.models import routes as models
from control_plane.notifications import routes as webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.secrets import inference_token
from control_plane.queue.status import routes as queue
from control_plane.quotas import routes as quota
from control_plane.serving import gateway
from control_plane.serving import routes as completions
from control_plane.tenant_data import routes as deletions
from control_plane.tenants import routes_admin, routes_members
from control_plane.tenants import routes_audit as audit_log
from control_plane.tenants import routes_keys as api_keys
from control_plane.tracking import routes as integrations

JOB_PATHS = ("/v1/fine_tuning/jobs", "/v1/fine-tuning/jobs", "/v1/jobs")
"""OpenAI's path and two common alternative spellings; the document shows the first."""


def create_app(platform: Platform, *, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """Create the API of `platform`. Several processes may serve the same platform; `transport` carries calls to inference servers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with gateway.client(inference_token(platform.settings), transport) as client:
            app.state.inference = gateway.Gateway(client)
            yield

    app = Described(
        title="ft-platform",
        version=version("ft-platform"),
        summary="Fine-tune, evaluate and serve language models. Files, fine-tuning, models, webhooks and chat follow OpenAI's format.",
        lifespan=lifespan,
        routes=_routes(),
        docs_url=None,  # its pages fetch scripts from elsewhere; the console renders /docs
        redoc_url=None,
    )
    app.state.platform = platform
    app.state.rate_limits = RateLimits(platform)
    app.state.streams = OpenStreams()
    app.state.answers = OpenCounts()
    app.state.gauges = RecentGauges(platform=platform)
    app.state.meter = RequestMeter()
    app.state.exposed = exposition.registry(app.state.gauges, app.state.meter)
    app.state.alerts = CurrentAlerts(registry=app.state.exposed)
    error_responses.install(app)
    app.add_middleware(RateLimitHeaders)
    app.add_middleware(Turns)
    app.add_middleware(RequestBodies)
    app.add_middleware(AllowedHosts, platform=platform)
    app.add_middleware(RequestIds, meter=app.state.meter)
    return app


@cache
def _routes() -> Sequence[BaseRoute]:
    """All routes, built once per process: FastAPI needs half a second to analyze them."""
    whole = APIRouter(dependencies=[Depends(authentication.storable_url)])
    whole.include_router(routes_agents.router)  # first, because routes are tried in turn, and most requests are heartbeats
    for path in JOB_PATHS:
        whole.include_router(jobs.router, prefix=path, include_in_schema=path == JOB_PATHS[0])
        whole.include_router(evaluations.router, prefix=path, include_in_schema=path == JOB_PATHS[0])
        whole.include_router(integrations.job_router, prefix=path, include_in_schema=path == JOB_PATHS[0])
        whole.include_router(usage.cost_router, prefix=path, include_in_schema=path == JOB_PATHS[0])
    whole.add_api_route("/v1/fine-tunes/estimate-price", fine_tuning.estimate, methods=["POST"], include_in_schema=False)
    for router in (
        fine_tuning.router, checkpoint_permissions.router, graders.router, sweeps.router, routes_files.router, routes_uploads.router,
        datasets.datasets_router, datasets.suites_router, scored_suites.router, evaluations.suites_router, models.router, queue.router,
        quota.router,
        routes_recipes.router, routes_recipes.admin_router, routes_exports.router, adapters.manifests_router,
        evaluations.adapters_router, evaluations.operators_router,
        adapters.signing_keys_router, adapters.router, completions.model_routes_router, completions.router, api_keys.router,
        routes_members.router, audit_log.router, webhook_endpoints.router, integrations.router, routes_admin.router, admin_nodes.router,
        dead_letters.router,
        usage.router, invoices.router, routes_budgets.router, routes_operators.router, deletions.router, routes_health.router,
        metrics.router, console.router,
    ):  # fmt: skip
        whole.include_router(router)
    return whole.routes
