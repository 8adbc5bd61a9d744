"""``client.sweeps``: many jobs from one request, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import JobComparison, Sweep
from ft_client.wire import at, given


class Sweeps(Resource):
    """Hyperparameter sweeps."""

    def create(self, *, model: str, training_file: str | None = None, sweep: Mapping[str, Any], **options: Any) -> Sweep:
        """Submits a job for each combination in ``sweep``; sent twice under one ``idempotency_key`` it is one sweep.

        Options: `training_files` (a mixture, instead of `training_file`), `validation_file`, `suffix`, `seed`, `metadata`,
        `integrations`, `method`, `hyperparameters`, `eval_config`, `tier`, `spot`, `recipe`, `hardware`, `adapter`, `auto_promote`,
        `warm_start`, `force`.
        """
        key = options.pop("idempotency_key", None)
        body = {"model": model, **given(training_file=training_file), "sweep": sweep, **options}
        return self._api.create(at("/v1/fine_tuning/sweeps"), key=key, json=body)

    def list(self, *, limit: int = 20, after: str | None = None) -> Pages[Sweep]:
        """Lists sweeps, newest first; `limit` per page."""
        return self._api.pages(at("/v1/fine_tuning/sweeps"), given(limit=limit, after=after))

    def retrieve(self, sweep_id: str) -> Sweep:
        """Returns one sweep with its trials and the best of them."""
        return self._api.call("GET", at("/v1/fine_tuning/sweeps/{sweep_id}", sweep_id))

    def compare(self, sweep_id: str) -> JobComparison:
        """Compares the jobs of a sweep side by side."""
        return self._api.call("GET", at("/v1/fine_tuning/sweeps/{sweep_id}/compare", sweep_id))

    def cancel(self, sweep_id: str) -> Sweep:
        """Submits no further trials, and cancels the jobs that have not ended."""
        return self._api.call("POST", at("/v1/fine_tuning/sweeps/{sweep_id}/cancel", sweep_id), repeatable=True)

    def wait(self, sweep_id: str, *, timeout_s: float | None = None, poll_s: float = 2.0) -> Sweep:
        """Waits until every trial has ended and returns the sweep; ``TimeoutError`` after `timeout_s`."""
        return self._api.wait(
            lambda: self.retrieve(sweep_id),
            lambda s: s["status"] != "running",
            what=f"sweep {sweep_id}",
            timeout_s=timeout_s,
            poll_s=poll_s,
        )
