"""``/v1/queue`` and ``/v1/admin/queue``, and what a job says of its place in the queue, as clients see them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from control_plane.api.app import create_app
from control_plane.platform.context import Platform, utc_now
from control_plane.tenants import operators
from tests.support.jobs.queued_jobs import Queued, queued
from tests.support.platform.database_roles import as_operator


@pytest.fixture
def world(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Queued:
    made = queued(fresh_platform, write_chat_rows)
    made.now[0] = utc_now()
    return made


@pytest.fixture
def api(world: Queued, serve: Callable[..., str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve(create_app(world.platform)), timeout=30) as client:
        yield client


def read(api: httpx.Client, path: str, key: str, **headers: str) -> httpx.Response:
    answer = api.get(path, headers={"authorization": f"Bearer {key}", **headers})
    assert answer.status_code == 200, answer.text
    return answer


def test_a_tenant_reads_its_queue_and_each_job_says_the_same(world: Queued, api: httpx.Client) -> None:
    mine, other = world.tenant(name="own-er"), world.tenant("premium", name="some-body-else")
    runs = world.job(other, hours=3)
    world.round()
    waits, last = world.job(mine, hours=2), world.job(mine, hours=8)
    world.round(minutes=1)
    key = world.key(mine)
    found = read(api, "/v1/queue", key).json()
    assert ([j["id"] for j in found["waiting"]], found["running"], found["length"]) == ([waits, last], [], 2)
    job = read(api, f"/v1/fine_tuning/jobs/{last}", key).json()
    listed = found["waiting"][1]
    assert (job["queue_position"], job["reason"], job["reason_detail"]) == (2, listed["reason"], listed["reason_detail"])
    assert job["estimated_start"] == listed["estimated_start"] > world.now[0].timestamp()
    assert job["ahead"] == listed["ahead"] == {"jobs": {"standard": 1}, "num_gpus": 1, "yours": 1}
    listing = read(api, "/v1/fine_tuning/jobs", key).json()["data"]
    assert {j["id"]: j["ahead"]["yours"] for j in listing} == {waits: 0, last: 1}
    assert (job["due_at"], job["preemptions"]) == (listed["due_at"], 0)
    assert read(api, f"/v1/fine_tuning/jobs/{waits}", key).json()["reservation"]["pool"] == "local"
    for text in (read(api, "/v1/queue", key).text, read(api, f"/v1/fine_tuning/jobs/{waits}/events", key).text):
        assert not [name for name in (runs, other) if name in text]
    held = read(api, f"/v1/fine_tuning/jobs/{runs}", world.key(other)).json()
    assert (held["queue_position"], held["reservation"], held["due_at"], held["ahead"]) == (None, None, None, None)


def test_openais_client_reads_a_job_that_waits(world: Queued, api: httpx.Client) -> None:
    mine = world.tenant()
    world.job(mine, hours=1)
    waits = world.job(mine, hours=3)
    world.round()
    with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key=world.key(mine)) as client:
        job = client.fine_tuning.jobs.retrieve(waits)
    assert job.status == "queued"
    assert job.model_extra is not None
    assert job.model_extra["queue_position"] == 1
    assert "reservation" in job.model_extra


def test_operators_read_all_of_it_as_a_document_and_as_a_page(world: Queued, api: httpx.Client) -> None:
    owner = world.tenant(name="a-tenant")
    runs = world.job(owner, hours=3, suffix="x")
    world.round()
    waits = world.job(owner, hours=2)
    world.set(waits, model="<script>alert(1)</script>")
    world.round(minutes=1)
    key = operators.create(as_operator(world.platform), "ops").secret
    found = read(api, "/v1/admin/queue", key).json()
    assert [j["id"] for j in found["running"]] == [runs]
    assert found["waiting"][0]["reservation"]["placement"] == [["local", 1]]
    assert read(api, "/v1/admin/queue?limit=1", key).json()["length"] == 1
    page = read(api, "/v1/admin/queue", key, accept="text/html")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "&lt;script&gt;" in page.text
    assert "<script" not in page.text
    assert {runs, waits} <= set(re.findall(r"ftjob-\w+", page.text))
    assert api.get("/v1/admin/queue?limit=0", headers={"authorization": f"Bearer {key}"}).status_code == 400


def test_an_empty_queue_is_an_answer(world: Queued, api: httpx.Client) -> None:
    mine = world.tenant()
    found: dict[str, Any] = read(api, "/v1/queue", world.key(mine)).json()
    assert (found["length"], found["waiting"], found["running"], found["last_round_at"]) == (0, [], [], None)
    assert (
        "No job is waiting."
        in read(api, "/v1/admin/queue", operators.create(as_operator(world.platform), "ops").secret, accept="text/html").text
    )
