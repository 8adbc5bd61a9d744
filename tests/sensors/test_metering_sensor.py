"""One round bills what is late, samples storage, watches budgets and issues invoices; what fails keeps nothing else from going."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import dagster as dg
import pytest

from control_plane.billing import budgets, ledger
from control_plane.billing.invoices import service as invoices
from control_plane.platform.context import Platform
from ft_assets.platform_resource import PlatformResource
from sensors.periodic.billing_cycle import metering, one_round
from tests.support.jobs.metered_job import AT, at_time, metered_job


def test_a_round_does_all_that_is_due_and_a_second_one_nothing_more(fresh_platform: Platform) -> None:
    job = metered_job(fresh_platform)
    budgets.create(at_time(fresh_platform, AT), job.tenant, name="b", limit_micros=4_000_000, thresholds=[100])
    with fresh_platform.engine.begin() as conn:
        job.started(conn, 1, AT)
        job.ended(conn, 1, AT + timedelta(hours=1))
    told = one_round(at_time(fresh_platform, AT + timedelta(hours=2)))
    assert told == "attempts billed late: 1; tenants whose storage was sampled: 1; budget alerts: 1; invoices issued: 0"
    assert one_round(at_time(fresh_platform, AT + timedelta(hours=3))).count(": 0") == 4
    assert one_round(at_time(fresh_platform, AT + timedelta(days=30))).endswith("invoices issued: 1")
    assert len(invoices.list_issued(fresh_platform, job.tenant).items) == 1
    assert ledger.balance(fresh_platform, job.tenant) == 4_000_000


def test_the_sensor_runs_over_the_platform_of_its_environment(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()})
        with context:
            result = metering(context)
    assert isinstance(result, dg.SkipReason)
    assert "failed" not in (result.skip_message or "")


def test_prices_that_cannot_be_read_keep_no_other_work_from_going(fresh_platform: Platform) -> None:
    broken = fresh_platform.settings.home / "prices.yaml"
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("lists: 5")
    metered_job(fresh_platform)
    told = one_round(replace(fresh_platform, settings=replace(fresh_platform.settings, prices_file=broken)))
    assert "storage was sampled: failed, ValueError: " in told
    assert told.endswith("invoices issued: 0")


def test_one_attempt_that_cannot_be_billed_is_told_and_keeps_nothing_else_from_going(fresh_platform: Platform) -> None:
    odd, sound = metered_job(fresh_platform), metered_job(fresh_platform)
    with fresh_platform.engine.begin() as conn:
        for job in (replace(odd, row=replace(odd.row, tier="gold")), sound):
            job.started(conn, 1, AT)
            job.ended(conn, 1, AT + timedelta(hours=1))
    told = one_round(at_time(fresh_platform, AT + timedelta(hours=2)))
    assert "attempts billed late: failed, FtError: 1 of 2 attempts failed" in told
    assert told.endswith("invoices issued: 0")
    assert sound.owes() == 4_000_000
