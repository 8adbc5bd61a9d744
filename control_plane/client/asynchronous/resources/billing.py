"""``client.usage``, ``client.ledger``, ``client.invoices`` and ``client.budgets``: use and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Balance, Budget, CreateBudget, Deleted, Invoice, InvoiceSummary, LedgerEntry, UpdateBudget, Usage
from control_plane.client.wire import at, given

Width = Literal["hour", "day", "month"]
"""Calendar buckets, in UTC."""


class AsyncUsageReports(AsyncResource):
    """GPU time, storage and costs. Amounts are millionths of a US dollar; times are Unix seconds."""

    async def retrieve(
        self,
        *,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: Width | None = None,
        group_by: Sequence[str] | None = None,
    ) -> Usage:
        """Returns usage of this month, or from `start_time` to `end_time`: ended work by the time it ran, running work as ``unbilled``.

        `group_by`: any of ``job_id``, ``model``, ``gpu_type``, ``pricing``, ``kind``.
        """
        requested = given(start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by))
        return await self._api.call(Usage, "GET", at("/v1/usage"), params=requested)

    async def csv(
        self,
        *,
        start_time: int | None = None,
        end_time: int | None = None,
        bucket_width: Width | None = None,
        group_by: Sequence[str] | None = None,
    ) -> bytes:
        """Returns the same as CSV: a line for each bucket and group."""
        requested = given(start_time=start_time, end_time=end_time, bucket_width=bucket_width, group_by=group_by and list(group_by))
        return await self._api.content(at("/v1/usage.csv"), params=requested)


class AsyncLedger(AsyncResource):
    """The tenant's ledger."""

    async def balance(self) -> Balance:
        """Returns the sum of all entries."""
        return await self._api.call(Balance, "GET", at("/v1/ledger"))

    def entries(
        self, *, kind: str | None = None, job_id: str | None = None, limit: int = 100, after: str | None = None
    ) -> AsyncPages[LedgerEntry]:
        """Lists entries, newest first, each with the data it was computed from."""
        return self._api.pages(LedgerEntry, at("/v1/ledger/entries"), given(kind=kind, job_id=job_id, limit=limit, after=after))


class AsyncInvoices(AsyncResource):
    """The bill of a month (``yyyy-mm``)."""

    def list(self, *, limit: int = 24, after: str | None = None) -> AsyncPages[InvoiceSummary]:
        """Lists issued invoices, newest month first."""
        return self._api.pages(InvoiceSummary, at("/v1/invoices"), given(limit=limit, after=after))

    async def retrieve(self, month: str) -> Invoice:
        """Returns the invoice of a month; a draft until the month is over and its attempts are settled."""
        return await self._api.call(Invoice, "GET", at("/v1/invoices/{month}", month=month))

    async def csv(self, month: str) -> bytes:
        """Returns the lines of a month's invoice as CSV, its total last."""
        return await self._api.content(at("/v1/invoices/{month}.csv", month=month))


class AsyncBudgets(AsyncResource):
    """Monthly budgets and their alerts."""

    async def create(self, **body: Unpack[CreateBudget]) -> Budget:
        """Creates a budget. It stops nothing: each threshold sends ``budget.threshold_reached`` once a month."""
        return await self._api.call(Budget, "POST", at("/v1/budgets"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[Budget]:
        """Lists budgets, newest first, each with this month's spend."""
        return self._api.pages(Budget, at("/v1/budgets"), given(limit=limit, after=after))

    async def retrieve(self, budget_id: str) -> Budget:
        """Returns one budget."""
        return await self._api.call(Budget, "GET", at("/v1/budgets/{budget_id}", budget_id=budget_id))

    async def update(self, budget_id: str, **body: Unpack[UpdateBudget]) -> Budget:
        """Changes name, limit or thresholds; alerts already sent this month are not repeated."""
        return await self._api.call(Budget, "POST", at("/v1/budgets/{budget_id}", budget_id=budget_id), json=body, repeatable=True)

    async def delete(self, budget_id: str) -> Deleted:
        """Deletes a budget and the record of its alerts."""
        return await self._api.call(Deleted, "DELETE", at("/v1/budgets/{budget_id}", budget_id=budget_id))
