"""A premium job arrives, a standard one saves its checkpoint and makes room, and goes on later to the very same adapter."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts.tables import attempts
from control_plane.jobs.tables import jobs
from tests.journey.conftest import Stack
from tests.journey.test_kill import adapter_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 200
"""Enough that the first job still trains when the second has been prepared."""
REQUEST: dict[str, Any] = {
    "model": "demo-llama-3m",
    "seed": 17,
    "extra_body": {
        "auto_promote": False,
        "eval_config": {"skip": ["golden", "task", "perplexity"], "max_items": 4, "max_new_tokens": 8},
        "hyperparameters": {"n_epochs": 50, "max_steps": STEPS, "batch_size": 2, "checkpoint_every_steps": STEPS},
        "method": "lora",
    },
}
HOURS_S = 36_000.0
"""What the standard job is said to take: nobody who is nearly done is stopped for another."""


def client_of(stack: Stack, tickets: Path, tenant: str, tier: str) -> tuple[Any, str]:
    key = json.loads(stack.ft("admin", "tenants", "create", tenant, "--tier", tier, "--json").stdout)["api_key"]
    client = stack.client(key)
    return client, client.files.create(file=tickets, purpose="fine-tune").id


def until(condition: Callable[[], Any], *, seconds: float = 600) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
    return found


def test_a_job_that_made_room_for_a_premium_one_ends_with_the_same_adapter(stack: Stack, tickets: Path) -> None:
    engine = sa.create_engine(stack.dagster_env()["FT_DATABASE_URL"], poolclass=sa.NullPool)
    modest, its_file = client_of(stack, tickets, "modest", "standard")
    urgent, other_file = client_of(stack, tickets, "urgent", "premium")
    first = modest.fine_tuning.jobs.create(training_file=its_file, suffix="modest", **REQUEST)

    def stepped() -> bool:
        with engine.begin() as conn:
            conn.execute(sa.update(jobs).where(jobs.c.id == first.id, jobs.c.expected_s < HOURS_S).values(expected_s=HOURS_S))
        return (modest.fine_tuning.jobs.retrieve(first.id).step or 0) >= 4

    until(stepped)
    second = urgent.fine_tuning.jobs.create(training_file=other_file, suffix="urgent", **REQUEST)
    until(lambda: urgent.fine_tuning.jobs.retrieve(second.id).state not in ("validating", "queued"))
    assert modest.fine_tuning.jobs.retrieve(first.id).state in ("preempted", "queued")

    ended = [until(functools.partial(_ended, c, j)) for c, j in ((urgent, second.id), (modest, first.id))]
    assert [job.status for job in ended] == ["succeeded", "succeeded"], [job.error for job in ended]
    stopped, undisturbed = adapter_bytes(stack.home, "modest", first.id, 2), adapter_bytes(stack.home, "urgent", second.id, 1)
    assert stopped == undisturbed, "the job that made room and the one that was left alone trained the same"

    told = {e.code: e.message for e in modest.fine_tuning.jobs.list_events(first.id, limit=100) if e.type == "message"}
    assert "preemption_requested" in told
    assert "gave its GPUs to a premium job" in told["job_preempted"] and "nothing is lost" in told["job_preempted"]
    assert second.id not in " ".join(told.values())
    with engine.connect() as conn:
        trainings = sa.select(attempts).where(attempts.c.job_id == first.id, attempts.c.from_step.is_not(None))
        rows = conn.execute(trainings.order_by(attempts.c.attempt)).all()
    assert [(r.outcome, r.lost_s) for r in rows] == [("preempted", 0.0), ("succeeded", 0.0)]
    assert rows[1].from_step == rows[0].last_step > 0
    engine.dispose()


def _ended(client: Any, job_id: str) -> Any:
    job = client.fine_tuning.jobs.retrieve(job_id)
    return job if job.status in ("succeeded", "failed", "cancelled") else None
