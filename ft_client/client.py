"""The client: its resources over one connection pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from ft_client.connection import Connection
from ft_client.record import Record
from ft_client.resources.account import (
    ApiKeys,
    AuditLog,
    DataExport,
    Deletions,
    Identity,
    Members,
    Queues,
    Quotas,
    WandbIntegration,
)
from ft_client.resources.adapters import Adapters
from ft_client.resources.admin import Admin
from ft_client.resources.billing import Budgets, Invoices, Ledger, UsageReports
from ft_client.resources.chat import Chat, Completions, Responses
from ft_client.resources.datasets import CapabilitySuites, Datasets, ScoredSuites, Suites
from ft_client.resources.exports import AdapterEvaluations, Exports
from ft_client.resources.files import Files
from ft_client.resources.graders import CheckpointPermissions, Graders
from ft_client.resources.jobs import Jobs
from ft_client.resources.models import ModelRoutes, Models, Recipes
from ft_client.resources.sweeps import Sweeps
from ft_client.resources.uploads import Uploads
from ft_client.resources.webhook_endpoints import WebhookEndpoints
from ft_client.retries import BACKOFF_S, MAX_RETRIES
from ft_client.wire import TIMEOUT


class FtClient:
    """A client of the platform with one API key; closed by :meth:`close`, or used as a context.

    ``base_url`` and ``api_key`` default to ``FT_API_URL`` and ``FT_API_KEY``. Raises errors of ``core.errors``, and
    ``httpx.TransportError`` if the API cannot be reached.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: httpx.Timeout | float = TIMEOUT,
        max_retries: int = MAX_RETRIES,
        transport: httpx.BaseTransport | None = None,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self._use(
            Connection(
                base_url=base_url, api_key=api_key, timeout=timeout, max_retries=max_retries, transport=transport, backoff_s=backoff_s
            )
        )

    def _use(self, connection: Connection) -> None:
        self._connection = connection
        self.files = Files(connection)
        self.uploads = Uploads(connection)
        self.datasets = Datasets(connection)
        self.suites = Suites(connection)
        self.scored_suites = ScoredSuites(connection)
        self.capability_suites = CapabilitySuites(connection)
        self.jobs = Jobs(connection)
        self.sweeps = Sweeps(connection)
        self.models = Models(connection)
        self.recipes = Recipes(connection)
        self.model_routes = ModelRoutes(connection)
        self.adapters = Adapters(connection)
        self.adapter_evaluations = AdapterEvaluations(connection)
        self.exports = Exports(connection)
        self.chat = Chat(connection)
        self.responses = Responses(connection)
        self.completions = Completions(connection)
        self.graders = Graders(connection)
        self.checkpoint_permissions = CheckpointPermissions(connection)
        self.me = Identity(connection)
        self.queue = Queues(connection)
        self.quota = Quotas(connection)
        self.usage = UsageReports(connection)
        self.ledger = Ledger(connection)
        self.invoices = Invoices(connection)
        self.budgets = Budgets(connection)
        self.members = Members(connection)
        self.api_keys = ApiKeys(connection)
        self.audit_log = AuditLog(connection)
        self.wandb = WandbIntegration(connection)
        self.webhook_endpoints = WebhookEndpoints(connection)
        self.data_export = DataExport(connection)
        self.deletions = Deletions(connection)
        self.admin = Admin(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, which clients made by :meth:`with_options` share."""
        self._connection.close()

    def with_options(self, *, timeout: httpx.Timeout | float | None = None, max_retries: int | None = None) -> FtClient:
        """Returns the same client with other options, such as for one call: ``client.with_options(timeout=5,
        max_retries=0).jobs.list()``."""
        other = object.__new__(type(self))
        other._use(self._connection.with_options(timeout=timeout, max_retries=max_retries))
        return other

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
    ) -> Record:
        """Makes any other call of the API: returns the decoded body of the response to `method` `path`."""
        options = {name: value for name, value in (("json", json), ("params", params), ("headers", headers)) if value is not None}
        return self._connection.call(method, path, repeatable=repeatable, **options)
