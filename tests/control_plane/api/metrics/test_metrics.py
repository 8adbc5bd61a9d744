"""What is measured: live as CSV, as the result file of a finished job, and for operators in Prometheus' text format."""

from __future__ import annotations

import csv
import io
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from control_plane.api.app import create_app
from control_plane.api.metrics.gauges import RecentGauges
from control_plane.api.metrics.routes import FORWARDED
from control_plane.attempts.tables import health_verdicts
from control_plane.jobs import results
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import locked, record, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import as_reported, metrics_event
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from control_plane.tracking import tensorboard_file
from ft_client import FtClient

STEPS = [
    {"step": 1, "total_steps": 3, "loss": 2.0, "learning_rate": 1e-3, "num_tokens": 10, "mfu": None, "rewards/margins": 0.1, "time": 1.0},
    {"step": 2, "total_steps": 3, "loss": 1.5, "learning_rate": 1e-3, "num_tokens": 20, "mfu": 0.25, "rewards/margins": 0.2, "time": 2.0},
    {"step": 2, "eval_loss": 1.25, "perplexity": 3.49, "time": 2.5},
    {"step": 2, "total_steps": 3, "loss": 1.4, "learning_rate": 1e-3, "num_tokens": 20, "mfu": 0.25, "rewards/margins": 0.3, "time": 3.0},
    {"step": 3, "total_steps": 3, "loss": float("nan"), "learning_rate": 0.0, "num_tokens": 30, "mfu": 0.25, "time": 4.0},
]
"""Step 2 was trained twice: the attempt in between was lost."""


@pytest.fixture
def job_id(client: openai.OpenAI, platform: Platform, training_file: str) -> str:
    """A job that runs and has reported :data:`STEPS`."""
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    run(platform, job.id)
    return job.id


def run(platform: Platform, job_id: str) -> None:
    with platform.engine.begin() as conn:
        for state in (JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING):
            transition(conn, job_id, state, message=f"now {state}")
        for line in STEPS:
            record(conn, job_id, metrics_event(as_reported(line)))
        now = platform.clock()
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(attempt=1, step=3, total_steps=3, heartbeat_at=now))
        conn.execute(sa.insert(reservations).values(job_id=job_id, attempt=1, pool="local", num_gpus=1, granted_at=now))


def rows_of(body: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(body)))


def test_a_running_jobs_metrics_are_a_table_with_a_row_per_step(api_url: str, api_key: str, job_id: str) -> None:
    answer = httpx.get(f"{api_url}/v1/fine_tuning/jobs/{job_id}/metrics.csv", headers={"authorization": f"Bearer {api_key}"})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == f'attachment; filename="{job_id}.csv"'
    header = answer.text.splitlines()[0].split(",")
    assert header == [
        "step",
        "train_loss",
        "valid_loss",
        "valid_perplexity",
        "learning_rate",
        "mfu",
        "num_tokens",
        "rewards/margins",
        "time",
    ]
    one, two, three = rows_of(answer.text)
    assert (two["train_loss"], two["valid_loss"], two["valid_perplexity"], two["rewards/margins"]) == ("1.4", "1.25", "3.49", "0.3")
    assert (one["mfu"], one["valid_loss"], one["num_tokens"]) == ("", "", "10")
    assert (three["step"], three["train_loss"]) == ("3", "")


