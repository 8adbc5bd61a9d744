"""``client.datasets``, ``client.suites`` and ``client.capability_suites``: validated data and evaluation suites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import CapabilitySuite, Dataset, Deleted, File, ImportDataset, Json, ListOf, Suite
from control_plane.client.wire import at, form, given


class AsyncDatasets(AsyncResource):
    """Immutable dataset versions, each made from a file."""

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[Dataset]:
        """Lists dataset versions, newest first; `limit` is the page size."""
        return self._api.pages(Dataset, at("/v1/datasets"), given(limit=limit, after=after))

    async def retrieve(self, dataset_id: str) -> Dataset:
        """Returns a dataset version."""
        return await self._api.call(Dataset, "GET", at("/v1/datasets/{dataset_id}", dataset_id=dataset_id))

    async def import_from_hub(self, **body: Unpack[ImportDataset]) -> File:
        """Imports a dataset from the Hugging Face Hub (``hub_id="hf://owner/name"`` with a pinned revision) as a file, then validates
        it."""
        return await self._api.call(File, "POST", at("/v1/datasets/import"), json=body)

    async def approve(self, dataset_id: str) -> Dataset:
        """Approves a dataset held for review, so that jobs can train on it; approving it again changes nothing."""
        path = at("/v1/datasets/{dataset_id}/approve", dataset_id=dataset_id)
        return await self._api.call(Dataset, "POST", path, repeatable=True)

    async def report(self, dataset_or_file_id: str) -> Json:
        """Returns the validation report, also of a file that failed validation."""
        return await self._api.call(Json, "GET", at("/v1/datasets/{dataset_id}/report", dataset_id=dataset_or_file_id))

    async def report_page(self, dataset_or_file_id: str) -> bytes:
        """Returns the report as a self-contained HTML page."""
        return await self._api.content(at("/v1/datasets/{dataset_id}/report", dataset_id=dataset_or_file_id), accept="text/html")

    async def preview(self, dataset_or_file_id: str, *, model: str, num_examples: int = 5, max_seq_len: int | None = None) -> ListOf[Json]:
        """Returns the first examples exactly as they are trained: text, token ids, spans with loss, truncation."""
        params = given(model=model, num_examples=num_examples, max_seq_len=max_seq_len)
        path = at("/v1/datasets/{dataset_id}/preview", dataset_id=dataset_or_file_id)
        return await self._api.call(ListOf[Json], "GET", path, params=params)


class AsyncSuites(AsyncResource):
    """Evaluation suites that uploads are checked against for contamination."""

    async def create(self, file: Path, *, name: str, field: str, column_map: Mapping[str, str] | None = None) -> Suite:
        """Registers a suite; `field` names the column with the question."""
        return await self._api.send_file(Suite, at("/v1/suites"), file, form(name=name, field=field, column_map=column_map or None))

    def list(self) -> AsyncPages[Suite]:
        """Lists the operator's suites, then the tenant's."""
        return self._api.pages(Suite, at("/v1/suites"))

    async def delete(self, name: str) -> Deleted:
        """Deletes one of the tenant's suites; the operator's cannot be deleted."""
        return await self._api.call(Deleted, "DELETE", at("/v1/suites/{name}", name=name))


class AsyncCapabilitySuites(AsyncResource):
    """Capability suites that a job can name in ``eval_config.capability``."""

    def list(self) -> AsyncPages[CapabilitySuite]:
        """Lists all capability suites, with the reason for each that is not ready."""
        return self._api.pages(CapabilitySuite, at("/v1/capability_suites"))
