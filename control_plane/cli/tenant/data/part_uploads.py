"""Large files go up in parts; the same command once more goes on where the last one was interrupted.

Which upload a file belongs to is remembered in a small file under the user's cache; what is there of it is asked of the API, part
by part, by its sha256. A file that was changed meanwhile is another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from control_plane.cli.output import console, say
from ft_assets.errors import IntegrityError, NotFound, Unavailable

if TYPE_CHECKING:
    from rich.progress import Progress

    from control_plane.client import FtClient
    from control_plane.client.types import File, Upload

FROM_BYTES = 64 << 20
"""Files from here on go up in parts: below, sending all of it again costs less than asking."""
PART_BYTES = 16 << 20
"""Sent, and held in memory, at a time: what a broken connection costs."""
LINE_EVERY_S = 10.0


def send_in_parts(client: FtClient, url: str, file: Path, options: Mapping[str, Any], *, part_bytes: int = PART_BYTES) -> File:
    """The uploaded file; what an earlier, interrupted call has stored of it is not sent again."""
    note = _Note(url, file, options)
    upload = _begun(client, note) or _begin(client, note, file, options)
    done = upload if upload["status"] == "completed" else _completed(client, upload, file, part_bytes)
    note.forget()
    made = done["file"]
    if made is None:
        raise NotFound(f"the file of upload {upload['id']} was deleted; upload it again", code="file_not_found")
    return made


def _completed(client: FtClient, upload: Upload, file: Path, part_bytes: int) -> Upload:
    """The upload with all of `file`: the parts that are missing are sent, and joined."""
    stored = {part["sha256"]: part["id"] for part in client.uploads.retrieve(upload["id"])["parts"]}
    if stored:
        say(f"going on with upload {upload['id']}: {len(stored)} parts are there")
    part_ids: list[str] = []
    try:
        with SendingView(file.name, upload["bytes"]) as view:
            for data in _pieces(file, part_bytes):
                sha256 = hashlib.sha256(data).hexdigest()
                if sha256 not in stored:
                    stored[sha256] = _sent(client, upload["id"], data, sha256)
                part_ids.append(stored[sha256])
                view.sent(len(data))
    except (KeyboardInterrupt, httpx.TransportError, Unavailable):
        say(f"\ninterrupted; run the same command within an hour to resume upload {upload['id']}")
        raise
    return client.uploads.complete(upload["id"], part_ids=part_ids)


def _begun(client: FtClient, note: _Note) -> Upload | None:
    """The upload that was interrupted, if it can be gone on with."""
    upload_id = note.read()
    if upload_id is None:
        return None
    try:
        found = client.uploads.retrieve(upload_id)
    except NotFound:
        return None
    return found if found["status"] in ("pending", "completed") else None


def _begin(client: FtClient, note: _Note, file: Path, options: Mapping[str, Any]) -> Upload:
    asked: Any = {name: value for name, value in options.items() if value}
    size = file.stat().st_size
    made = client.uploads.create(bytes=size, filename=file.name, mime_type="application/octet-stream", purpose="fine-tune", **asked)
    note.write(made["id"])
    return made


def _sent(client: FtClient, upload_id: str, data: bytes, sha256: str) -> str:
    part = client.uploads.add_part(upload_id, data)
    if part["sha256"] != sha256:
        raise IntegrityError(f"part {part['id']} arrived with sha256 {part['sha256']} instead of {sha256}; run the same command again")
    return part["id"]


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while data := stream.read(size):
            yield data


class _Note:
    """Where it is remembered which upload a file belongs to: by address, path, size, time of change, and what was asked for."""

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
        """As well as it goes: where nothing can be remembered, an interrupted upload begins anew."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"upload": upload_id}))

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class SendingView:
    """A bar on a terminal, elsewhere a line every ten seconds; a context, because a live display has to be closed."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._bars: Progress | None = None
        self._next_line = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

            self._bars = Progress(
                TextColumn("{task.description:<12}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(),
                TimeRemainingColumn(), console=console(stderr=True),
            )  # fmt: skip
            self._bars.add_task("uploading", total=self._total)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def sent(self, num_bytes: int) -> None:
        """So many more are there."""
        self._done += num_bytes
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=self._done)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            say(f"uploading {self._name}: {100 * self._done / self._total:.0f} %")
