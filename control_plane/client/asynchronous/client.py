"""The client: all resources over one connection pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from control_plane.client.asynchronous.connection import AsyncConnection
from control_plane.client.asynchronous.resources.account import (
    AsyncApiKeys,
    AsyncAuditLog,
    AsyncDataExport,
    AsyncDeletions,
    AsyncIdentity,
    AsyncMembers,
    AsyncQueues,
    AsyncQuotas,
)
from control_plane.client.asynchronous.resources.adapters import AsyncAdapters
from control_plane.client.asynchronous.resources.admin import AsyncAdmin
from control_plane.client.asynchronous.resources.billing import AsyncBudgets, AsyncInvoices, AsyncLedger, AsyncUsageReports
from control_plane.client.asynchronous.resources.chat import AsyncChat, AsyncCompletions
from control_plane.client.asynchronous.resources.datasets import AsyncCapabilitySuites, AsyncDatasets, AsyncSuites
from control_plane.client.asynchronous.resources.exports import AsyncAdapterEvaluations, AsyncExports
from control_plane.client.asynchronous.resources.files import AsyncFiles
from control_plane.client.asynchronous.resources.graders import AsyncCheckpointPermissions, AsyncGraders
from control_plane.client.asynchronous.resources.jobs import AsyncJobs
from control_plane.client.asynchronous.resources.models import AsyncModelRoutes, AsyncModels, AsyncRecipes
from control_plane.client.asynchronous.resources.sweeps import AsyncSweeps
from control_plane.client.asynchronous.resources.uploads import AsyncUploads
from control_plane.client.asynchronous.resources.webhook_endpoints import AsyncWebhookEndpoints
from control_plane.client.retries import BACKOFF_S, MAX_RETRIES
from control_plane.client.types import Json
from control_plane.client.wire import TIMEOUT


class AsyncFtClient:
    """Client for one API key. Close it with :meth:`close` or use it as a context manager.

    ``base_url`` and ``api_key`` default to ``FT_API_URL`` and ``FT_API_KEY``. API errors are raised as subclasses of
    ``ft_assets.errors.FtError``, and ``httpx.TransportError`` if the API cannot be reached.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: httpx.Timeout | float = TIMEOUT,
        max_retries: int = MAX_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._use(
            AsyncConnection(
                base_url=base_url, api_key=api_key, timeout=timeout, max_retries=max_retries, transport=transport, backoff_s=backoff_s
            )
        )

    def _use(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self.files = AsyncFiles(connection)
        self.uploads = AsyncUploads(connection)
        self.datasets = AsyncDatasets(connection)
        self.suites = AsyncSuites(connection)
        self.capability_suites = AsyncCapabilitySuites(connection)
        self.jobs = AsyncJobs(connection)
        self.sweeps = AsyncSweeps(connection)
        self.models = AsyncModels(connection)
        self.recipes = AsyncRecipes(connection)
        self.model_routes = AsyncModelRoutes(connection)
        self.adapters = AsyncAdapters(connection)
        self.adapter_evaluations = AsyncAdapterEvaluations(connection)
        self.exports = AsyncExports(connection)
        self.chat = AsyncChat(connection)
        self.completions = AsyncCompletions(connection)
        self.graders = AsyncGraders(connection)
        self.checkpoint_permissions = AsyncCheckpointPermissions(connection)
        self.me = AsyncIdentity(connection)
        self.queue = AsyncQueues(connection)
        self.quota = AsyncQuotas(connection)
        self.usage = AsyncUsageReports(connection)
        self.ledger = AsyncLedger(connection)
        self.invoices = AsyncInvoices(connection)
        self.budgets = AsyncBudgets(connection)
        self.members = AsyncMembers(connection)
        self.api_keys = AsyncApiKeys(connection)
        self.audit_log = AsyncAuditLog(connection)
        self.webhook_endpoints = AsyncWebhookEndpoints(connection)
        self.data_export = AsyncDataExport(connection)
        self.deletions = AsyncDeletions(connection)
        self.admin = AsyncAdmin(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, which clients made by :meth:`with_options` share."""
        await self._connection.close()

    def with_options(self, *, timeout: httpx.Timeout | float | None = None, max_retries: int | None = None) -> AsyncFtClient:
        """Returns a client with other settings on the same connections: ``client.with_options(timeout=5, max_retries=0).jobs.list()``."""
        other = object.__new__(type(self))
        other._use(self._connection.with_options(timeout=timeout, max_retries=max_retries))
        return other

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
    ) -> Json:
        """Calls an endpoint that has no method here, and returns the decoded body."""
        options = {name: value for name, value in (("json", json), ("params", params), ("headers", headers)) if value is not None}
        return await self._connection.call(Json, method, path, repeatable=repeatable, **options)
