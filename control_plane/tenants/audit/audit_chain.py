"""The audit log as a hash chain: what is hashed, and what a chain that was tampered with shows.

Each entry has a position, the digest of the entry before it, and a digest of both and of who did what to which object, when. What erasure
may remove (values, address, user agent) is in it as a digest with a random salt, which the erasure removes as well: the chain holds, and
the digest leads nowhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.training import canonical_json

HEAD = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """An entry of the audit log. Times are text, in ISO 8601 with microseconds in UTC."""

    seq: int
    tenant_id: str | None
    actor_kind: str
    actor_id: str
    action: str
    object_type: str
    object_id: str
    request_id: str | None
    created_at: str
    changes: Mapping[str, Any]
    ip: str | None
    user_agent: str | None
    redacted_at: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Content):
    """An entry with its place in the chain."""

    position: int
    """From 1, without gaps, in the order in which entries were chained."""
    previous_sha256: str | None
    """Of the entry before it; None for the first."""
    salt: str | None
    """None once the content is erased."""
    content_sha256: str
    """Of the salt and what an erasure removes."""
    sha256: str

    @property
    def name(self) -> str:
        return f"aud_{self.seq} (position {self.position})"


ERASABLE = ("changes", "ip", "user_agent")
KEPT = tuple(f.name for f in fields(Content) if f.name not in (*ERASABLE, "redacted_at"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The last entry of a chain. With a copy kept elsewhere, nothing before it can be changed or removed unseen."""

    position: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.position}:{self.sha256}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    num_entries: int
    num_redacted: int
    head: Head | None
    findings: tuple[str, ...]
    """What does not hold, by entry; empty: the chain is whole."""


def parse_head(text: str) -> Head:
    """Read what an export printed; ``ValueError`` otherwise."""
    if (match := HEAD.fullmatch(text)) is None:
        raise ValueError(f"head {text[:80]!r} is not POSITION:SHA256, as `ft admin audit export` prints it")
    return Head(position=int(match[1]), sha256=match[2])


def place(content: Content, *, after: Head | None, salt: str) -> dict[str, Any]:
    """Return the columns that give an entry its place after the chain's head."""
    position, previous, digest = after.position + 1 if after else 1, after.sha256 if after else None, _content_sha256(content, salt)
    kept = {name: getattr(content, name) for name in KEPT}
    sha256 = _entry_sha256(kept, position, previous, digest)
    return {"position": position, "previous_sha256": previous, "salt": salt, "content_sha256": digest, "sha256": sha256}


def check(entries: Iterable[Entry], *, head: Head | None = None) -> Verdict:
    """Recompute a whole chain.

    1. Positions count from 1: a gap names what is missing, a step back what was inserted or moved.
    2. Each entry's own digest, and that of its content unless it was erased: names the altered entry.
    3. The digest of the entry before it: names an entry that does not follow its predecessor.
    4. The entry at the position of `head`, which was noted earlier, is still the same.
    """
    last: Entry | None = None
    findings, num, redacted, met = list[str](), 0, 0, head is None
    for entry in entries:
        findings += _compare(entry, last)
        num, redacted = num + 1, redacted + (entry.redacted_at is not None)
        if head is not None and entry.position == head.position:
            met = True
            if entry.sha256 != head.sha256:
                findings.append(f"{entry.name} is not the entry that was noted as {head}")
        last = entry
    if not met:
        findings.append(f"the chain ends before position {head.position if head else 0}, which was noted earlier: entries were removed")
    end = None if last is None else Head(position=last.position, sha256=last.sha256)
    return Verdict(num_entries=num, num_redacted=redacted, head=end, findings=tuple(findings))


def _compare(entry: Entry, last: Entry | None) -> Iterator[str]:
    due = last.position + 1 if last else 1
    if entry.position > due:
        missing = f"position {due} is" if entry.position == due + 1 else f"positions {due} to {entry.position - 1} are"
        yield f"{missing} missing before {entry.name}"
    elif entry.position < due:
        yield f"{entry.name} is out of place: position {due} was expected"
    elif entry.previous_sha256 != (last.sha256 if last else None):
        yield f"{entry.name} does not follow the entry before it"
    kept = {name: getattr(entry, name) for name in KEPT}
    if entry.sha256 != _entry_sha256(kept, entry.position, entry.previous_sha256, entry.content_sha256):
        yield f"{entry.name} was altered"
    elif entry.redacted_at is None and (entry.salt is None or entry.content_sha256 != _content_sha256(entry, entry.salt)):
        yield f"the values, address or user agent of {entry.name} were altered"
    elif entry.redacted_at is not None and (entry.changes or entry.ip or entry.user_agent):
        yield f"{entry.name} is marked as erased, and has content"


def _content_sha256(content: Content, salt: str) -> str:
    return _sha256({"salt": salt, **{name: getattr(content, name) for name in ERASABLE}})


def _entry_sha256(kept: Mapping[str, Any], position: int, previous: str | None, content: str) -> str:
    return _sha256({**kept, "position": position, "previous_sha256": previous, "content_sha256": content})


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()
