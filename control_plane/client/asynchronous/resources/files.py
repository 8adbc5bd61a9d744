"""``client.files``: uploaded datasets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Deleted, File, FileEvent
from control_plane.client.wire import at, form, given


class AsyncFiles(AsyncResource):
    """Uploaded files, and result files of jobs."""

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
        """Uploads a dataset, read while it is sent; a small one is returned validated, with status ``processed`` or ``error``.

        A larger one is ``uploaded``: call :meth:`wait`. `column_map` maps columns of CSV and Parquet files to the expected names;
        `encoding` is needed for text that is not UTF-8, `rows_at` is the key of the rows in a file that is one JSON object, and
        `model` is the base model whose tokens are counted. The file is deleted `expires_after_s` seconds after its upload.
        """
        asked: dict[str, Any] = {"column_map": column_map, "policies": policies, "encoding": encoding, "rows_at": rows_at, "model": model}
        data = form(purpose=purpose, **{name: value or None for name, value in asked.items()})
        if expires_after_s is not None:
            data |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        return await self._api.send_file(File, at("/v1/files"), file, data)

    def list(
        self, *, purpose: str | None = None, order: Literal["asc", "desc"] | None = None, limit: int = 100, after: str | None = None
    ) -> AsyncPages[File]:
        """Lists files, newest first unless `order` is ``asc``; `limit` is the page size."""
        return self._api.pages(File, at("/v1/files"), given(purpose=purpose, order=order, limit=limit, after=after))

    async def retrieve(self, file_id: str) -> File:
        """Returns a file."""
        return await self._api.call(File, "GET", at("/v1/files/{file_id}", file_id=file_id))

    async def delete(self, file_id: str) -> Deleted:
        """Deletes a file's bytes; refused while an unfinished job uses the file."""
        return await self._api.call(Deleted, "DELETE", at("/v1/files/{file_id}", file_id=file_id))

    def events(self, file_id: str) -> AsyncIterator[FileEvent]:
        """Yields changes of a file as they happen until its validation ends."""
        return self._api.events(FileEvent, at("/v1/files/{file_id}/events", file_id=file_id))

    async def wait(self, file_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> File:
        """Waits until the file is ``processed`` or ``error`` and returns it; raises ``TimeoutError`` after `timeout_s`."""

        async def look() -> File:
            return await self.retrieve(file_id)

        return await self._api.wait(
            look, lambda f: f["status"] != "uploaded", what=f"the validation of {file_id}", timeout_s=timeout_s, poll_s=poll_s
        )

    async def validate(self, file_id: str) -> File:
        """Validates a file again after the platform failed to."""
        return await self._api.call(File, "POST", at("/v1/files/{file_id}/validate", file_id=file_id))

    async def content(self, file_id: str) -> bytes:
        """Returns the bytes as uploaded, in memory; use :meth:`download` for large files."""
        return await self._api.content(at("/v1/files/{file_id}/content", file_id=file_id))

    async def download(self, file_id: str, target: Path) -> str:
        """Writes the bytes to `target` atomically, verifies the file's SHA-256 and returns it."""
        sha256 = (await self.retrieve(file_id))["sha256"]
        return await self._api.download(at("/v1/files/{file_id}/content", file_id=file_id), target, sha256=sha256)
