"""``client.exports`` and ``client.adapter_evaluations``: downloads of adapters, and further evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import AdapterEvaluation, AdapterEvaluationReport, Deleted, EvaluationSample, Export
from ft_client.wire import at, given

UNDER_WAY = frozenset({"queued", "running"})


class Exports(Resource):
    """Adapters as files: the adapter itself (PEFT or GGUF), merged weights, merged GGUF, the tokenizer."""

    def create(self, adapter_id: str, *, format: str, **options: Any) -> Export:
        """Requests an export of an adapter; the same request returns the same export.

        Options: `precision`.
        """
        return self._api.call(
            "POST", at("/v1/adapters/{adapter_id}/exports", adapter_id), json={"format": format, **options}, repeatable=True
        )

    def list(self, adapter_id: str) -> Pages[Export]:
        """Lists exports of an adapter, newest first."""
        return self._api.pages(at("/v1/adapters/{adapter_id}/exports", adapter_id))

    def retrieve(self, adapter_id: str, export_id: str) -> Export:
        """Returns one export."""
        return self._api.call("GET", at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id, export_id))

    def wait(self, adapter_id: str, export_id: str, *, timeout_s: float | None = None, poll_s: float = 0.5) -> Export:
        """Waits until the export is ready and signed, or has failed, and returns it; ``TimeoutError`` after `timeout_s`."""
        return self._api.wait(
            lambda: self.retrieve(adapter_id, export_id),
            lambda e: e["status"] not in UNDER_WAY and (e["status"] != "ready" or e["signature"] is not None),
            what=f"export {export_id}",
            timeout_s=timeout_s,
            poll_s=poll_s,
        )

    def download(self, adapter_id: str, export_id: str, target: Path) -> str:
        """Writes the archive to `target` atomically, verifies its sha256, and returns it."""
        return self._api.download(at("/v1/adapters/{adapter_id}/exports/{export_id}/content", adapter_id, export_id), target)

    def delete(self, adapter_id: str, export_id: str) -> Deleted:
        """Deletes an export with its archive; cancels one in progress."""
        return self._api.call("DELETE", at("/v1/adapters/{adapter_id}/exports/{export_id}", adapter_id, export_id))


class AdapterEvaluations(Resource):
    """Verdicts on a registered adapter: with its job, after its promotion, after a base update, or on request."""

    def create(self, adapter_id: str, **options: Any) -> AdapterEvaluation:
        """Requests a further evaluation of an adapter on the current bytes of its base; returns a waiting one instead if there is one.

        Options: `eval_config`.
        """
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/evaluations", adapter_id), json=options, repeatable=True)

    def list(self, adapter_id: str, *, limit: int = 20, after: str | None = None) -> Pages[AdapterEvaluation]:
        """Lists finished and waiting evaluations of an adapter, newest first; `limit` per page."""
        return self._api.pages(at("/v1/adapters/{adapter_id}/evaluations", adapter_id), given(limit=limit, after=after))

    def retrieve(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluation:
        """Returns one evaluation."""
        return self._api.call("GET", at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}", adapter_id, evaluation_id))

    def wait(self, adapter_id: str, evaluation_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> AdapterEvaluation:
        """Waits for a verdict or a failure and returns the evaluation; ``TimeoutError`` after `timeout_s`."""
        return self._api.wait(
            lambda: self.retrieve(adapter_id, evaluation_id),
            lambda e: e["state"] not in UNDER_WAY,
            what=f"evaluation {evaluation_id}",
            timeout_s=timeout_s,
            poll_s=poll_s,
        )

    def report(self, adapter_id: str, evaluation_id: str) -> AdapterEvaluationReport:
        """Returns the results of a finished evaluation, its verdict, and advice."""
        return self._api.call("GET", at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id, evaluation_id))

    def report_page(self, adapter_id: str, evaluation_id: str) -> bytes:
        """Returns the results as a self-contained HTML page."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/report", adapter_id, evaluation_id)
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
        """Lists every item with the answer of each model; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/adapters/{adapter_id}/evaluations/{evaluation_id}/samples", adapter_id, evaluation_id)
        return self._api.pages(path, given(suite=suite, only=only, limit=limit, after=after))
