"""Usage that the database sums up is what its entries give one by one, to the micro-dollar."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from control_plane.billing import ledger
from control_plane.billing.metering.rules import milliseconds
from control_plane.billing.rules import Entry
from control_plane.billing.usage import rules as usage
from control_plane.billing.usage import service
from control_plane.billing.usage.rules import Width
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Actor, Platform
from tests.support.jobs.metered_job import metered_job

BEGINS, ENDS = datetime(2026, 1, 30, tzinfo=UTC), datetime(2026, 2, 3, tzinfo=UTC)
BY: list[tuple[str, ...]] = [
    (),
    ("model", "kind"),
    ("job_id", "gpu_type", "pricing"),
    ("api_key_id", "metadata[cost center]", "metadata[none]"),
]


def some_entries(job_id: str, chance: random.Random) -> list[Entry]:
    """Attempts within buckets, over edges, from edge to edge, of no length; days of storage; a refund."""
    made: list[Entry] = []
    for number in range(80):
        start = BEGINS - timedelta(hours=30) + timedelta(milliseconds=chance.randrange(6 * 86_400_000))
        if number % 4 == 0:
            start = start.replace(minute=0, second=0, microsecond=0)
        ms = chance.choice([0, 1, 3_600_000, chance.randrange(3_600_000), chance.randrange(40 * 3_600_000)])
        end, amount, kind = start + timedelta(milliseconds=ms), chance.randrange(10**9), chance.choice(["usage", "usage", "refund"])
        times = {"started_ms": milliseconds(start), "ended_ms": milliseconds(end), "gpu_ms": ms * 3}
        detail = chance.choice([times, times, {"decided_by": "opk_1", "gpu_ms": None}])
        amount = -amount if kind == "refund" else amount
        made.append(
            Entry(
                id=f"{job_id}/a{number}/{kind}", kind=kind, amount_micros=amount, list_micros=2 * amount, job_id=job_id, attempt=number,
                occurred_at=end, gpu_type=chance.choice(["h100-80gb", "local"]), pricing=chance.choice(["spot", "on_demand"]),
                gpu_seconds=ms * 3 / 1000, detail=detail,
            )
        )  # fmt: skip
    of_day = Entry(id=f"storage/{job_id}", kind="storage", amount_micros=7, list_micros=7, occurred_at=BEGINS, detail={"stored_bytes": 1})
    return [*made, of_day]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("width", usage.WIDTHS)
def test_sums_of_the_database_are_those_of_the_entries(platform: Platform, width: Width, by: tuple[str, ...]) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        named = {"api_key_id": "key_of_job", "metadata": {"cost center": "nlp", "other": "x"}}
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(named))
    entries = some_entries(job.id, random.Random(f"{width} {by}"))
    with platform.engine.begin() as conn:
        for one in entries:
            assert ledger.post(conn, job.tenant, one, now=ENDS)
    scoped = platform.in_scope_of(job.tenant, Actor(kind="key", id="key_1"))
    found = service.used(scoped, job.tenant, start=BEGINS, end=ENDS, width=width, by=by)

    def key(one: Entry) -> tuple[str | None, ...]:
        named = {name: getattr(one, name) for name in ("job_id", "gpu_type", "pricing", "kind")}
        of_job = {"model": "tiny-base", "api_key_id": "key_of_job", "metadata[cost center]": "nlp", "metadata[none]": None}
        return tuple((named | (of_job if one.job_id else dict.fromkeys(of_job)))[name] for name in by)

    lines = [usage.Line(key(one), one.kind, part) for one in entries for part in usage.split(one, width)]
    assert found.buckets == usage.grouped(lines, start=found.start, end=found.end, width=width, by=by)
    assert found.total.amount_micros == sum(total.amount_micros for one in found.buckets for _, total in one.results)


def test_the_jobs_that_cost_most_are_those_of_the_sums_by_job(platform: Platform) -> None:
    job, chance = metered_job(platform), random.Random(7)
    entries = [one for number in range(9) for one in chance.sample(some_entries(f"ftjob-{job.tenant}-{number}", chance), 15)]
    with platform.engine.begin() as conn:
        for one in entries:
            ledger.post(conn, job.tenant, one, now=ENDS)
    scoped = replace(platform.in_scope_of(job.tenant, Actor(kind="key", id="key_1")), clock=lambda: ENDS)
    (month,) = service.used(scoped, job.tenant, start=ENDS, end=ENDS + timedelta(days=1), width="month", by=("job_id",)).buckets
    sums = [(str(key["job_id"]), total.gpu_ms, total.amount_micros) for key, total in month.results if key["job_id"]]
    assert len(sums) == 9
    assert any(one.occurred_at.month == 2 and one.detail.get("started_ms", 1e15) < milliseconds(month.bucket.begins) for one in entries)
    expected = sorted(sums, key=lambda one: (-one[2], one[0]))
    for most in (3, 20):
        found = service.costliest_jobs(scoped, job.tenant, most=most)
        assert [(one.job_id, one.gpu_ms, one.amount_micros) for one in found] == expected[:most]
