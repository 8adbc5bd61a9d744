"""``client.usage``, ``client.ledger``, ``client.invoices`` and ``client.budgets``: use and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import Balance, Budget, Deleted, Invoice, InvoiceSummary, LedgerEntry, Usage
from ft_client.wire import at, given


class UsageReports(Resource):
    """GPU time, storage and costs. Amounts are millionths of a US dollar; times are Unix seconds."""

    def retrieve(
        self,
        *,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: str | None = None,
        group_by: Sequence[str] | None = None,
    ) -> Usage:
        """Returns usage of this month, or from `start_time` to `end_time`: ended work by the time it ran, running work as ``unbilled``.

        `bucket_width` (UTC): ``hour``, ``day``, ``month``. `group_by`: any of ``job_id``, ``model``, ``gpu_type``, ``pricing``, ``kind``,
        ``api_key_id``, ``metadata[KEY]``.
        """
        requested = given(start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by))
        return self._api.call("GET", at("/v1/usage"), params=requested)

    def csv(
        self,
        *,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: str | None = None,
        group_by: Sequence[str] | None = None,
    ) -> bytes:
        """Returns the same as CSV: a line for each bucket and group."""
        requested = given(start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by))
        return self._api.content(at("/v1/usage.csv"), params=requested)


class Ledger(Resource):
    """The tenant's ledger."""

    def balance(self) -> Balance:
        """Returns the sum of all entries."""
        return self._api.call("GET", at("/v1/ledger"))

    def entries(
        self, *, kind: str | None = None, job_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[LedgerEntry]:
        """Lists entries, newest first, each with the data it was computed from."""
        return self._api.pages(at("/v1/ledger/entries"), given(kind=kind, job_id=job_id, limit=limit, after=after))


class Invoices(Resource):
    """The bill of a month (``yyyy-mm``)."""

    def list(self, *, limit: int = 24, after: str | None = None) -> Pages[InvoiceSummary]:
        """Lists issued invoices, newest month first."""
        return self._api.pages(at("/v1/invoices"), given(limit=limit, after=after))

    def retrieve(self, month: str) -> Invoice:
        """Returns the invoice of a month; a draft until the month is over and its attempts are settled."""
        return self._api.call("GET", at("/v1/invoices/{month}", month))

    def csv(self, month: str) -> bytes:
        """Returns the lines of a month's invoice as CSV, its total last."""
        return self._api.content(at("/v1/invoices/{month}.csv", month))


class Budgets(Resource):
    """Monthly budgets and their alerts."""

    def create(self, *, name: str, limit_micros: int, **options: Any) -> Budget:
        """Creates a budget. It stops nothing: each threshold sends ``budget.threshold_reached`` once a month.

        Options: `thresholds`.
        """
        return self._api.call("POST", at("/v1/budgets"), json={"name": name, "limit_micros": limit_micros, **options})

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Budget]:
        """Lists budgets, newest first, each with this month's spend."""
        return self._api.pages(at("/v1/budgets"), given(limit=limit, after=after))

    def retrieve(self, budget_id: str) -> Budget:
        """Returns one budget."""
        return self._api.call("GET", at("/v1/budgets/{budget_id}", budget_id))

    def update(self, budget_id: str, **options: Any) -> Budget:
        """Changes name, limit or thresholds; alerts already sent this month are not repeated.

        Options: `name`, `limit_micros`, `thresholds`.
        """
        return self._api.call("POST", at("/v1/budgets/{budget_id}", budget_id), json=options, repeatable=True)

    def delete(self, budget_id: str) -> Deleted:
        """Deletes a budget and the record of its alerts."""
        return self._api.call("DELETE", at("/v1/budgets/{budget_id}", budget_id))
