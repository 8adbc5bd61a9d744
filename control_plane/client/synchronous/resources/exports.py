# Written by `python -m tools.client` from asynchronous/resources/exports.py: change that, and run it again.
"""``client.exports`` and ``client.adapter_evaluations``: exported files and repeated evaluations of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
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


class Exports(Resource):
    """Exports of an adapter: LoRA weights, merged weights, GGUF, or the tokenizer."""

    def create(self, adapter_id: str, **body: Unpack[CreateExport]) -> Export:
        """Exports an adapter; requesting the same export again returns the existing one."""
        return self._api.call(Export, "POST", at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id), json=body, repeatable=True)

    def list(self, adapter_id: str) -> Pages[Export]:
        """Lists the exports of an adapter, newest first."""
        return self._api.pages(Export, at("/v1/adapters/{adapter_id}/exports", adapter_id=adapter_id))

    def retrieve(self, adapter_id: str, export_id: str) -> Export:
        """Returns an export."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return self._api.call(Export, "GET", path)

    def wait(self, adapter_id: str, export_id: str, *, timeout_s: float | None = None, poll_s: float = 0.5) -> Export:
        """Waits until the export is ready or has failed and returns it; raises ``TimeoutError`` after `timeout_s`."""

        def look() -> Export:
            return self.retrieve(adapter_id, export_id)

        return self._api.wait(look, lambda e: e["status"] not in UNDER_WAY, what=f"export {export_id}", timeout_s=timeout_s, poll_s=poll_s)

    def download(self, adapter_id: str, export_id: str, target: Path) -> str:
        """Writes the archive to `target` atomically, verifies its SHA-256 and returns it."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}/content", adapter_id=adapter_id, export_id=export_id)
        return self._api.download(path, target)

    def delete(self, adapter_id: str, export_id: str) -> Deleted:
        """Deletes an export with its archive; cancels it if it is in progress."""
        path = at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id=adapter_id, export_id=export_id)
        return self._api.call(Deleted, "DELETE", path)


class AdapterEvaluations(Resource):
    """Evaluations of a registered adapter: by its job, after promotion, after a change of its base model, or on request."""

    def create(self, adapter_id: str, **body: Unpack[CreateEvaluation]) -> AdapterEvaluation:
        """Evaluates an adapter again on the current version of its base model; returns the pending evaluation if there is one."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return self._api.call(AdapterEvaluation, "POST", path, json=body, repeatable=True)

    def list(self, adapter_id: str, *, limit: int = 20, after: str | None = None) -> Pages[AdapterEvaluation]:
        """Lists the evaluations of an adapter, finished or not, newest first; `limit` is the page size."""
        path = at("/v1/adapters/{adapter_id}/evaluations", adapter_id=adapter_id)
        return self._api.pages(AdapterEvaluation, path, given(limit=limit, after=after))

    def retrieve(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluation:
        """Returns an evaluation."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.call(AdapterEvaluation, "GET", path)

    def wait(self, adapter_id: str, evaluation_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> AdapterEvaluation:
        """Waits until the evaluation has a verdict or failed and returns it; raises ``TimeoutError`` after `timeout_s`."""

        def look() -> AdapterEvaluation:
            return self.retrieve(adapter_id, evaluation_id)

        return self._api.wait(
            look, lambda e: e["state"] not in UNDER_WAY, what=f"evaluation {evaluation_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    def report(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluationReport:
        """Returns the measurements, verdict and advice of a finished evaluation."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.call(AdapterEvaluationReport, "GET", path)

    def report_page(self, adapter_id: str, evaluation_id: str) -> bytes:
        """Returns the report as a self-contained HTML page."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.content(path, accept="text/html")

    def samples(
        self,
        adapter_id: str,
        evaluation_id: str,
        *,
        suite: str | None = None,
        only: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[EvaluationSample]:
        """Lists all items with the answers of each model; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/samples", adapter_id=adapter_id, evaluation_id=evaluation_id)
        return self._api.pages(EvaluationSample, path, given(suite=suite, only=only, limit=limit, after=after))
