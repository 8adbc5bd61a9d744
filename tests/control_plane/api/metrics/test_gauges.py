"""What waits, for how long, and what an operator would be woken for."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.api.metrics import gauges
from control_plane.billing import ledger
from control_plane.billing.rules import Entry
from control_plane.datasets.tables import files, uploads
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import fail
from control_plane.notifications import outbox
from control_plane.notifications.tables import deliveries
from control_plane.notifications.tables import outbox as outbox_table
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.errors import InvalidRequest, NotAdmitted, Unavailable

ONE_MINUTE = timedelta(minutes=1)


@pytest.fixture
def owner(fresh_platform: Platform) -> str:
    made, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return made.id


def deliver(platform: Platform, tenant: str, subject: str, due: datetime, **values: Any) -> None:
    """An event that was handed to a delivery, due at that moment."""
    with platform.engine.begin() as conn:
        event = outbox.publish(conn, tenant, "fine_tuning.job.succeeded", subject, now=platform.clock())
        this = outbox_table.c.id == event
        seq = conn.execute(sa.update(outbox_table).where(this).values(fanned_out_at=due).returning(outbox_table.c.seq)).scalar_one()
        row = {"id": f"dlv_{uuid.uuid4().hex}", "tenant_id": tenant, "channel": "webhook", "target": "we_1", "event_seq": seq}
        row |= {"subject": subject, "state": "pending", "created_at": due, "next_attempt_at": due}
        conn.execute(sa.insert(deliveries).values({**row, **values}))


def test_events_that_nobody_hands_on_are_counted_with_their_age(fresh_platform: Platform, owner: str) -> None:
    now = fresh_platform.clock()
    before = gauges.read(fresh_platform).notices.outbox
    with fresh_platform.engine.begin() as conn:
        outbox.publish(conn, owner, "fine_tuning.job.succeeded", "ftjob-1", now=now - 3 * ONE_MINUTE)
    found = gauges.read(fresh_platform).notices
    assert found.outbox == before + 1
    assert found.outbox_oldest_s >= 180


def test_a_delivery_that_waits_behind_another_is_not_overdue(fresh_platform: Platform, owner: str) -> None:
    now = fresh_platform.clock()
    assert gauges.read(fresh_platform).notices.overdue_s == 0
    deliver(fresh_platform, owner, "ftjob-1", now + 60 * ONE_MINUTE)  # it failed, and is tried again in an hour
    deliver(fresh_platform, owner, "ftjob-1", now - 30 * ONE_MINUTE)  # of the same job, and later: it waits its turn
    deliver(fresh_platform, owner, "ftjob-2", now - 20 * ONE_MINUTE, last_attempt_at=now)  # is being sent
    deliver(fresh_platform, owner, "ftjob-3", now - 90 * ONE_MINUTE, state="dead")
    found = gauges.read(fresh_platform).notices
    assert (found.overdue_s, found.pending, found.dead) == (0, {"webhook": 3, "email": 0}, {"webhook": 1, "email": 0})
    deliver(fresh_platform, owner, "ftjob-4", now - 10 * ONE_MINUTE)
    assert 600 <= gauges.read(fresh_platform).notices.overdue_s < 1200


def test_uploads_that_nobody_clears_away_are_told_from_open_ones(fresh_platform: Platform, owner: str) -> None:
    now = fresh_platform.clock()
    row = {"tenant_id": owner, "filename": "f", "purpose": "fine-tune", "mime_type": "text/plain", "bytes": 1, "settings": {}}
    with fresh_platform.engine.begin() as conn:
        for number, (status, expires) in enumerate((("pending", 1), ("pending", -1), ("completed", -1))):
            at = now + expires * ONE_MINUTE
            conn.execute(sa.insert(uploads).values(id=f"upload_{number}", status=status, created_at=now, expires_at=at, **row))
    assert gauges.read(fresh_platform).uploads == (2, 1)


def test_the_ledgers_sum_is_read_seldom_and_the_rest_often(fresh_platform: Platform) -> None:
    seen: list[str] = []
    sa.event.listen(fresh_platform.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    recent = gauges.RecentGauges(platform=fresh_platform, max_age_s=0.0)
    assert [recent.read().totals.ledger_imbalance for _ in range(3)] == [0, 0, 0]
    assert len([s for s in seen if "ledger_postings" in s]) == len([s for s in seen if "ledger_entries" in s]) == 1
    assert len([s for s in seen if "FROM outbox" in s]) == 3


def test_a_tenants_totals_are_its_bills_less_refunds(fresh_platform: Platform, owner: str) -> None:
    now = fresh_platform.clock()
    entries = [
        Entry(id="j/a1/usage", kind="usage", amount_micros=700, list_micros=700, gpu_seconds=70.0, occurred_at=now, detail={}),
        Entry(id="j/a1/refund", kind="refund", amount_micros=-200, list_micros=-200, gpu_seconds=20.0, occurred_at=now, detail={}),
        Entry(id="day", kind="storage", amount_micros=5, list_micros=5, occurred_at=now, detail={}),
    ]
    with fresh_platform.engine.begin() as conn:
        for entry in entries:
            ledger.post(conn, owner, entry, now=now)
    found = gauges.totals(fresh_platform)
    assert (found.billed[owner], found.ledger_imbalance) == ((50.0, 505), 0)


def test_jobs_that_the_platform_failed_are_told_from_those_that_failed_by_themselves(fresh_platform: Platform, owner: str) -> None:
    now = fresh_platform.clock()
    file = {"id": "file-1", "tenant_id": owner, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "x", "object_key": "k"}
    job = {
        "tenant_id": owner, "state": "queued", "tier": "free", "model": "tiny-base", "method": "sft", "base_digest": "d",
        "training_file": "file-1", "seed": 0, "request": {}, "request_sha256": "r", "hyperparameters": {}, "created_at": now,
    }  # fmt: skip
    ends = {"by-us": Unavailable("the store did not respond"), "by-data": InvalidRequest("no rows"), "unclear": NotAdmitted("no place")}
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.insert(files).values(**file, status="processed", created_at=now))
        conn.execute(sa.insert(jobs).values([{**job, "id": id_} for id_ in (*ends, "waits")]))
    for id_, error in ends.items():
        fail(fresh_platform, owner, id_, error)
    found = gauges.totals(fresh_platform).outcomes
    assert (found["free", "failed_by_platform"], found["free", "failed"]) == (1, 2)
    assert found["premium", "succeeded"] == 0, "a series exists before its first event"
    assert sum(found.values()) == 3
