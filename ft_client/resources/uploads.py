"""``client.uploads``: large files in parts that are verified separately, and resumed after a lost connection."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from core.errors import IntegrityError, InvalidRequest, Unavailable
from ft_client.connection import Resource
from ft_client.types import Upload, UploadPart, UploadWithParts
from ft_client.wire import at

PART_BYTES = 16 << 20
"""Bytes sent, and held in memory, at a time; the API accepts up to 64 MiB."""
JOIN_TIMEOUT_S = 600.0
"""Seconds for one response to a join: 10 GB take minutes even in a slow store."""
GIVE_UP_S = 1800.0
"""Retries of a join that takes longer than a connection lives, or that waits for others."""
LOOK_S = 1.0


class Uploads(Resource):
    """Uploads in parts; :meth:`send` does everything."""

    def create(self, *, bytes: int, filename: str, mime_type: str, purpose: str, **options: Any) -> Upload:
        """Announces a file; what would be refused later is refused now.

        Options: `expires_after`, `column_map`, `policies`, `encoding`, `rows_at`, `model`.
        """
        return self._api.call(
            "POST", at("/v1/uploads"), json={"bytes": bytes, "filename": filename, "mime_type": mime_type, "purpose": purpose, **options}
        )

    def retrieve(self, upload_id: str) -> UploadWithParts:
        """Returns the upload with its stored parts, and the sha256 of each."""
        return self._api.call("GET", at("/v1/uploads/{upload_id}", upload_id))

    def add_part(self, upload_id: str, data: bytes) -> UploadPart:
        """Stores a part; the same bytes sent again are the same part."""
        path, files = at("/v1/uploads/{upload_id}/parts", upload_id), {"data": ("part", data, "application/octet-stream")}
        return self._api.call("POST", path, files=files, repeatable=True)

    def complete(self, upload_id: str, *, part_ids: Sequence[str], **options: Any) -> Upload:
        """Joins the parts, in the order of ``part_ids``, into a file; a second call returns the same file.

        Repeats the call for a join that takes longer than a connection lives, for at most half an hour.


        Options: `md5`.
        """
        path, deadline = at("/v1/uploads/{upload_id}/complete", upload_id), time.monotonic() + GIVE_UP_S
        while True:
            try:
                return self._api.call("POST", path, json={"part_ids": part_ids, **options}, repeatable=True, timeout=JOIN_TIMEOUT_S)
            except (httpx.ReadTimeout, httpx.RemoteProtocolError, Unavailable) as error:
                if time.monotonic() >= deadline or (isinstance(error, Unavailable) and error.code != "upload_completing"):
                    raise
            time.sleep(LOOK_S)

    def cancel(self, upload_id: str) -> Upload:
        """Cancels an upload that is not completed; its parts are removed."""
        return self._api.call("POST", at("/v1/uploads/{upload_id}/cancel", upload_id), repeatable=True)

    def send(
        self,
        file: Path,
        *,
        purpose: str = "fine-tune",
        column_map: Mapping[str, str] | None = None,
        policies: Mapping[str, Any] | None = None,
        encoding: str | None = None,
        rows_at: str | None = None,
        model: str | None = None,
        part_bytes: int = PART_BYTES,
    ) -> Upload | UploadWithParts:
        """Uploads a file of any size, part by part; the file itself is ``["file"]`` of the result.

        If this fails midway, the error's notes name the upload, which :meth:`resume` continues.
        """
        options: Any = {"column_map": column_map, "policies": policies, "encoding": encoding, "rows_at": rows_at, "model": model}
        options |= {"purpose": purpose}
        body = {name: value for name, value in options.items() if value}
        made = self.create(bytes=file.stat().st_size, filename=file.name, mime_type="application/octet-stream", **body)
        try:
            return self.resume(made["id"], file, part_bytes=part_bytes)
        except Exception as error:
            error.add_note(f'upload {made["id"]} is not complete; continue with uploads.resume("{made["id"]}", file)')
            raise

    def resume(
        self, upload_id: str, file: Path, *, part_bytes: int = PART_BYTES, on_stored: Callable[[int], None] = lambda _num_bytes: None
    ) -> Upload | UploadWithParts:
        """Sends the missing parts of an upload, and completes it. Stored parts are recognized by their sha256, and not sent again.

        `on_stored` gets the size of each part that is stored, whether it was sent now or before.
        """
        found = self.retrieve(upload_id)
        if found["status"] == "completed":
            return found
        if found["bytes"] != file.stat().st_size:
            raise InvalidRequest(
                f"{file} has {file.stat().st_size} bytes but upload {upload_id} was created for {found['bytes']}; pass the same file",
                param="file",
            )
        stored = {part["sha256"]: part["id"] for part in found["parts"]}
        part_ids, md5 = [], hashlib.md5(usedforsecurity=False)
        for data in _parts(file, part_bytes):
            md5.update(data)
            sha256 = hashlib.sha256(data).hexdigest()
            if sha256 not in stored:
                part = self.add_part(upload_id, data)
                if part["sha256"] != sha256:
                    raise IntegrityError(f"part {part['id']} arrived with sha256 {part['sha256']} instead of {sha256}; resume the upload")
                stored[sha256] = part["id"]
            part_ids.append(stored[sha256])
            on_stored(len(data))
        return self.complete(upload_id, part_ids=part_ids, md5=md5.hexdigest())


def _parts(file: Path, part_bytes: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while data := stream.read(part_bytes):
            yield data
