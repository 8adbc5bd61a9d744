"""What is seen of a job that real processes carry out (API, steps, training, evaluation): one trace, its logs, its run in MLflow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core import layout
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.span_collector import Collector, Received, collecting

ROOT = Path(__file__).resolve().parents[1]
CALLER_TRACE, CALLER_SPAN = "c" * 32, "d" * 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def api(env: dict[str, str]) -> Iterator[str]:
    """The API as its own process, with its log beside the platform's home."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    log = Path(env["FT_HOME"]) / "api.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "control_plane.api"], env={**env, "FT_API_PORT": port}, cwd=ROOT, stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/healthz", timeout=10).is_success:
                    break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def worker(env: dict[str, str]) -> Iterator[None]:
    """The worker, which watches the training."""
    with (Path(env["FT_HOME"]) / "worker.log").open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "control_plane.worker"], env=env, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def env(fresh_platform: Platform, tmp_path: Path) -> dict[str, str]:
    """The environment that describes `fresh_platform`, over a model that can be trained."""
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(f"models: [{{id: tiny-real, path: {build_tiny_model(tmp_path / 'tiny')}, license: Apache-2.0}}]")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_", "OTEL_", "TRACEPARENT"))}
    return kept | {
        "FT_DATABASE_URL": fresh_platform.engine.url.render_as_string(hide_password=False),
        "FT_HOME": str(fresh_platform.settings.home),
        "FT_OBJECT_STORE": fresh_platform.settings.object_store,
        "FT_BASE_MODELS": str(catalogue),
        "FT_SAFETY_CLASSIFIER": "off",
        "FT_INFERENCE_URLS": ",",
        "FT_LOG_FORMAT": "json",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }


