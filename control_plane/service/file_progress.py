"""Who validates a large file now, and how far it is: a claim in the file's row that has to be renewed every second."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from control_plane.service.platform import Platform
from control_plane.tables import files
from ft_assets.datasets.progress import Progress

WRITE_EVERY_S = 1.0
CLAIM_LOST_AFTER_S = 30.0
"""Seconds without a renewal after which another process may take the file: thirty missed ones."""
STARTING = "starting"
"""Stage before the first word of the validator: the bytes are being fetched."""


@contextlib.contextmanager
def claimed(
    platform: Platform, file_id: str, also: Callable[[Progress], None] | None = None
) -> Iterator[Callable[[Progress], None] | None]:
    """A sink for the progress of a file's validation while the claim on it is held; None if somebody else holds it.

    The row is written at most once a second, whether there is news or not: that is what keeps the claim.
    """
    if not _claim(platform, file_id):
        yield None
        return
    sink = _Sink(also)
    done = threading.Event()
    writer = threading.Thread(target=_renew, args=(platform, file_id, sink, done), daemon=True, name=f"progress-{file_id}")
    writer.start()
    try:
        yield sink
    finally:
        done.set()
        writer.join()
        with contextlib.suppress(SQLAlchemyError), platform.engine.begin() as conn:
            conn.execute(sa.update(files).where(files.c.id == file_id).values(progress=sa.null()))


def progress_of(file: Mapping[Any, Any] | RowMapping) -> Progress | None:
    """How far the validation of a file is; None where none runs."""
    stored: Mapping[str, Any] | None = file["progress"] if file["status"] == "uploaded" else None
    return None if stored is None else Progress(**{name: stored[name] for name in ("stage", "rows", "bytes", "total_bytes")})


class _Sink:
    def __init__(self, also: Callable[[Progress], None] | None) -> None:
        self.latest = Progress(stage=STARTING, rows=0, bytes=0, total_bytes=0)
        self._also = also

    def __call__(self, progress: Progress) -> None:
        self.latest = progress
        if self._also is not None:
            self._also(progress)


def _claim(platform: Platform, file_id: str) -> bool:
    now = platform.clock().timestamp()
    at = files.c.progress["at"].as_float()
    free = files.c.progress.is_(None) | (sa.func.jsonb_typeof(files.c.progress) == "null") | (at < now - CLAIM_LOST_AFTER_S)
    first = asdict(Progress(stage=STARTING, rows=0, bytes=0, total_bytes=0)) | {"at": now}
    query = sa.update(files).where(files.c.id == file_id, files.c.status == "uploaded", free).values(progress=first)
    with platform.engine.begin() as conn:
        return conn.execute(query.returning(files.c.id)).first() is not None


def _renew(platform: Platform, file_id: str, sink: _Sink, done: threading.Event) -> None:
    while not done.wait(WRITE_EVERY_S):
        value = asdict(sink.latest) | {"at": platform.clock().timestamp()}
        with contextlib.suppress(SQLAlchemyError), platform.engine.begin() as conn:  # asked again in a second
            conn.execute(sa.update(files).where(files.c.id == file_id, files.c.status == "uploaded").values(progress=value))
