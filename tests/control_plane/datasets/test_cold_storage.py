"""Datasets that nobody uses move to cold storage, are marked, and are read as before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa

from control_plane.datasets import cold_storage
from control_plane.datasets.tables import datasets as table
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform, utc_now
from control_plane.tenants.rules import Tenant
from core import layout
from resources.object_store import LocalObjectStore


@pytest.fixture
def later(platform: Platform) -> Platform:
    """The platform in a hundred days, with somewhere cold."""
    store = LocalObjectStore(platform.settings.home / "objects", cold=platform.settings.home / "cold")
    return replace(platform, objects=store, clock=lambda: utc_now() + timedelta(days=100))


@pytest.fixture
def dataset_id(platform: Platform, tenant: Tenant, training_file: str) -> str:
    return str(uploaded_files.get(platform, tenant.id, training_file).dataset_id)


def cooled(platform: Platform, dataset_id: str, tenant: str) -> bool:
    with platform.engine.connect() as conn:
        query = sa.select(table.c.cooled_at).where(table.c.id == dataset_id, table.c.tenant_id == tenant)
        return conn.execute(query).scalar_one() is not None


def test_an_unused_dataset_is_moved_with_its_upload_and_is_read_as_before(
    platform: Platform, later: Platform, tenant: Tenant, training_file: str, dataset_id: str
) -> None:
    file, before = uploaded_files.content(platform, tenant.id, training_file)
    with before:
        uploaded = before.read()
    assert cold_storage.cool_unused(platform) == 0, "not yet"
    assert cold_storage.cool_unused(later) >= 1
    assert cooled(platform, dataset_id, tenant.id)
    assert isinstance(later.objects, LocalObjectStore) and later.objects.cold is not None
    for key in (file.object_key, f"{layout.dataset_prefix(tenant.id, dataset_id)}/rows.parquet"):
        assert not (later.objects.root / key).exists() and (later.objects.cold / key).exists()
    _, stream = uploaded_files.content(later, tenant.id, training_file)
    with stream:
        assert stream.read() == uploaded
    assert {i.key.rsplit("/", 1)[-1] for i in later.objects.list(layout.dataset_prefix(tenant.id, dataset_id))} == {
        "rows.parquet", "report.json", "dataset.json",
    }  # fmt: skip
    assert cold_storage.cool_unused(later) == 0, "once"
    job = jobs.submit(later, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": training_file})).job
    assert job.dataset_id == dataset_id


def test_a_dataset_that_a_job_needs_stays_warm(later: Platform, tenant: Tenant, training_file: str, dataset_id: str) -> None:
    job = jobs.submit(later, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": training_file})).job
    cold_storage.cool_unused(later)
    assert not cooled(later, dataset_id, tenant.id)
    jobs.cancel(later, tenant.id, job.id)
    cold_storage.cool_unused(later)
    assert not cooled(later, dataset_id, tenant.id), "it was used today"
    much_later = replace(later, clock=lambda: utc_now() + timedelta(days=200))
    cold_storage.cool_unused(much_later)
    assert cooled(later, dataset_id, tenant.id)


def test_without_somewhere_cold_nothing_is_moved_or_marked(platform: Platform, later: Platform, tenant: Tenant, dataset_id: str) -> None:
    assert cold_storage.cool_unused(replace(later, objects=LocalObjectStore(platform.settings.home / "objects"))) == 0
    assert not cooled(platform, dataset_id, tenant.id)
