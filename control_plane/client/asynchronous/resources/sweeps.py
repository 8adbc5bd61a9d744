"""``client.sweeps``: many jobs from one request, and the best of them."""

from __future__ import annotations

from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import CreateSweep, JobComparison, Sweep
from control_plane.client.wire import at, given


class AsyncSweeps(AsyncResource):
    """Hyperparameter sweeps."""

    async def create(self, **body: Unpack[CreateSweep]) -> Sweep:
        """Submits a job for each combination in ``sweep``; sent twice under one ``idempotency_key`` it is one sweep."""
        key = body.pop("idempotency_key", None)
        return await self._api.create(Sweep, at("/v1/fine_tuning/sweeps"), key=key, json=body)

    def list(self, *, limit: int = 20, after: str | None = None) -> AsyncPages[Sweep]:
        """Lists sweeps, newest first; `limit` per page."""
        return self._api.pages(Sweep, at("/v1/fine_tuning/sweeps"), given(limit=limit, after=after))

    async def retrieve(self, sweep_id: str) -> Sweep:
        """Returns one sweep with its trials and the best of them."""
        return await self._api.call(Sweep, "GET", at("/v1/fine_tuning/sweeps/{sweep_id}", sweep_id=sweep_id))

    async def compare(self, sweep_id: str) -> JobComparison:
        """Compares the jobs of a sweep side by side."""
        return await self._api.call(JobComparison, "GET", at("/v1/fine_tuning/sweeps/{sweep_id}/compare", sweep_id=sweep_id))

    async def cancel(self, sweep_id: str) -> Sweep:
        """Submits no further trials, and cancels the jobs that have not ended."""
        return await self._api.call(Sweep, "POST", at("/v1/fine_tuning/sweeps/{sweep_id}/cancel", sweep_id=sweep_id), repeatable=True)

    async def wait(self, sweep_id: str, *, timeout_s: float | None = None, poll_s: float = 2.0) -> Sweep:
        """Waits until every trial has ended and returns the sweep; ``TimeoutError`` after `timeout_s`."""

        async def look() -> Sweep:
            return await self.retrieve(sweep_id)

        return await self._api.wait(look, lambda s: s["status"] != "running", what=f"sweep {sweep_id}", timeout_s=timeout_s, poll_s=poll_s)
