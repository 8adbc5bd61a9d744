"""The same limits and the same keys over two API processes, one of which is killed and started again while requests are on their way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants

pytestmark = pytest.mark.slow
CREATE = "/v1/fine_tuning/jobs"
GIVE_UP_S = 240.0
"""Of a start or an answer on a machine that has much else to do."""


class Api:
    """An API process on a port of its own."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.env, self.log = {**env, "FT_API_PORT": str(self.port)}, log
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "control_plane.api"], env=self.env, stdout=out, stderr=out)

    def ready(self) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz", timeout=5).status_code < 500:
                    return
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def apis(platform: Platform, base_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Api]]:
    tmp_path = tmp_path_factory.mktemp("apis")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(f"models: [{{id: tiny-base, path: {base_model_dir}, license: Apache-2.0}}]")
    env = {
        **os.environ,
        "FT_DATABASE_URL": platform.engine.url.render_as_string(hide_password=False),
        "FT_HOME": str(platform.settings.home),
        "FT_BASE_MODELS": str(catalogue),
        "FT_INFERENCE_URLS": "http://127.0.0.1:9",
    }
    made = [Api(env, tmp_path / f"api-{n}.log") for n in range(2)]
    for api in made:
        api.start()
    try:
        for api in made:
            api.ready()
        yield made
    finally:
        for api in made:
            api.kill()


@pytest.fixture
def file(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> str:
    """A training file of a tenant whose requests are not counted."""
    limit(platform, tenant, requests_per_minute=1_000_000)
    with write_chat_rows().open("rb") as rows:
        return str(uploaded_files.create(platform, tenant.id, rows, filename="rows.jsonl", purpose="fine-tune").id)


def limit(platform: Platform, tenant: Tenant, **limits: float) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(**limits))


def num_jobs(platform: Platform, tenant: Tenant) -> int:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(sa.func.count()).where(jobs.c.tenant_id == tenant.id)).scalar_one()


def submit_all(apis: list[Api], secret: str, bodies: list[dict[str, Any]], keys: list[str], *, kill_after: int) -> list[httpx.Response]:
    """Send each body until it is answered, to either process; the first one is killed after some answers, and started again."""
    answered, lock, killed = [0], threading.Lock(), threading.Event()
    deadline = time.monotonic() + GIVE_UP_S
    limits = httpx.Limits(max_connections=100)

    def submit(number: int) -> httpx.Response:
        for turn in range(10_000):
            assert time.monotonic() < deadline, "no answer"
            url = apis[(number + turn) % 2].url
            try:
                answer = client.post(url + CREATE, json=bodies[number], headers={"Idempotency-Key": keys[number]})
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code >= 500:
                continue
            with lock:
                answered[0] += 1
                if answered[0] >= kill_after:
                    killed.set()
            return answer
        raise AssertionError("no answer")

    def interrupt() -> None:
        killed.wait(GIVE_UP_S)
        apis[0].kill()
        apis[0].start()

    with httpx.Client(headers={"authorization": f"Bearer {secret}"}, limits=limits, timeout=30) as client, ThreadPoolExecutor(50) as pool:
        killer = threading.Thread(target=interrupt)
        killer.start()
        answers = list(pool.map(submit, range(len(bodies))))
        killer.join()
        apis[0].ready()
        again = client.post(apis[0].url + CREATE, json=bodies[0], headers={"Idempotency-Key": keys[0]})
        assert again.status_code == answers[0].status_code or answers[0].status_code == 429
    return answers


@pytest.mark.parametrize("kill_after", [1, 300])
def test_a_thousand_creates_with_one_key_are_one_job_though_a_process_is_killed(
    apis: list[Api], api_key: str, file: str, platform: Platform, tenant: Tenant, kill_after: int
) -> None:
    body = {"model": "tiny-base", "training_file": file}
    answers = submit_all(apis, api_key, [body] * 1000, ["one"] * 1000, kill_after=kill_after)
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["id"] for a in answers}) == 1
    assert num_jobs(platform, tenant) == 1


@pytest.mark.parametrize(("what", "said"), [("jobs", "jobs are in flight"), ("time", "GPU-hours")])
def test_fifty_at_once_against_a_limit_of_five_are_five_though_a_process_is_killed(
    apis: list[Api], api_key: str, file: str, platform: Platform, tenant: Tenant, what: str, said: str
) -> None:
    body = {"model": "tiny-base", "training_file": file}
    if what == "time":
        key = {"authorization": f"Bearer {api_key}"}
        quota = httpx.post(f"{apis[1].url}{CREATE}", json=body, headers=key, timeout=GIVE_UP_S).json()["quota"]
        limit(platform, tenant, max_jobs_in_flight=100, hard_gpu_hours=6.5 * quota["job_gpu_hours"])
    before = num_jobs(platform, tenant)
    answers = submit_all(apis, api_key, [body | {"seed": n} for n in range(50)], [f"key-{n}" for n in range(50)], kill_after=3)
    assert Counter(a.status_code for a in answers) == {200: 5, 429: 45}
    assert all(said in a.json()["error"]["message"] for a in answers if a.status_code == 429)
    assert num_jobs(platform, tenant) - before == 5
