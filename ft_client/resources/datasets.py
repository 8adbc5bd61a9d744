"""``client.datasets``, ``client.suites``, ``client.scored_suites``, ``client.capability_suites``: datasets, contamination lists, and suites
of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Page, Pages
from ft_client.record import Record
from ft_client.types import CapabilitySuite, Dataset, Deleted, File, ScoredSuite, Suite
from ft_client.wire import at, form, given


class Datasets(Resource):
    """Immutable dataset versions, each made from a file."""

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Dataset]:
        """Lists dataset versions, newest first; `limit` per page."""
        return self._api.pages(at("/v1/datasets"), given(limit=limit, after=after))

    def retrieve(self, dataset_id: str) -> Dataset:
        """Returns one dataset version."""
        return self._api.call("GET", at("/v1/datasets/{dataset_id}", dataset_id))

    def import_from_hub(self, *, hub_id: str, **options: Any) -> File:
        """Creates a file that is fetched from the Hub (``hub_id="hf://owner/name"`` with a pinned revision), then validated.

        Options: `column_map`, `policies`, `encoding`, `rows_at`, `model`, `hub_token`.
        """
        return self._api.call("POST", at("/v1/datasets/import"), json={"hub_id": hub_id, **options})

    def approve(self, dataset_id: str) -> Dataset:
        """Approves a dataset that waits for review, so that jobs may train on it; approving again changes nothing."""
        return self._api.call("POST", at("/v1/datasets/{dataset_id}/approve", dataset_id), repeatable=True)

    def report(self, dataset_or_file_id: str) -> Record:
        """Returns the validation report; a refused file has one, too."""
        return self._api.call("GET", at("/v1/datasets/{dataset_id}/report", dataset_or_file_id))

    def report_page(self, dataset_or_file_id: str) -> bytes:
        """Returns the report as a self-contained HTML page."""
        return self._api.content(at("/v1/datasets/{dataset_id}/report", dataset_or_file_id), accept="text/html")

    def preview(self, dataset_or_file_id: str, *, model: str, num_examples: int = 5, max_seq_len: int | None = None) -> Page[Record]:
        """Returns the first examples exactly as trained: text, token ids, spans with loss or reasoning, truncated parts."""
        params = given(model=model, num_examples=num_examples, max_seq_len=max_seq_len)
        return self._api.call("GET", at("/v1/datasets/{dataset_id}/preview", dataset_or_file_id), params=params)


class Suites(Resource):
    """Contamination lists that uploads are checked against."""

    def create(self, file: Path, *, name: str, field: str, column_map: Mapping[str, str] | None = None) -> Suite:
        """Registers a contamination list of your own; `field` of a row holds the question."""
        return self._api.send_file(at("/v1/suites"), file, form(name=name, field=field, column_map=column_map or None))

    def list(self) -> Pages[Suite]:
        """Lists those that ship, the operator's, then yours."""
        return self._api.pages(at("/v1/suites"))

    def index(self, target: Path) -> str:
        """Writes a ZIP archive with the hashes that your files are compared with to `target`; returns its sha256."""
        return self._api.download(at("/v1/suites/index"), target)

    def delete(self, name: str) -> Deleted:
        """Removes one of your lists; the operator's cannot be removed."""
        return self._api.call("DELETE", at("/v1/suites/{name}", name))


class ScoredSuites(Resource):
    """Suites of your own that jobs name in ``eval_config.suites``."""

    def create(
        self,
        file: Path,
        *,
        name: str,
        metric: str | None = None,
        grader: Mapping[str, Any] | None = None,
        max_drop: float | None = None,
        min_score: float | None = None,
    ) -> ScoredSuite:
        """Stores a file as the next version of the suite `name`, scored by a metric or a grader."""
        fields = form(name=name, metric=metric, grader=grader, max_drop=max_drop, min_score=min_score)
        return self._api.send_file(at("/v1/scored_suites"), file, fields)

    def list(self) -> Pages[ScoredSuite]:
        """Lists the newest version of each, by name."""
        return self._api.pages(at("/v1/scored_suites"))

    def versions(self, name: str) -> Pages[ScoredSuite]:
        """Lists the versions of one, newest first."""
        return self._api.pages(at("/v1/scored_suites/{name}", name))

    def delete(self, name: str) -> Deleted:
        """Removes one with all of its versions."""
        return self._api.call("DELETE", at("/v1/scored_suites/{name}", name))


class CapabilitySuites(Resource):
    """Capability suites that a job can name in ``eval_config.capability``."""

    def list(self) -> Pages[CapabilitySuite]:
        """Lists all of them; one that is not ready includes the reason."""
        return self._api.pages(at("/v1/capability_suites"))
