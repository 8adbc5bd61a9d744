"""``client.exports`` and ``client.adapter_evaluations``: exported files and repeated evaluations of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import (
    AdapterEvaluation,
    AdapterEvaluationReport,
    CreateEvaluation,
    CreateExport,
    Deleted,
    EvaluationSample,
    Export,
)
from control_plane.client.wire import at, given

UNDER_WAY = frozenset({"queued", "running"})


class AsyncExports(AsyncResource):
    """Exports of an adapter: LoRA weights, merged weights, GGUF, or the tokenizer."""

    async def create(self, adapter_id: str, **body: Unpack[CreateExport]) -> Export:
        """Exports an adapter; requesting the same export again returns the existing one."""
        return await self._api.call(
            Export, "POST", at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id), json=body, repeatable=True
        )

    def list(self, adapter_id: str) -> AsyncPages[Export]:
        """Lists the exports of an adapter, newest first."""
        return self._api.pages(Export, at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id))

    async def retrieve(self, adapter_id: str, export_id: str) -> Export:
        """Returns an export."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return await self._api.call(Export, "GET", path)

    async def wait(self, adapter_id: str, export_id: str, *, timeout_s: float | None = None, poll_s: float = 0.5) -> Export:
        """Waits until the export is ready or has failed and returns it; raises ``TimeoutError`` after `timeout_s`."""

        async def look() -> Export:
            return await self.retrieve(adapter_id, export_id)

        return await self._api.wait(
            look, lambda e: e["status"] not in UNDER_WAY, what=f"export {export_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def download(self, adapter_id: str, export_id: str, target: Path) -> str:
        """Writes the archive to `target` atomically, verifies its SHA-256 and returns it."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}/content", adapter_id=adapter_id, export_id=export_id)
        return await self._api.download(path, target)

    async def delete(self, adapter_id: str, export_id: str) -> Deleted:
        """Deletes an export with its archive; cancels it if it is in progress."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return await self._api.call(Deleted, "DELETE", path)


class AsyncAdapterEvaluations(AsyncResource):
    """Evaluations of a registered adapter: by its job, after promotion, after a change of its base model, or on request."""

    async def create(self, adapter_id: str, **body: Unpack[CreateEvaluation]) -> AdapterEvaluation:
        """Evaluates an adapter again on the current version of its base model; returns the pending evaluation if there is one."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return await self._api.call(AdapterEvaluation, "POST", path, json=body, repeatable=True)

    def list(self, adapter_id: str, *, limit: int = 20, after: str | None = None) -> AsyncPages[AdapterEvaluation]:
        """Lists the evaluations of an adapter, finished or not, newest first; `limit` is the page size."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return self._api.pages(AdapterEvaluation, path, given(limit=limit, after=after))

    async def retrieve(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluation:
        """Returns an evaluation."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return await self._api.call(AdapterEvaluation, "GET", path)

    async def wait(self, adapter_id: str, evaluation_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> AdapterEvaluation:
        """Waits until the evaluation has a verdict or failed and returns it; raises ``TimeoutError`` after `timeout_s`."""

        async def look() -> AdapterEvaluation:
            return await self.retrieve(adapter_id, evaluation_id)

        return await self._api.wait(
            look, lambda e: e["state"] not in UNDER_WAY, what=f"evaluation {evaluation_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def report(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluationReport:
        """Returns the measurements, verdict and advice of a finished evaluation."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return await self._api.call(AdapterEvaluationReport, "GET", path)

    async def report_page(self, adapter_id: str, evaluation_id: str) -> bytes:
        """Returns the report as a self-contained HTML page."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return await self._api.content(path, accept="text/html")

    def samples(
        self,
        adapter_id: str,
        evaluation_id: str,
        *,
        suite: str | None = None,
        only: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> AsyncPages[EvaluationSample]:
        """Lists all items with the answers of each model; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/samples", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.pages(EvaluationSample, path, given(suite=suite, only=only, limit=limit, after=after))
