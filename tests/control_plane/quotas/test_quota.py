"""Quotas over HTTP: what a tenant is told before, at and after its submissions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants

CREATE = "/v1/fine_tuning/jobs"


@pytest.fixture
def http(api_url: str, api_key: str) -> Any:
    with httpx.Client(base_url=api_url, headers={"authorization": f"Bearer {api_key}"}, timeout=60) as made:
        yield made


def limit(platform: Platform, tenant: Tenant, **limits: Any) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(**limits))


def test_a_quota_shows_limits_and_what_is_held_and_left(http: httpx.Client, tenant: Tenant, training_file: str) -> None:
    before = http.get("/v1/quota").json()
    assert (before["object"], before["tenant"], before["tier"]) == ("quota", tenant.id, "standard")
    assert (before["soft_gpu_hours"], before["hard_gpu_hours"], before["left_gpu_hours"]) == (500, 1000, 1000)
    assert (before["used_gpu_hours"], before["held_gpu_hours"], before["at_hard_cap"], before["jobs_in_flight"]) == (0, 0, False, 0)
    assert (before["starts_within_s"], before["may_train_full"], before["max_jobs_in_flight"]) == (3600, False, 5)
    assert datetime.fromtimestamp(before["month_ends_at"], UTC).strftime("%d %H:%M:%S") == "01 00:00:00"
    told = http.post(CREATE, json={"model": "tiny-base", "training_file": training_file}).json()["quota"]
    after = http.get("/v1/quota").json()
    assert after["jobs_in_flight"] == 1
    assert after["held_gpu_hours"] == told["job_gpu_hours"] > 0
    assert after["left_gpu_hours"] == pytest.approx(1000 - told["job_gpu_hours"])
    assert (told["month"], told["left_gpu_hours"], told["goes_into_overage"]) == (after["month"], 1000, False)
    assert "paused at their next checkpoint" in told["on_hard_cap"]


def test_a_submission_beyond_the_soft_limit_is_told_by_how_much(
    http: httpx.Client, platform: Platform, tenant: Tenant, training_file: str
) -> None:
    limit(platform, tenant, soft_gpu_hours=0.001)
    job = http.post(CREATE, json={"model": "tiny-base", "training_file": training_file}).json()
    assert job["quota"]["goes_into_overage"]
    assert job["quota"]["overage_gpu_hours"] == pytest.approx(job["quota"]["job_gpu_hours"] - 0.001)
    events = http.get(f"{CREATE}/{job['id']}/events").json()["data"]
    assert [e["level"] for e in events if e["code"] == "quota_overage"] == ["warn"]


def test_a_tenant_without_a_hard_cap_is_told_so(http: httpx.Client, platform: Platform, tenant: Tenant) -> None:
    limit(platform, tenant, tier="premium")
    shown = http.get("/v1/quota").json()
    assert (shown["hard_gpu_hours"], shown["left_gpu_hours"], shown["starts_within_s"]) == (None, None, 300)
    assert shown["on_hard_cap"].startswith("There is no hard cap")


def test_a_job_shows_by_when_it_starts_and_whether_that_was_missed(
    http: httpx.Client, platform: Platform, tenant: Tenant, training_file: str
) -> None:
    body = {"model": "tiny-base", "training_file": training_file}
    promised = http.post(CREATE, json=body).json()
    assert (promised["promised_start"] - promised["created_at"], promised["sla_missed"]) == (3600, False)
    free = http.post(CREATE, json=body | {"tier": "free"}).json()
    assert (free["promised_start"], free["sla_missed"]) == (None, False)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.tenant_id == tenant.id).values(created_at=datetime.now(UTC) - timedelta(hours=2)))
    assert http.get(f"{CREATE}/{promised['id']}").json()["sla_missed"]
    assert not http.get(f"{CREATE}/{free['id']}").json()["sla_missed"], "nothing was promised"


def test_quotas_are_read_without_the_right_to_write(http: httpx.Client, platform: Platform, tenant: Tenant, api_url: str) -> None:
    from control_plane.tenants.service import create_key

    key = create_key(platform, tenant.id, name="reader", scopes=["read"]).secret
    assert httpx.get(f"{api_url}/v1/quota", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert httpx.get(f"{api_url}/v1/quota").status_code == 401
