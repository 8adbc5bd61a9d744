"""Storage is sampled once a day, billed beyond the allowance, and entered once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml

from control_plane.billing import ledger, ledger_check, prices, storage_usage
from control_plane.billing.tables import ledger_entries, storage_samples
from control_plane.datasets.tables import files
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ObjectInfo
from core import layout
from core.errors import Unavailable
from resources.object_store import LocalObjectStore
from tests.support.jobs.metered_job import AT, at_time, metered_job


@pytest.fixture
def priced(new_platform: Callable[..., Platform], tmp_path: Path) -> Platform:
    """A platform without allowances, on which a byte costs 31 micro-dollars a month of 31 days."""
    body = yaml.safe_load(prices.BUILTIN.read_text())
    held = body["lists"][0]
    held["storage"]["micros_per_gib_month"] = 31 * (1 << 30)
    for tier in held["tiers"].values():
        tier["storage_allowance_gib"] = 0
    file = tmp_path / "prices.yaml"
    file.write_text(yaml.safe_dump(body))
    made = new_platform()
    return at_time(replace(made, settings=replace(made.settings, prices_file=file)), AT)


def test_every_class_is_measured_where_it_lies(priced: Platform) -> None:
    tenant = metered_job(priced).tenant
    root = layout.tenant_prefix(tenant)
    for key, size in (
        ("datasets/ds_1/rows.parquet", 10), ("packs/p/shard-00000.parquet", 20), ("references/r/ref.parquet", 5),
        ("uploads/upload_1/part_1", 7),
        ("jobs/ftjob-1/checkpoints/a1/step-00000001/optimizer.pt", 300), ("adapters/adp-1/adapter_model.safetensors", 40),
    ):  # fmt: skip
        priced.objects.put_bytes(f"{root}/{key}", b"x" * size)
    with priced.engine.begin() as conn:
        conn.execute(sa.update(files).where(files.c.tenant_id == tenant).values(bytes=1000))
    assert storage_usage.measured(priced, tenant) == {"files": 1007, "datasets": 35, "checkpoints": 300, "adapters": 40, "exports": 0}


def test_a_day_is_sampled_and_billed_once_and_each_day_has_its_own_entry(priced: Platform) -> None:
    job = metered_job(priced)
    with priced.engine.begin() as conn:
        conn.execute(sa.update(files).where(files.c.tenant_id == job.tenant).values(bytes=1000))
    assert storage_usage.sample_due(priced) == 1
    assert storage_usage.sample_due(at_time(priced, AT + timedelta(hours=5))) == 0
    assert storage_usage.sample_due(at_time(priced, AT + timedelta(days=1))) == 1
    entries = ledger.list_entries(priced, job.tenant, kind="storage").items[::-1]
    assert [e.id for e in entries] == [f"storage/{job.tenant}/2026-03-10", f"storage/{job.tenant}/2026-03-11"]
    assert [e.amount_micros for e in entries] == [1000, 1000]
    assert entries[0].detail["bytes"]["files"] == 1000
    assert ledger_check.check(priced).differences == ()


def test_what_lies_within_the_allowance_is_shown_and_free(platform: Platform) -> None:
    job = metered_job(platform)
    storage_usage.sample_due(at_time(platform, AT))
    query = sa.select(ledger_entries.c.amount_micros).where(ledger_entries.c.id == f"storage/{job.tenant}/2026-03-10")
    with platform.engine.connect() as conn:
        assert conn.execute(query).scalar_one() == 0
        assert conn.execute(sa.select(storage_samples.c.bytes).where(storage_samples.c.tenant_id == job.tenant)).scalar_one()["files"] == 1


def test_a_round_that_has_no_time_left_goes_on_in_the_next(priced: Platform) -> None:
    for _ in range(3):
        metered_job(priced)
    assert storage_usage.sample_due(priced, budget_s=0) == 0
    assert storage_usage.sample_due(priced) == 3


class AwayFor(LocalObjectStore):
    """A store that cannot say what one tenant keeps."""

    tenant = ""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.tenant and prefix.startswith(layout.tenant_prefix(self.tenant)):
            raise Unavailable("the object store does not answer")
        return super().list(prefix)


def test_a_tenant_that_cannot_be_measured_keeps_no_other_from_it_and_is_measured_later(priced: Platform) -> None:
    lost, _ = metered_job(priced), metered_job(priced)
    store = AwayFor(priced.settings.home / "objects")
    store.tenant = lost.tenant
    assert storage_usage.sample_due(replace(priced, objects=store)) == 1
    assert storage_usage.sample_due(priced) == 1, "the one that was left out"


@pytest.mark.parametrize(
    ("day", "micros"),
    [(date(2026, 2, 3), 155), (date(2028, 2, 29), 150), (date(2026, 4, 30), 145), (date(2026, 7, 1), 140)],
    ids=["28 days", "29 days", "30 days", "31 days"],
)
def test_a_day_is_billed_by_the_days_of_its_own_month(day: date, micros: int) -> None:
    """4,340 micro-dollars a month: 155 a day of 28, 149.66 of 29, 144.67 of 30 and 140 of 31."""
    body = yaml.safe_load(prices.BUILTIN.read_text())
    body["lists"][0]["storage"]["micros_per_gib_month"] = 4340
    book = prices.parse(body)
    stored = book.lists[0].tiers["standard"].storage_allowance_bytes + prices.GIB
    found = storage_usage.entry("acme", "standard", day, {"files": stored}, book)
    assert (found.amount_micros, found.occurred_at.date()) == (micros, day)
