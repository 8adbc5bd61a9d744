"""``client.files``: datasets as they are uploaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Deleted, File, FileEvent
from control_plane.client.wire import at, form, given


class AsyncFiles(AsyncResource):
    """Files that jobs train on, and those that they result in."""

    async def create(
        self,
        file: Path,
        *,
        purpose: str = "fine-tune",
        column_map: Mapping[str, str] | None = None,
        policies: Mapping[str, Any] | None = None,
        encoding: str | None = None,
        rows_at: str | None = None,
        model: str | None = None,
        expires_after_s: int | None = None,
    ) -> File:
        """Upload a dataset, read as it is sent; a small one comes back validated, with status ``processed`` or ``error``.

        Any other is ``uploaded``: :meth:`wait` for it. `column_map` names the columns of CSV and Parquet, theirs to ours;
        `encoding` is that of the text where it is not UTF-8, `rows_at` the key of the rows in a file that is one JSON object,
        `model` is the base model whose tokens are counted. `expires_after_s` has the file deleted so long after its upload.
        """
        requested: dict[str, Any] = {
            "column_map": column_map,
            "policies": policies,
            "encoding": encoding,
            "rows_at": rows_at,
            "model": model,
        }
        data = form(purpose=purpose, **{name: value or None for name, value in requested.items()})
        if expires_after_s is not None:
            data |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        return await self._api.send_file(File, at("/v1/files"), file, data)

    def list(
        self, *, purpose: str | None = None, order: Literal["asc", "desc"] | None = None, limit: int = 100, after: str | None = None
    ) -> AsyncPages[File]:
        """Files, newest first; `limit` to a page."""
        return self._api.pages(File, at("/v1/files"), given(purpose=purpose, order=order, limit=limit, after=after))

    async def retrieve(self, file_id: str) -> File:
        """One file."""
        return await self._api.call(File, "GET", at("/v1/files/{file_id}", file_id=file_id))

    async def delete(self, file_id: str) -> Deleted:
        """Delete the bytes; refused while a job that has not ended names the file."""
        return await self._api.call(Deleted, "DELETE", at("/v1/files/{file_id}", file_id=file_id))

    def events(self, file_id: str) -> AsyncIterator[FileEvent]:
        """Changes of a file as they happen, until it is validated; the last one tells how it ended."""
        return self._api.events(FileEvent, at("/v1/files/{file_id}/events", file_id=file_id))

    async def wait(self, file_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> File:
        """The file, once it is ``processed`` or ``error``; ``TimeoutError`` if it is neither within `timeout_s`."""

        async def look() -> File:
            return await self.retrieve(file_id)

        return await self._api.wait(
            look, lambda f: f["status"] != "uploaded", what=f"the validation of {file_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def validate(self, file_id: str) -> File:
        """Have a file that the platform failed on validated once more."""
        return await self._api.call(File, "POST", at("/v1/files/{file_id}/validate", file_id=file_id))

    async def content(self, file_id: str) -> bytes:
        """The bytes as uploaded, in memory; :meth:`download` is for large ones."""
        return await self._api.content(at("/v1/files/{file_id}/content", file_id=file_id))

    async def download(self, file_id: str, target: Path) -> str:
        """Write the bytes to `target`, whole or not at all, and hold them against the file's sha256, which is returned."""
        sha256 = (await self.retrieve(file_id))["sha256"]
        return await self._api.download(at("/v1/files/{file_id}/content", file_id=file_id), target, sha256=sha256)
