"""Uploads large files in parts; running the same command again continues an interrupted upload.

A small file in the user's cache records which upload a file belongs to; the API is asked which parts exist, by their sha256. A file that
changed meanwhile is a new upload.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from core.errors import NotFound, Unavailable
from ft_client.cli.output import live_bars, say

if TYPE_CHECKING:
    from rich.progress import Progress

    from ft_client import FtClient, Record

FROM_BYTES = 64 << 20
"""Files from this size on are uploaded in parts; resending a smaller one costs less than asking."""
PART_BYTES = 16 << 20
"""Sent, and held in memory, at a time: what a broken connection costs."""
LINE_EVERY_S = 10.0


def send_in_parts(client: FtClient, url: str, file: Path, options: Mapping[str, Any], *, part_bytes: int = PART_BYTES) -> Record:
    """Return the uploaded file; parts stored by an earlier, interrupted call are not sent again."""
    note = _Note(url, file, options)
    upload = _begun(client, note) or _begin(client, note, file, options)
    done = upload if upload["status"] == "completed" else _completed(client, upload, file, part_bytes)
    note.forget()
    made: Record | None = done["file"]
    if made is None:
        raise NotFound(f"the file of upload {upload['id']} was deleted; upload it again", code="file_not_found")
    return made


def _completed(client: FtClient, upload: Record, file: Path, part_bytes: int) -> Record:
    """Send the missing parts of `file`, join them and return the upload."""
    if stored := upload.get("parts"):
        say(f"resuming upload {upload['id']}: {len(stored)} parts are stored")
    try:
        with live_bars("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn") as bars:
            view = SendingView(file.name, upload["bytes"], bars)
            return client.uploads.resume(upload["id"], file, part_bytes=part_bytes, on_stored=view.sent)
    except (KeyboardInterrupt, httpx.TransportError, Unavailable):
        say(f"\ninterrupted; run the same command within an hour to resume upload {upload['id']}")
        raise


def _begun(client: FtClient, note: _Note) -> Record | None:
    """Return the interrupted upload, if it can be continued."""
    upload_id = note.read()
    if upload_id is None:
        return None
    try:
        found = client.uploads.retrieve(upload_id)
    except NotFound:
        return None
    return found if found["status"] in ("pending", "completed") else None


def _begin(client: FtClient, note: _Note, file: Path, options: Mapping[str, Any]) -> Record:
    requested: Any = {name: value for name, value in options.items() if value}
    size = file.stat().st_size
    made = client.uploads.create(bytes=size, filename=file.name, mime_type="application/octet-stream", purpose="fine-tune", **requested)
    note.write(made["id"])
    return made


class _Note:
    """Path of the record of a file's upload: by address, path, size, modification time and options."""

    def __init__(self, url: str, file: Path, options: Mapping[str, Any]) -> None:
        stat = file.stat()
        named = [url, str(file.resolve()), stat.st_size, stat.st_mtime_ns, {k: v for k, v in options.items() if v}]
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = base / "ft" / "uploads" / f"{hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:32]}.json"

    def read(self) -> str | None:
        try:
            return str(json.loads(self._path.read_text())["upload"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, upload_id: str) -> None:
        """Best effort: if nothing can be stored, an interrupted upload starts again."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"upload": upload_id}))

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class SendingView:
    """A bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, name: str, total: int, bars: Progress | None) -> None:
        self._name, self._total, self._done, self._bars = name, total, 0, bars
        self._next_line = time.monotonic() + LINE_EVERY_S
        if bars is not None:
            bars.add_task("uploading", total=total)

    def sent(self, num_bytes: int) -> None:
        """Add so many stored bytes."""
        self._done += num_bytes
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._done)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            say(f"uploading {self._name}: {100 * self._done / self._total:.0f} %")
