"""``ft queue`` and ``ft job`` against the real API; ``ft admin queue``'s words from a document."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli import capacity_commands as whole_queue_commands
from control_plane.console.documents.queue_page import LEFT, WIDTH, queue_page, timeline
from control_plane.platform.context import Platform, utc_now
from control_plane.queue.status import view
from ft_client.cli import job_commands as commands
from tests.support.jobs.queued_jobs import Queued, queued


@pytest.fixture
def world(platform: Platform, write_chat_rows: Callable[..., Path]) -> Queued:
    made = queued(platform, write_chat_rows)
    made.now[0] = utc_now()
    return made


def test_the_queue_is_read_in_words_and_as_json(offline: Callable[..., Any], api_url: str, world: Queued) -> None:
    mine, other = world.tenant(name="word-reader"), world.tenant("premium", name="word-other")
    runs = world.job(other, hours=3)
    world.round()
    first, second = world.job(mine, hours=1), world.job(mine, hours=2)
    world.round(seconds=1)
    of_mine = {"FT_API_URL": api_url, "FT_API_KEY": world.key(mine)}
    shown = offline("queue", **of_mine).out
    assert "Position 1 of 2 · waits for 1 GPU" in shown
    assert "reserved)" in shown
    assert "Position 2 of 2" in shown
    assert "ahead: 1 standard job for 1 GPU, 1 of them yours" in shown
    assert "The queue: 2 jobs (2 standard) of all tenants" in shown
    assert "Pool local (local): 0 of 1 GPUs free" in shown
    assert "word-other" not in shown
    assert [j["id"] for j in offline("queue", "--json", **of_mine).json["waiting"]] == [first, second]
    one = offline("job", second, **of_mine).out
    assert "Position 2 · waits for 1 GPU" in one
    running = offline("queue", FT_API_URL=api_url, FT_API_KEY=world.key(other)).out
    assert f"{runs}  tiny-base" in running
    assert "Provisioning on 1 GPU of pool local" in running
    assert "No job of yours is waiting for GPUs." in running


def test_operators_queue_is_written_as_a_page_and_as_json(
    offline: Callable[..., Any], fresh_platform: Platform, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    world = queued(fresh_platform, write_chat_rows)
    job = world.job(world.tenant(), hours=1)
    url = fresh_platform.engine.url.render_as_string(hide_password=False)
    done = offline("admin", "queue", "--html", tmp_path / "queue.html", "--json", FT_DATABASE_URL=url)
    assert [one["id"] for one in done.json["waiting"]] == [job]
    assert job in (tmp_path / "queue.html").read_text()
    assert offline("admin", "queue", "--html", tmp_path / "queue.html", FT_DATABASE_URL=url).out == ""


def test_operators_words_and_page_name_everything(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    world = queued(fresh_platform, write_chat_rows)
    owner = world.tenant(name="named-tenant")
    runs = world.job(owner, hours=3)
    world.round()
    waits = world.job(owner, hours=2)
    world.round(minutes=5)
    found = view.of_all(world.platform).model_dump()
    now = world.now[0].timestamp()
    said = "\n".join(whole_queue_commands.whole_lines(found, now=now, nodes=True))
    page = queue_page(found, now=now)
    for name in (runs, waits, "named-tenant", "local"):
        assert name in said
        assert name in page
    assert "OVERDUE" in said, "its workload has not begun"
    assert f"reserved for {waits}" in said
    assert page.count("<svg") == 1
    assert 'class="standard reserved"' in page


def test_in_the_timeline_who_makes_room_is_gone_soon_and_reservations_lie_beside_each_other() -> None:
    now = time.time()
    job = {
        "id": "r",
        "tenant": "t",
        "tier": "free",
        "num_gpus": 4,
        "estimated_end": now + 9e3,
        "stopping": True,
        "overrun_s": 0.0,
        "backfill": False,
        "pool": "p",
    }
    kept = [
        {"id": f"w{i}", "tenant": "t", "tier": "premium", "num_gpus": gpus, "expected_s": 3600.0, "position": i,
         "reservation": {"pool": "p", "start": now + 60.0, "placement": [("n", gpus)]}}
        for i, gpus in enumerate((2, 2))
    ]  # fmt: skip
    node = {"name": "n", "num_gpus": 4, "ready": True, "free_gpus": 0, "jobs": {"r": 4}, "reserved_for": ["w0", "w1"]}
    drawn = timeline({"name": "p", "nodes": [node]}, {"waiting": kept, "running": [job]}, {"r": job}, now=now)
    going, first, second = drawn.rows[0].bars
    assert going.x + going.width <= min(first.x, second.x) + 0.1
    assert first.y == pytest.approx(second.y + second.height), "each has its own of the node's GPUs"
    assert first.x + first.width == pytest.approx(LEFT + (WIDTH - LEFT) / 1.05), "the hours drawn end soon after the last job"
    assert drawn.rows[0].note == "full"


def test_a_job_that_makes_room_or_takes_too_long_says_so() -> None:
    now = time.time()
    job = {
        "state": "running",
        "num_gpus": 2,
        "pool": "p",
        "since": now - 600,
        "kind": "train",
        "evaluation": None,
        "step": 5,
        "total_steps": 10,
        "stopping": False,
    }
    assert "takes longer than expected" in commands.running_line({**job, "estimated_end": now - 5}, now=now)
    assert "of pool p for 10 min" in commands.running_line({**job, "estimated_end": None}, now=now)
    assert "of pool p for 12 s" in commands.running_line({**job, "since": now - 12, "estimated_end": None}, now=now)
    assert "(in 10 min)" in commands.running_line({**job, "estimated_end": now + 600}, now=now)
    assert "resumes automatically" in commands.running_line({**job, "estimated_end": now + 600, "stopping": True}, now=now)
