"""The application: routes, error bodies, request ids, and the workers that validate files and make exports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

import httpx
from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute

from control_plane.api import deps, errors, exposition, gateway
from control_plane.api.dispatching import DispatchWorker
from control_plane.api.document import Described
from control_plane.api.exporting import ExportWorker
from control_plane.api.measurements import RequestMeter
from control_plane.api.middleware import RequestIds
from control_plane.api.rate_limits import RateLimitHeaders, RateLimits
from control_plane.api.reconciling import ReconcileWorker
from control_plane.api.routes import (
    adapter_evaluations,
    adapters,
    admin_billing,
    admin_nodes,
    admin_tenants,
    api_keys,
    audit_log,
    budgets,
    capability_suites,
    checkpoint_permissions,
    completions,
    datasets,
    deletions,
    evaluations,
    exports,
    files,
    fine_tuning,
    graders,
    health,
    invoices,
    jobs,
    manifests,
    members,
    metrics,
    model_routes,
    models,
    queue,
    quota,
    recipes,
    suites,
    sweeps,
    uploads,
    usage,
    webhook_endpoints,
)
from control_plane.api.streams import OpenStreams
from control_plane.api.unread_bodies import UnreadBodies
from control_plane.api.validation import ValidationWorker
from control_plane.installation import inference_token
from control_plane.service.gauges import RecentGauges
from control_plane.service.platform import Platform

VERSION = "0.1.0"
JOB_PATHS = ("/v1/fine_tuning/jobs", "/v1/fine-tuning/jobs", "/v1/jobs")
"""OpenAI's path, then the two spellings that people try; the document shows the first."""


def create_app(platform: Platform, *, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """The API over `platform`. Several processes may serve the same one; `transport` carries calls to inference servers."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker = ValidationWorker(platform)
        maker = ExportWorker(platform)
        reconciler = ReconcileWorker(platform)
        worker.start()
        maker.start()
        reconciler.start()
        dispatcher = DispatchWorker(platform)
        dispatcher.start()
        async with gateway.client(inference_token(platform.settings), transport) as client:
            app.state.validation, app.state.exports, app.state.inference = worker, maker, gateway.Gateway(client)
            yield
        dispatcher.stop()
        reconciler.stop()
        maker.stop()
        worker.stop()

    app = Described(
        title="ft-platform",
        version=VERSION,
        summary="Fine-tuning jobs, datasets and adapters; files, fine_tuning, models and chat speak OpenAI's format",
        lifespan=lifespan,
        routes=_routes(),
        docs_url=None,  # its pages fetch scripts from elsewhere; the document itself is at /openapi.json
        redoc_url=None,
    )
    app.state.platform = platform
    app.state.rate_limits = RateLimits()
    app.state.streams = OpenStreams()
    app.state.gauges = RecentGauges(platform=platform)
    app.state.meter = RequestMeter()
    app.state.exposed = exposition.registry(app.state.gauges, app.state.meter)
    errors.install(app)
    app.add_middleware(RateLimitHeaders)
    app.add_middleware(UnreadBodies)
    app.add_middleware(RequestIds, meter=app.state.meter)
    return app


@cache
def _routes() -> Sequence[BaseRoute]:
    """All routes, built once per process: FastAPI takes half a second to work out what each takes and returns."""
    whole = APIRouter(dependencies=[Depends(deps.storable_url)])
    for path in JOB_PATHS:
        whole.include_router(jobs.router, prefix=path, include_in_schema=path == JOB_PATHS[0])
        whole.include_router(evaluations.router, prefix=path, include_in_schema=path == JOB_PATHS[0])
        whole.include_router(usage.cost_router, prefix=path, include_in_schema=path == JOB_PATHS[0])
    whole.add_api_route("/v1/fine-tunes/estimate-price", jobs.estimate, methods=["POST"], include_in_schema=False)
    for routes in (
        fine_tuning, checkpoint_permissions, graders, sweeps, files, uploads, datasets, suites, capability_suites, models, queue,
        quota, recipes, exports, manifests, adapter_evaluations, adapters, model_routes, completions, api_keys, members, audit_log,
        webhook_endpoints, admin_tenants, admin_nodes, usage, invoices, budgets, admin_billing, deletions, health, metrics,
    ):  # fmt: skip
        whole.include_router(routes.router)
    return whole.routes
