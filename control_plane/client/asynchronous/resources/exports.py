"""``client.exports`` and ``client.adapter_evaluations``: an adapter as files to take along, and judged once more."""

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
    """Adapters made into files: the adapter itself, merged weights, GGUF, the tokenizer."""

    async def create(self, adapter_id: str, **body: Unpack[CreateExport]) -> Export:
        """Have an adapter made into files to take along; the same request again gives the same export, and makes nothing."""
        return await self._api.call(
            Export, "POST", at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id), json=body, repeatable=True
        )

    def list(self, adapter_id: str) -> AsyncPages[Export]:
        """Exports of an adapter, newest first."""
        return self._api.pages(Export, at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id))

    async def retrieve(self, adapter_id: str, export_id: str) -> Export:
        """One export."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return await self._api.call(Export, "GET", path)

    async def wait(self, adapter_id: str, export_id: str, *, timeout_s: float | None = None, poll_s: float = 0.5) -> Export:
        """The export, once it is ready or has failed; ``TimeoutError`` if it is neither within `timeout_s`."""

        async def look() -> Export:
            return await self.retrieve(adapter_id, export_id)

        return await self._api.wait(
            look, lambda e: e["status"] not in UNDER_WAY, what=f"export {export_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def download(self, adapter_id: str, export_id: str, target: Path) -> str:
        """Write the archive to `target`, whole or not at all, and hold it against its sha256, which is returned."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}/content", adapter_id=adapter_id, export_id=export_id)
        return await self._api.download(path, target)

    async def delete(self, adapter_id: str, export_id: str) -> Deleted:
        """Delete an export with its archive; one that is being made is given up."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return await self._api.call(Deleted, "DELETE", path)


class AsyncAdapterEvaluations(AsyncResource):
    """Verdicts on a registered adapter: with its job, after its promotion, where its base changes, or asked for."""

    async def create(self, adapter_id: str, **body: Unpack[CreateEvaluation]) -> AdapterEvaluation:
        """Have an adapter judged once more, on the present bytes of its base; one that waits already is returned."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return await self._api.call(AdapterEvaluation, "POST", path, json=body, repeatable=True)

    def list(self, adapter_id: str, *, limit: int = 20, after: str | None = None) -> AsyncPages[AdapterEvaluation]:
        """Verdicts on an adapter and those that it waits for, newest first; `limit` to a page."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return self._api.pages(AdapterEvaluation, path, given(limit=limit, after=after))

    async def retrieve(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluation:
        """One evaluation."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return await self._api.call(AdapterEvaluation, "GET", path)

    async def wait(self, adapter_id: str, evaluation_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> AdapterEvaluation:
        """The evaluation, once there is a verdict or it has failed; ``TimeoutError`` if neither comes within `timeout_s`."""

        async def look() -> AdapterEvaluation:
            return await self.retrieve(adapter_id, evaluation_id)

        return await self._api.wait(
            look, lambda e: e["state"] not in UNDER_WAY, what=f"evaluation {evaluation_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def report(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluationReport:
        """What a finished evaluation measured, its verdict, and advice."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return await self._api.call(AdapterEvaluationReport, "GET", path)

    async def report_page(self, adapter_id: str, evaluation_id: str) -> bytes:
        """The same as an HTML page that needs nothing else."""
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
        """Every item of it as each model answered it; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/samples", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.pages(EvaluationSample, path, given(suite=suite, only=only, limit=limit, after=after))
