"""A chain that was altered, cut, extended or reordered shows where, in the database and in an exported file."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.tenant_data import erasure
from control_plane.tenant_data.tables import deletions
from control_plane.tenants import service as tenants
from control_plane.tenants.audit import audit_entries
from control_plane.tenants.audit.audit_chain import Content, Entry, Head, check, parse_head, place
from control_plane.tenants.tables import audit_log
from core.errors import IntegrityError
from resources.database.engine import make_engine
from tests.support.platform.lock_waits import wait_for_a_lock


def chain(length: int = 5) -> list[Entry]:
    entries: list[Entry] = []
    for seq in range(10, 10 + length):
        content = Content(
            seq=seq, tenant_id="acme", actor_kind="key", actor_id="key_1", action="job.created", object_type="job", object_id=f"j{seq}",
            request_id=None, created_at="2026-11-01T00:00:00.000000+00:00", changes={"state": [None, "queued"]}, ip="10.0.0.1",
            user_agent="curl", redacted_at=None,
        )  # fmt: skip
        head = Head(position=entries[-1].position, sha256=entries[-1].sha256) if entries else None
        entries.append(Entry(**asdict(content), **place(content, after=head, salt=f"{seq:032x}")))
    return entries


def rehashed(entry: Entry, **changes: Any) -> Entry:
    """An altered entry whose own digests were made anew."""
    altered = replace(entry, **changes)
    head = None if altered.previous_sha256 is None else Head(position=altered.position - 1, sha256=altered.previous_sha256)
    content = Content(**{field.name: getattr(altered, field.name) for field in fields(Content)})
    return replace(altered, **place(content, after=head, salt="0" * 32))


TAMPERED: dict[str, tuple[Callable[[list[Entry]], Sequence[Entry]], list[str]]] = {
    "untouched": (lambda c: c, []),
    "who": (lambda c: [*c[:2], replace(c[2], actor_id="key_2"), *c[3:]], ["aud_12 (position 3) was altered"]),
    "content": (
        lambda c: [*c[:2], replace(c[2], ip="10.0.0.2"), *c[3:]],
        ["the values, address or user agent of aud_12 (position 3) were altered"],
    ),
    "salt": (
        lambda c: [*c[:2], replace(c[2], salt=None), *c[3:]],
        ["the values, address or user agent of aud_12 (position 3) were altered"],
    ),
    "altered and hashed again": (
        lambda c: [*c[:2], rehashed(c[2], actor_id="key_2"), *c[3:]],
        ["aud_13 (position 4) does not follow the entry before it"],
    ),
    "removed": (lambda c: [*c[:2], *c[3:]], ["position 3 is missing before aud_13 (position 4)"]),
    "several removed": (lambda c: [c[0], *c[3:]], ["positions 2 to 3 are missing before aud_13 (position 4)"]),
    "first removed": (lambda c: c[1:], ["position 1 is missing before aud_11 (position 2)"]),
    "inserted": (
        lambda c: [*c[:3], rehashed(c[2], seq=99, position=3), *c[3:]],
        ["aud_99 (position 3) is out of place: position 4 was expected", "aud_13 (position 4) does not follow the entry before it"],
    ),
    "moved": (
        lambda c: [c[0], c[2], c[1], *c[3:]],
        [
            "position 2 is missing before aud_12 (position 3)",
            "aud_11 (position 2) is out of place: position 4 was expected",
            "position 3 is missing before aud_13 (position 4)",
        ],
    ),
    "marked as erased": (
        lambda c: [*c[:4], replace(c[4], redacted_at="2026-11-02T00:00:00.000000+00:00")],
        ["aud_14 (position 5) is marked as erased, and has content"],
    ),
    "erased but for the address": (
        lambda c: [*c[:4], replace(c[4], redacted_at="2026", changes={}, user_agent=None, salt=None)],
        ["aud_14 (position 5) is marked as erased, and has content"],
    ),
    "erased but for the user agent": (
        lambda c: [*c[:4], replace(c[4], redacted_at="2026", changes={}, ip=None, salt=None)],
        ["aud_14 (position 5) is marked as erased, and has content"],
    ),
    "erased": (lambda c: [*c[:4], replace(c[4], redacted_at="2026", changes={}, ip=None, user_agent=None, salt=None)], []),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_done_to_a_chain_is_named(how: str) -> None:
    tamper, findings = TAMPERED[how]
    found = check(tamper(chain()))
    assert list(found.findings) == findings
    assert found.num_redacted == int("erased" in how)


@pytest.mark.parametrize("name", [field.name for field in fields(Entry) if field.name != "redacted_at"])
def test_a_change_of_any_field_is_found(name: str) -> None:
    other: Any = {"changes": {"state": [None, "failed"]}, "seq": 99, "position": 99}.get(name, "other")
    whole = chain()
    assert check([*whole[:2], replace(whole[2], **{name: other}), *whole[3:]]).findings


def test_a_noted_head_reveals_that_the_end_was_removed_or_rewritten() -> None:
    whole = chain()
    noted = check(whole).head
    assert noted == parse_head(str(noted))
    assert check(whole, head=noted).findings == ()
    assert check(chain(7), head=noted).findings == (), "a longer chain holds it"
    assert check(whole[:3], head=noted).findings == ("the chain ends before position 5, which was noted earlier: entries were removed",)
    rewritten = check([*whole[:4], rehashed(whole[4], actor_id="key_2")], head=noted)
    assert rewritten.findings == (f"aud_14 (position 5) is not the entry that was noted as {noted}",)
    with pytest.raises(ValueError, match="is not POSITION:SHA256"):
        parse_head("5")


def owner(platform: Platform) -> sa.Engine:
    """The only role that can switch the triggers off."""
    return make_engine(platform.settings.database_url, pool_size=1, max_overflow=0)


def test_entries_are_chained_exported_and_verified_and_erasure_keeps_the_chain(fresh_platform: Platform, tmp_path: Path) -> None:
    platform = fresh_platform
    tenant, _ = tenants.create(platform, "t-chained")
    assert audit_entries.chain_due(platform) >= 2
    for name in ("a", "b"):
        tenants.create_key(platform, tenant.id, name=name, scopes=["read"])
    written = audit_entries.export(platform, tmp_path / "log.jsonl")
    assert (written.findings, audit_entries.verify_file(tmp_path / "log.jsonl")) == ((), written)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(lines) == written.num_entries + 1

    with platform.engine.begin() as conn:
        conn.execute(erasure._statements(tenant.id, platform.clock())["audit_log"])
        with pytest.raises(sa.exc.IntegrityError, match="only ever added"), conn.begin_nested():
            conn.execute(sa.update(audit_log).where(audit_log.c.tenant_id == tenant.id).values(sha256="0" * 64))
        assert conn.scalar(sa.select(sa.func.count()).where(audit_log.c.ip.is_not(None) | audit_log.c.salt.is_not(None))) == 0
    erased = audit_entries.verify(platform, head=written.head)
    assert (erased.num_entries, erased.num_redacted) == (written.num_entries, written.num_entries)
    assert erased.findings == (f"entries of {tenant.id} are marked as erased, and no deletion explains it",), "none was requested here"
    with platform.engine.begin() as conn:
        at = conn.scalar(sa.select(audit_log.c.redacted_at).where(audit_log.c.tenant_id == tenant.id).limit(1))
        done = {"id": "del-1", "tenant_id": tenant.id, "subject_kind": "tenant", "subject_id": tenant.id, "reason": "r", "proof": {}}
        conn.execute(sa.insert(deletions).values(**done, sha256="0", requested_at=at, done_at=at - timedelta(days=1)))
        conn.execute(
            sa.insert(deletions).values(**{**done, "id": "del-other", "subject_id": "other"}, sha256="0", requested_at=at, done_at=at)
        )
    assert audit_entries.verify(platform).findings == erased.findings, "a deletion of another day or tenant explains nothing"
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(deletions).values(**{**done, "id": "del-2"}, sha256="0", requested_at=at, done_at=at))
    assert audit_entries.verify(platform).findings == ()

    engine = owner(platform)
    with engine.begin() as conn:
        conn.exec_driver_sql("ALTER TABLE audit_log DISABLE TRIGGER USER")
        conn.exec_driver_sql("DELETE FROM audit_log WHERE position = 2")
        conn.exec_driver_sql("UPDATE audit_log SET actor_id = 'nobody' WHERE position = 3")
        conn.exec_driver_sql("ALTER TABLE audit_log ENABLE TRIGGER USER")
    engine.dispose()
    found = audit_entries.verify(platform).findings
    assert [" ".join(one.split()[-4:]) for one in found[:2]] == [f"before aud_{lines[2]['seq']} (position 3)", "(position 3) was altered"]


def test_a_file_that_was_cut_or_is_something_else_is_named(fresh_platform: Platform, tmp_path: Path) -> None:
    tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}")
    file = tmp_path / "log.jsonl"
    audit_entries.export(fresh_platform, file)
    *entries, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*entries[:-1], last]))
    assert audit_entries.verify_file(file).findings == (
        "the last line of the file is missing, or names another end: the file was cut or edited",
    )
    file.write_text("hello\n")
    with pytest.raises(IntegrityError, match=r"line 1 of .* is no entry of the audit log"):
        audit_entries.verify_file(file)


def test_an_entry_that_commits_late_is_chained_later(fresh_platform: Platform) -> None:
    late, early = (fresh_platform.engine.connect() for _ in range(2))
    with late, early:
        tenants_of = sa.text("INSERT INTO tenants (id, name, tier, max_jobs_in_flight, created_at) VALUES (:id, 'n', 'free', 1, now())")
        late.execute(tenants_of, {"id": "t-late"})
        early.execute(tenants_of, {"id": "t-early"})
        early.commit()
        assert audit_entries.chain_due(fresh_platform) == 1, "the writer of the other one is not waited for"
        late.commit()
    assert audit_entries.chain_due(fresh_platform) == 1
    with fresh_platform.engine.connect() as conn:
        chained = conn.execute(sa.select(audit_log.c.tenant_id, audit_log.c.seq).order_by(audit_log.c.position)).all()
    assert [row.tenant_id for row in chained] == ["t-early", "t-late"]
    assert chained[0].seq > chained[1].seq, "the late one has the lower number"
    assert audit_entries.verify(fresh_platform).findings == ()


def test_two_workers_append_to_the_chain_one_after_the_other(fresh_platform: Platform) -> None:
    platform = fresh_platform
    audit_entries.chain_due(platform)
    tenants.create(platform, "t-one")
    with ThreadPoolExecutor(1) as pool, platform.engine.begin() as conn:
        first = audit_entries._chain_batch(conn)
        tenants.create(platform, "t-two")
        second = pool.submit(audit_entries.chain_due, platform)
        wait_for_a_lock(platform)
        conn.commit()
        assert (first > 0, second.result() > 0) == (True, True)
    assert audit_entries.verify(platform).findings == ()


def test_all_entries_are_chained_and_exported_however_many_batches_they_take(
    fresh_platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_entries, "AT_A_TIME", 2)
    for name in "abc":
        tenants.create(fresh_platform, f"t-{name}")
    with fresh_platform.engine.connect() as conn:
        num = conn.scalar(sa.select(sa.func.count()).select_from(audit_log))
    assert num is not None and num > 2 * audit_entries.AT_A_TIME
    exported = audit_entries.export(fresh_platform, tmp_path / "log.jsonl")
    assert (exported.num_entries, exported.findings) == (num, ())