def submit(url: str, key: str, rows: Path) -> str:
    headers = {"authorization": f"Bearer {key}"}
    with rows.open("rb") as f:
        file = httpx.post(
            f"{url}/v1/files", headers=headers, files={"file": ("rows.jsonl", f)}, data={"purpose": "fine-tune"}, timeout=120
        ).json()
    body = {
        "model": "tiny-real",
        "training_file": file["id"],
        "hyperparameters": {"n_epochs": 1},
        "eval_config": {"skip": ["golden", "safety", "perplexity"], "max_items": 2, "max_new_tokens": 4},
    }
    traced = {**headers, "traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
    answer = httpx.post(f"{url}/v1/fine_tuning/jobs", headers=traced, json=body, timeout=120)
    assert answer.is_success, answer.text
    return str(answer.json()["id"])


def test_a_job_is_one_trace_from_its_request_to_its_adapter_and_one_tracked_run(
    env: dict[str, str], fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    owner, key = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with collecting() as collector:
        watched = {**env, "FT_OTLP_ENDPOINT": collector.url}
        with api(watched) as url:
            job_id = submit(url, key.secret, write_chat_rows())
            steps = [sys.executable, "-m", "tests.support.processes.step_runner"]
            watched |= {"FT_INTERNAL_URL": url}
            with worker(watched):
                done = subprocess.run(steps, env=watched, cwd=ROOT, capture_output=True, text=True, timeout=500)
                assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
                until_sent(collector)
                until_tracked(fresh_platform, owner.id)
    check_spans(collector, owner.id, job_id)
    home = Path(env["FT_HOME"])
    logged = [json.loads(line) for line in (home / "api.log").read_text().splitlines() if line.startswith("{")]
    made = [line for line in logged if line.get("route") == "/v1/fine_tuning/jobs" and line["status"] == 200]
    assert [(line["tenant"], line["trace_id"]) for line in made] == [(owner.id, CALLER_TRACE)]
    assert key.secret not in (home / "api.log").read_text()
    trained = (home / f"work/jobs/{job_id}/train-a1.log").read_text().splitlines()
    ours = [json.loads(line) for line in trained if line.startswith('{"time"')]
    assert any(line["message"].startswith("step ") for line in ours)
    assert {(line["service"], line["tenant"], line["job"], line["attempt"]) for line in ours} == {("ft-training", owner.id, job_id, 1)}
    assert {line["trace_id"] for line in ours} == {CALLER_TRACE}
    check_tracked_files(fresh_platform, owner.id)


def tracked(platform: Platform, tenant: str) -> dict[str, str]:
    """Keys of the files of a tenant's runs in MLflow, by their paths."""
    return {info.key.partition("/artifacts/")[2]: info.key for info in platform.objects.list(layout.mlflow_prefix(tenant))}


def check_tracked_files(platform: Platform, tenant: str) -> None:
    files = tracked(platform, tenant)
    trained = {"spec.json", "loss_curve.svg", "step_metrics.csv", "model/adapter_config.json", "model/manifest.json"}
    assert set(files) == trained | {f"evaluation/{name}" for name in ("report.json", "report.md", "scores.json", "gate.json")}
    read = platform.objects.get_bytes
    assert json.loads(read(files["evaluation/report.json"]))["report"]["samples"] == [], "no row of the tenant's data"
    assert json.loads(read(files["model/adapter_config.json"]))["peft_type"] == "LORA"


def until_tracked(platform: Platform, tenant: str) -> None:
    """Tracking of an ended training is completed behind everybody's back."""
    deadline = time.monotonic() + 60
    while "model/manifest.json" not in (found := tracked(platform, tenant)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def until_sent(collector: Collector) -> None:
    deadline = time.monotonic() + 60
    while "POST /v1/fine_tuning/jobs" not in collector.names():
        assert time.monotonic() < deadline, collector.names()
        time.sleep(0.1)


PARENTS = {
    "request prepare": "POST /v1/fine_tuning/jobs",
    "dataset": "request prepare",
    "tokenized_pack": "request prepare",
    "request train": "POST /v1/fine_tuning/jobs",
    "training": "checkpoint",
    "restore": "training",
    "train": "training",
    "final": "training",
    "request evaluate": "POST /v1/fine_tuning/jobs",
    "eval_report": "request evaluate",
    "evaluation": "eval_report",
    "adapter": "request evaluate",
    "register": "adapter",
}


def check_spans(collector: Collector, tenant: str, job_id: str) -> None:
    ours = [s for s in collector.spans if s.trace_id == CALLER_TRACE]
    step = {s.name: s for s in ours if s.service != "ft-training" or s.name != "checkpoint"}  # both have a checkpoint
    assert set(PARENTS) <= set(step), collector.names()
    assert step["POST /v1/fine_tuning/jobs"].parent_id == CALLER_SPAN
    assert {name: step[parent].span_id for name, parent in PARENTS.items()} == {name: step[name].parent_id for name in PARENTS}
    saved = [s for s in ours if s.service == "ft-training" and s.name == "checkpoint"]
    assert saved
    assert {s.parent_id for s in saved} == {step["train"].span_id}
    assert {s.service for s in ours} == {"ft-api", "ft-dagster", "ft-training", "ft-evaluation"}
    assert len({s.pid for s in ours}) == 4, "of four processes"
    check_attributes(ours, step, tenant, job_id)


def check_attributes(ours: list[Received], step: dict[str, Received], tenant: str, job_id: str) -> None:
    assert {s.attributes["ft.tenant"] for s in ours} == {tenant}
    assert {s.attributes["ft.job"] for s in ours if s.service != "ft-api"} == {job_id}
    assert {s.attributes["ft.attempt"] for s in ours if s.service == "ft-training"} == {1}
    assert step["training"].attributes["ft.outcome"] == "succeeded"
    assert step["request train"].attributes["ft.attempt"] == step["checkpoint"].attributes["ft.attempt"] == 1
    assert [s.name for s in ours if s.failed] == []


def test_a_collector_that_hangs_holds_up_no_request(
    env: dict[str, str], fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    _, key = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with collecting(hanging=True) as collector, api({**env, "FT_OTLP_ENDPOINT": collector.url}) as url:
        job_id = submit(url, key.secret, write_chat_rows())
        headers = {"authorization": f"Bearer {key.secret}"}
        for _ in range(50):
            assert httpx.get(f"{url}/v1/fine_tuning/jobs/{job_id}", headers=headers, timeout=60).is_success
        deadline = time.monotonic() + 60
        while not collector.paths:
            assert time.monotonic() < deadline, "nothing was sent, so nothing hung"
            time.sleep(0.1)
