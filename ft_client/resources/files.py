"""``client.files``: uploaded datasets and result files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import Deleted, File
from ft_client.wire import at, form, given


class Files(Resource):
    """Files that jobs train on, and their result files."""

    def create(
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
        """Uploads a dataset, read while it is sent; a small one returns validated, with status ``processed`` or ``error``.

        A large one is ``uploaded``: :meth:`wait` for it. `column_map` maps columns of CSV and Parquet to fields; `encoding` is that of text
        that is not UTF-8, `rows_at` the key of the rows in a file that is one JSON object, `model` the base model whose tokens are counted.
        `expires_after_s`: deletes the file so many seconds after its upload.
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
        return self._api.send_file(at("/v1/files"), file, data)

    def list(
        self, *, purpose: str | None = None, sha256: str | None = None, order: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[File]:
        """Lists files, newest first, `limit` per page; with `sha256`, those with these bytes."""
        return self._api.pages(at("/v1/files"), given(purpose=purpose, sha256=sha256, order=order, limit=limit, after=after))

    def retrieve(self, file_id: str) -> File:
        """Returns one file."""
        return self._api.call("GET", at("/v1/files/{file_id}", file_id))

    def delete(self, file_id: str) -> Deleted:
        """Deletes the bytes; refused while an unfinished job uses the file."""
        return self._api.call("DELETE", at("/v1/files/{file_id}", file_id))

    def events(self, file_id: str) -> Iterator[File]:
        """Yields changes of a file until it is validated; the last one has the result."""
        return self._api.events(at("/v1/files/{file_id}/events", file_id))

    def wait(
        self, file_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0, each: Callable[[File], object] | None = None
    ) -> File:
        """Waits until the file is ``processed`` or ``error`` and returns it; ``TimeoutError`` after `timeout_s`.

        `each` is called with the file on every look, the last one included.
        """
        return self._api.wait(
            lambda: self.retrieve(file_id),
            lambda f: f["status"] != "uploaded",
            what=f"the validation of {file_id}",
            timeout_s=timeout_s,
            poll_s=poll_s,
            each=each,
        )

    def validate(self, file_id: str) -> File:
        """Validates a file again after the platform failed to."""
        return self._api.call("POST", at("/v1/files/{file_id}/validate", file_id))

    def content(self, file_id: str) -> bytes:
        """Returns the bytes as uploaded, in memory; use :meth:`download` for large files."""
        return self._api.content(at("/v1/files/{file_id}/content", file_id))

    def download(self, file_id: str, target: Path) -> str:
        """Writes the bytes to `target` atomically, verifies the file's sha256, and returns it."""
        sha256 = (self.retrieve(file_id))["sha256"]
        return self._api.download(at("/v1/files/{file_id}/content", file_id), target, sha256=sha256)