def test_a_job_without_a_step_has_a_header(client: openai.OpenAI, api_url: str, api_key: str, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    answer = httpx.get(f"{api_url}/v1/fine_tuning/jobs/{job.id}/metrics.csv", headers={"authorization": f"Bearer {api_key}"})
    assert answer.text == "step,train_loss,valid_loss\n"


def test_a_cancelled_jobs_metrics_are_a_table_too_and_no_result_file(
    client: openai.OpenAI, api_url: str, api_key: str, job_id: str
) -> None:  # fmt: skip
    assert client.fine_tuning.jobs.cancel(job_id).status == "cancelled"
    answer = httpx.get(f"{api_url}/v1/fine_tuning/jobs/{job_id}/metrics.csv", headers={"authorization": f"Bearer {api_key}"})
    assert [r["train_loss"] for r in rows_of(answer.text)] == ["2.0", "1.4", ""]
    assert client.fine_tuning.jobs.retrieve(job_id).result_files == []


def test_what_was_measured_is_listed_in_order(client: openai.OpenAI, job_id: str) -> None:
    found: Any = client.get(f"/fine_tuning/jobs/{job_id}/metrics", cast_to=object)
    assert (found["object"], found["has_more"]) == ("list", False)
    assert found["data"] == [as_reported(line) for line in STEPS]


def test_a_long_table_is_read_and_sent_piece_by_piece(platform: Platform, job_id: str) -> None:
    size = "jsonb_build_object('step', n, 'train_loss', 1.5, 'padding', repeat('x', 1000))"
    many = f"""INSERT INTO job_events (id, job_id, level, type, code, message, data, created_at)
        SELECT 'many-' || n, '{job_id}', 'info', 'metrics', 'metrics', 'm', {size}, now() FROM generate_series(10, 20009) n"""
    with platform.engine.begin() as conn:
        conn.execute(sa.text(many))
    tracemalloc.start()
    with results.table(platform, job_id) as body:
        num_lines = sum(1 for _ in body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_lines == 1 + 3 + 20_000
    assert peak < 15 * 2**20, "20 MB of text, of which 4 MB and 1,000 lines are in memory"


def test_tensorboard_reads_the_metrics_of_a_job_that_runs(ft: FtClient, job_id: str, tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.0.run").write_bytes(ft.jobs.tensorboard(job_id))
    read = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert set(read.Tags()["scalars"]) == set(EVENT_TAGS)
    for tag, points in EVENT_TAGS.items():
        assert [(e.step, e.wall_time, e.value) for e in read.Scalars(tag)] == [(s, t, pytest.approx(v)) for s, t, v in points], tag


def test_a_perplexity_without_bounds_is_the_largest_that_tensorboard_has(
    ft: FtClient, platform: Platform, job_id: str, tmp_path: Path
) -> None:
    with platform.engine.begin() as conn:
        record(conn, job_id, metrics_event(as_reported({"step": 3, "eval_loss": 700.0, "perplexity": 1e304, "time": 5.0})))
    (tmp_path / "events.out.tfevents.0.run").write_bytes(ft.jobs.tensorboard(job_id))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert read.Scalars("valid_perplexity")[-1].value == pytest.approx(3.4028e38, rel=1e-4)


EVENT_TAGS: dict[str, list[tuple[int, float, float]]] = {
    "train_loss": [(1, 1.0, 2.0), (2, 3.0, 1.4)],
    "valid_loss": [(2, 3.0, 1.25)],
    "valid_perplexity": [(2, 3.0, 3.49)],
    "learning_rate": [(1, 1.0, 1e-3), (2, 3.0, 1e-3), (3, 4.0, 0.0)],
    "num_tokens": [(1, 1.0, 10), (2, 3.0, 20), (3, 4.0, 30)],
    "mfu": [(2, 3.0, 0.25), (3, 4.0, 0.25)],
    "rewards/margins": [(1, 1.0, 0.1), (2, 3.0, 0.3)],
}
"""Step, time and value in :data:`STEPS` as TensorBoard shows them."""


def test_steps_and_texts_of_any_size_are_read_by_tensorboard(platform: Platform, job_id: str, tmp_path: Path) -> None:
    steps, tag = [4, 127, 128, 16_384, 2**31, 2**40], "reward_" + "x" * 300
    with platform.engine.begin() as conn:
        for step in steps:
            record(conn, job_id, metrics_event({"step": step, "time": 5.0, tag: float(step)}))
    with platform.engine.connect() as conn, tensorboard_file.event_file(platform, locked(conn, job_id)) as body:
        (tmp_path / "events.out.tfevents.0.run").write_bytes(body.read())
    read = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert [(e.step, e.value) for e in read.Scalars(tag)] == [(step, pytest.approx(step)) for step in steps]


def test_another_tenants_metrics_do_not_exist(platform: Platform, api_url: str, job_id: str) -> None:
    _, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")
    answer = httpx.get(f"{api_url}/v1/fine_tuning/jobs/{job_id}/metrics.csv", headers={"authorization": f"Bearer {key.secret}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "fine_tune_not_found")


def test_a_result_file_is_listed_by_its_job_and_read_like_any_file(
    client: openai.OpenAI, platform: Platform, tenant: Any, job_id: str
) -> None:
    assert client.fine_tuning.jobs.retrieve(job_id).result_files == []
    stored = results.store(platform, tenant.id, job_id)
    assert results.store(platform, tenant.id, job_id) == stored
    assert client.fine_tuning.jobs.retrieve(job_id).result_files == [stored]
    file = client.files.retrieve(stored)
    assert (file.purpose, file.filename, file.status) == ("fine-tune-results", "step_metrics.csv", "processed")
    assert [f.id for f in client.files.list(purpose="fine-tune-results")] == [stored]
    body = client.files.content(stored).text
    assert [r["step"] for r in rows_of(body)] == ["1", "2", "3"]
    assert len(body) == file.bytes
    with pytest.raises(openai.BadRequestError, match="purpose 'fine-tune-results'"):
        client.fine_tuning.jobs.create(model="tiny-base", training_file=stored)
    client.files.delete(stored)
    assert client.fine_tuning.jobs.retrieve(job_id).result_files == []


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    made = {(s.name, frozenset(s.labels.items())): s.value for s in found}
    assert len(made) == len(found), "a series is said once"
    return made


def test_the_platform_is_scraped_in_prometheus_format(
    fresh_platform: Platform, serve: Callable[..., str], write_chat_rows: Callable[..., Any]
) -> None:
    platform = fresh_platform
    owner, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="premium")
    url = serve(create_app(platform))
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key.secret) as client:
        file = client.files.create(file=write_chat_rows(), purpose="fine-tune")
        running, waiting = (client.fine_tuning.jobs.create(model="tiny-base", training_file=file.id, seed=s).id for s in (1, 2))
    run(platform, running)
    with platform.engine.begin() as conn:
        record(conn, running, metrics_event(as_reported({**STEPS[-1], "steps_per_s": 2.5})))
        transition(conn, waiting, JobState.QUEUED, message="now queued")
        verdict = {"attempt": 1, "audience": "operator", "level": "warn", "message": "m", "data": {}, "raised_at": platform.clock()}
        for job, code in ((running, "data_starved"), (running, "throughput_low")):
            cleared = platform.clock() if code == "throughput_low" else None
            conn.execute(sa.insert(health_verdicts).values(id=uuid.uuid4().hex, job_id=job, code=code, cleared_at=cleared, **verdict))
    answer = httpx.get(f"{url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = samples(answer.text)

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset(labels.items())))

    of_job = {"job": running, "tenant": owner.id, "tier": "premium", "model": "tiny-base"}
    assert value("ft_jobs", state="running", tier="premium") == value("ft_jobs", state="queued", tier="premium") == 1
    assert value("ft_jobs", state="failed", tier="premium") == 0, "a count of none is said"
    assert (value("ft_pool_gpus", pool="local"), value("ft_pool_gpus_used", pool="local")) == (1, 1)
    assert (value("ft_job_step", **of_job), value("ft_job_total_steps", **of_job), value("ft_job_attempt", **of_job)) == (3, 3, 1)
    used, waits = value("ft_tenant_gpus_used", tenant=owner.id), value("ft_tenant_queue_waiting_gpus", tenant=owner.id)
    assert (used, waits) == (1, 1)
    assert value("ft_tenant_queue_wait_seconds", tenant=owner.id, quantile="0.95") is not None
    assert value("ft_pool_nodes", pool="local", state="ready") == 1
    assert value("ft_job_mfu_ratio", **of_job) == 0.25
    assert value("ft_job_loss", **of_job) is None, "the newest loss is no number"
    assert value("ft_job_learning_rate", **of_job) == 0.0
    assert value("ft_job_steps_per_second", **of_job) == 2.5
    assert (value("ft_job_validation_loss", **of_job), value("ft_job_validation_perplexity", **of_job)) == (1.25, 3.49)
    assert 0 <= (value("ft_job_follower_age_seconds", **of_job) or 0) < 60
    assert 0 <= (value("ft_queue_oldest_wait_seconds", tier="premium") or 0) < 60
    assert value("ft_queue_wait_seconds", tier="premium", quantile="0.5") is not None
    assert value("ft_checkpoints_committed_total") == 0
    assert value("ft_api_requests_total", method="POST", route="/v1/fine_tuning/jobs", status="2xx") == 2
    assert value("ft_api_request_duration_seconds_count", method="POST", route="/v1/fine_tuning/jobs") == 2
    assert value("ft_api_requests_in_flight") == 0, "the scrape itself is not counted"
    assert value("ft_ledger_imbalance_micros") == 0
    assert (value("ft_deliveries_pending", channel="webhook"), value("ft_deliveries_dead", channel="email")) == (0, 0)
    for code, holds in (("data_starved", 1), ("throughput_low", 0)):
        assert value("ft_health_verdicts", code=code, audience="operator") == holds
        assert value("ft_health_verdicts_raised_total", code=code, audience="operator") == 1
    assert not [labels for _, labels in found if ("job", waiting) in labels], "a job without GPUs has no series of its own"
    reads: list[str] = []
    sa.event.listen(platform.engine, "before_cursor_execute", lambda *given: reads.append(given[2]))
    again = samples(httpx.get(f"{url}/metrics").text)
    assert {k: v for k, v in again.items() if not k[0].startswith("process_")} == {
        k: v for k, v in found.items() if not k[0].startswith("process_")
    }
    of_gauges = [r for r in reads if "health_verdicts" in r]  # the API's own threads look for work meanwhile
    assert of_gauges == [], "who scrapes again at once gets the same numbers"
    RecentGauges(platform=platform, max_age_s=0.0).read()
    assert len([r for r in reads if "health_verdicts" in r]) == 2


@pytest.mark.parametrize("header", FORWARDED)
def test_a_proxied_caller_does_not_count_as_local(api_url: str, header: str) -> None:
    answer = httpx.get(f"{api_url}/metrics", headers={header: "for=203.0.113.9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "metrics_forbidden")


def test_where_a_token_is_set_it_alone_opens_the_metrics(new_platform: Callable[..., Platform], api_key: str) -> None:
    with TestClient(create_app(new_platform(metrics_token="s3cret")), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code == 403
        assert client.get("/metrics", headers={"authorization": f"Bearer {api_key}"}).status_code == 403
        assert client.get("/metrics", headers={"authorization": "Bearer s3cret", "x-forwarded-for": "203.0.113.9"}).status_code == 200


def test_a_caller_from_elsewhere_is_refused_without_a_token(platform: Platform) -> None:
    with TestClient(create_app(platform), base_url="http://localhost", client=("203.0.113.9", 1234)) as client:
        answer = client.get("/metrics")
    assert answer.status_code == 403
    assert "FT_METRICS_TOKEN" in answer.json()["error"]["message"]
