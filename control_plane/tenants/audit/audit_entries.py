"""Chains the entries of the audit log, exports the chain, and verifies it in the database or in an exported file.

Triggers write entries in the transactions of the changes and wait for nothing. The worker gives each entry its place within a minute, a
batch per transaction, whatever the order in which those transactions ended.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.platform.bulk_updates import update_each
from control_plane.platform.context import Platform
from control_plane.tenant_data.tables import deletions
from control_plane.tenants.audit.audit_chain import Content, Entry, Head, Verdict, check, place
from control_plane.tenants.tables import audit_log
from core.errors import IntegrityError

AT_A_TIME = 500
BUDGET_S = 10.0
PLACE_LOCK = 0x66745F61
"""Advisory lock of the transaction that appends to the chain."""
SALT_BYTES = 16


def chain_due(platform: Platform, *, budget_s: float = BUDGET_S) -> int:
    """Give every entry that has none its place in the chain; returns how many got one. Continues for `budget_s` at most."""
    until, num = time.monotonic() + budget_s, 0
    while time.monotonic() < until:
        with platform.engine.begin() as conn:
            placed = _chain_batch(conn)
        num += placed
        if placed < AT_A_TIME:
            break
    return num


def _chain_batch(conn: Connection) -> int:
    conn.execute(sa.text("SELECT pg_advisory_xact_lock(:id)"), {"id": PLACE_LOCK})
    columns = [audit_log.c[f.name] for f in fields(Content)]
    due = sa.select(*columns).where(audit_log.c.position.is_(None)).order_by(audit_log.c.seq).limit(AT_A_TIME)
    head, rows = _head(conn), list[dict[str, Any]]()
    for row in conn.execute(due.with_for_update(skip_locked=True)).mappings():  # an erasure may hold some of them
        placed = place(Content(**_values(row)), after=head, salt=secrets.token_hex(SALT_BYTES))
        rows.append({"seq": row["seq"], **placed})
        head = Head(position=placed["position"], sha256=placed["sha256"])
    return update_each(conn, audit_log, rows, key=("seq",)) if rows else 0


def _head(conn: Connection) -> Head | None:
    query = sa.select(audit_log.c.position, audit_log.c.sha256).where(audit_log.c.position.is_not(None))
    last = conn.execute(query.order_by(audit_log.c.position.desc()).limit(1)).one_or_none()
    return None if last is None else Head(position=last.position, sha256=last.sha256)


def export(platform: Platform, file: Path) -> Verdict:
    """Chain what is due, and write the whole chain to a new file: an entry a line, and a last line with the number of entries and the head.

    The chain is verified meanwhile; what does not hold is in the result.
    """
    chain_due(platform, budget_s=float("inf"))
    with file.open("x", encoding="utf-8") as out, platform.engine.connect() as conn:
        verdict = _with_causes(conn, check(_written(_entries(conn), out)))
        end = {"num_entries": verdict.num_entries, "head": None if verdict.head is None else str(verdict.head)}
        out.write(json.dumps(end) + "\n")
    return verdict


def verify(platform: Platform, *, head: Head | None = None) -> Verdict:
    """Verify the chain of the database, to which what is due was added."""
    chain_due(platform, budget_s=float("inf"))
    with platform.engine.connect() as conn:
        return _with_causes(conn, check(_entries(conn), head=head))


def verify_file(file: Path, *, head: Head | None = None) -> Verdict:
    """Verify an exported file without a database. Raises ``IntegrityError`` for what is no export."""
    lines = _Lines(file)
    verdict = check(lines.entries(), head=head)
    ends = {"num_entries": verdict.num_entries, "head": None if verdict.head is None else str(verdict.head)}
    cut = () if lines.end == ends else ("the last line of the file is missing, or names another end: the file was cut or edited",)
    return replace(verdict, findings=(*verdict.findings, *cut))


class _Lines:
    """The entries of an exported file, one at a time, and its last line."""

    def __init__(self, file: Path) -> None:
        self.file, self.end = file, dict[str, Any]()

    def entries(self) -> Iterator[Entry]:
        with self.file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    body = json.loads(line)
                    if "num_entries" in body:
                        self.end = body
                        continue
                    entry = Entry(**body)
                except (ValueError, TypeError) as error:
                    raise IntegrityError(
                        f"line {number} of {self.file} is no entry of the audit log ({error}); name a file of `ft admin audit export`",
                        code="audit_export_unreadable",
                    ) from error
                yield entry


def _written(entries: Iterable[Entry], out: TextIO) -> Iterator[Entry]:
    for entry in entries:
        out.write(json.dumps(asdict(entry)) + "\n")
        yield entry


def _entries(conn: Connection) -> Iterator[Entry]:
    columns = [audit_log.c[f.name] for f in fields(Entry)]
    query = sa.select(*columns).where(audit_log.c.position.is_not(None)).order_by(audit_log.c.position)
    for row in conn.execution_options(yield_per=AT_A_TIME).execute(query).mappings():
        yield Entry(**_values(row))


def _with_causes(conn: Connection, verdict: Verdict) -> Verdict:
    """Add erased entries that no deletion of their tenant's data explains: it erases at the moment at which it is done."""
    explained = sa.exists().where(
        deletions.c.subject_kind == "tenant",
        deletions.c.subject_id == audit_log.c.tenant_id,
        deletions.c.done_at == audit_log.c.redacted_at,
    )
    erased = sa.select(audit_log.c.tenant_id).distinct().where(audit_log.c.redacted_at.is_not(None), ~explained)
    causeless = conn.execute(erased).scalars()
    found = tuple(f"entries of {tenant or 'the platform'} are marked as erased, and no deletion explains it" for tenant in causeless)
    return replace(verdict, findings=(*verdict.findings, *found))


def _values(row: RowMapping) -> dict[str, Any]:
    return {name: _text(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="microseconds")
