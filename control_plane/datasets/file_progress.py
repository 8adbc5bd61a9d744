"""Who works on a file now, and how far it is: a claim in the file's row that has to be renewed every second.

A claim carries a random token of its owner, and whatever is written under it names the token: a process that stalled, lost
its claim and wakes changes nothing for the one that took over.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import SQLAlchemyError

from control_plane.datasets.tables import files
from control_plane.platform.context import Platform
from ft_assets.datasets.pass_progress import Progress

WRITE_EVERY_S = 1.0
CLAIM_LOST_AFTER_S = 30.0
"""Seconds without a renewal after which another process may take the file: thirty missed ones."""
STARTING = "starting"
"""Stage before the first word of the validator: the bytes are being read from the store."""
FETCHING = "fetching"
"""Stage of an import: the bytes come from the Hub."""
NUM_TOKEN_BYTES = 8


class Claim:
    """The claim on a file, as a sink for the progress of the work on it."""

    def __init__(self, also: Callable[[Progress], None] | None) -> None:
        self.token = secrets.token_hex(NUM_TOKEN_BYTES)
        self.latest = Progress(stage=STARTING, rows=0, bytes=0, total_bytes=0)
        self._also = also

    def __call__(self, progress: Progress) -> None:
        self.latest = progress
        if self._also is not None:
            self._also(progress)

    def value(self, at: float) -> dict[str, Any]:
        """What the file's row holds while the claim does."""
        return asdict(self.latest) | {"at": at, "token": self.token}


@contextlib.contextmanager
def claimed(platform: Platform, file_id: str, also: Callable[[Progress], None] | None = None) -> Iterator[Claim | None]:
    """The claim on a file that is ``uploaded``, held until the end of the context; None if somebody else holds it.

    The row is written at most once a second, whether there is news or not: that is what keeps the claim.
    """
    claim = Claim(also)
    if not take(platform, file_id, claim):
        yield None
        return
    done = threading.Event()
    writer = threading.Thread(target=_renew, args=(platform, file_id, claim, done), daemon=True, name=f"progress-{file_id}")
    writer.start()
    try:
        yield claim
    finally:
        done.set()
        writer.join()
        with contextlib.suppress(SQLAlchemyError):
            clear(platform, file_id, claim)


def progress_of(file: Mapping[Any, Any] | RowMapping) -> Progress | None:
    """How far the work on a file is; None where none is done."""
    stored: Mapping[str, Any] | None = file["progress"] if file["status"] == "uploaded" else None
    return None if stored is None else Progress(**{name: stored[name] for name in ("stage", "rows", "bytes", "total_bytes")})


def is_held(file: Mapping[Any, Any] | RowMapping, token: str) -> bool:
    """Whether the claim with `token` still stands in the row of `file`."""
    return bool(file["progress"]) and file["progress"].get("token") == token


def take(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Enter `claim` where no other holds; one that was not renewed for long holds no more."""
    now = platform.clock().timestamp()
    at = files.c.progress["at"].as_float()
    free = files.c.progress.is_(None) | (sa.func.jsonb_typeof(files.c.progress) == "null") | (at < now - CLAIM_LOST_AFTER_S)
    return _write(platform, file_id, free, claim.value(now))


def renew(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Write how far it is; False, and nothing is written, once the claim is lost."""
    return _write(platform, file_id, _owned(claim), claim.value(platform.clock().timestamp()))


def clear(platform: Platform, file_id: str, claim: Claim) -> bool:
    """Give the file free, unless somebody else has it."""
    return _write(platform, file_id, _owned(claim), sa.null())


def _owned(claim: Claim) -> sa.ColumnElement[bool]:
    return sa.cast(files.c.progress["token"].as_string(), sa.Text) == claim.token


def _write(platform: Platform, file_id: str, where: sa.ColumnElement[bool], value: Any) -> bool:
    query = sa.update(files).where(files.c.id == file_id, files.c.status == "uploaded", where).values(progress=value)
    with platform.engine.begin() as conn:
        return conn.execute(query.returning(files.c.id)).first() is not None


def _renew(platform: Platform, file_id: str, claim: Claim, done: threading.Event) -> None:
    while not done.wait(WRITE_EVERY_S):
        with contextlib.suppress(SQLAlchemyError):  # asked again in a second
            if not renew(platform, file_id, claim):
                return
