"""Many submissions at once: limits hold, and a request that is sent again makes no second job."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
from openai._models import FinalRequestOptions

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants

CREATE = "/v1/fine_tuning/jobs"


@pytest.fixture(autouse=True)
def unhurried(platform: Platform, tenant: Tenant) -> None:
    """No limit of requests a minute comes between the submissions."""
    limit(platform, tenant, requests_per_minute=1_000_000)


def limit(platform: Platform, tenant: Tenant, **limits: float) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(**limits))


@pytest.fixture
def http(api_url: str, api_key: str) -> Any:
    limits = httpx.Limits(max_connections=60)
    with httpx.Client(base_url=api_url, headers={"authorization": f"Bearer {api_key}"}, limits=limits, timeout=60) as made:
        yield made


def test_fifty_submissions_at_once_against_a_limit_of_five_are_five_jobs(http: httpx.Client, training_file: str) -> None:
    def submit(seed: int) -> httpx.Response:
        return http.post(CREATE, json={"model": "tiny-base", "training_file": training_file, "seed": seed})

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(submit, range(50)))
    assert Counter(a.status_code for a in answers) == {200: 5, 429: 45}
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.json()["error"]["code"] == "exceeded_quota"
    assert "limit of tenant" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert len(http.get(CREATE).json()["data"]) == 5


def test_a_place_is_free_again_when_a_job_ends(client: openai.OpenAI, training_file: str) -> None:
    jobs = [client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, seed=i) for i in range(5)]
    with pytest.raises(openai.RateLimitError, match="5 jobs are in flight"):
        client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    client.fine_tuning.jobs.cancel(jobs[0].id)
    client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)


def test_fifty_submissions_at_once_against_gpu_hours_for_five_are_five_jobs(
    http: httpx.Client, platform: Platform, tenant: Tenant, training_file: str
) -> None:
    def submit(seed: int) -> httpx.Response:
        return http.post(CREATE, json={"model": "tiny-base", "training_file": training_file, "seed": seed})

    estimate = submit(0).json()["quota"]
    limit(platform, tenant, max_jobs_in_flight=100, hard_gpu_hours=5.5 * estimate["job_gpu_hours"])
    with ThreadPoolExecutor(49) as pool:
        answers = list(pool.map(submit, range(1, 50)))
    assert Counter(a.status_code for a in answers) == {200: 4, 429: 45}
    error = next(a for a in answers if a.status_code == 429).json()["error"]
    assert error["code"] == "exceeded_quota"
    assert "GPU-hours" in error["message"]
    left = [a.json()["quota"]["left_gpu_hours"] for a in answers if a.status_code == 200]
    assert all(estimate["job_gpu_hours"] <= one for one in left), "each had room for itself"
    assert len(http.get(CREATE).json()["data"]) == 5


@pytest.mark.parametrize(("place", "times"), [("header", 100), ("field", 100), pytest.param("header", 1000, marks=pytest.mark.slow)])
def test_one_idempotency_key_is_one_job_however_many_arrive_at_once(http: httpx.Client, training_file: str, place: str, times: int) -> None:
    body = {"model": "tiny-base", "training_file": training_file, "suffix": "once"}
    key = {"idempotency_key": "submit-1"}

    def submit(_: int) -> httpx.Response:
        if place == "field":
            return http.post(CREATE, json=body | key)
        return http.post(CREATE, json=body, headers={"Idempotency-Key": "submit-1"})

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(submit, range(times)))
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["id"] for a in answers}) == 1
    assert sum("idempotent-replayed" not in a.headers for a in answers) == 1
    assert len(http.get(CREATE).json()["data"]) == 1


def test_a_key_keeps_its_job_after_the_limit_is_reached(client: openai.OpenAI, training_file: str) -> None:
    key = {"Idempotency-Key": "mine"}
    first = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, extra_headers=key)
    for seed in range(4):
        client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, seed=seed)
    again = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, extra_headers=key)
    assert again.id == first.id


def test_the_same_key_with_another_body_is_refused_and_not_retried(client: openai.OpenAI, training_file: str) -> None:
    key = {"Idempotency-Key": "mine"}
    first = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, extra_headers=key)
    with pytest.raises(openai.ConflictError, match=first.id) as refused:
        client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, suffix="other", extra_headers=key)
    assert refused.value.code == "idempotency_key_reused"
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_a_header_and_a_field_that_differ_are_refused(http: httpx.Client, training_file: str) -> None:
    body = {"model": "tiny-base", "training_file": training_file, "idempotency_key": "a"}
    answer = http.post(CREATE, json=body, headers={"Idempotency-Key": "b"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency_key")


def test_a_clients_own_retry_without_a_key_makes_no_twin(http: httpx.Client, training_file: str) -> None:
    body = {"model": "tiny-base", "training_file": training_file}
    first = http.post(CREATE, json=body, headers={"x-stainless-retry-count": "0"}).json()["id"]
    retries = [http.post(CREATE, json=body, headers={"x-stainless-retry-count": str(n)}).json()["id"] for n in (1, 2)]
    assert retries == [first, first]
    deliberate = http.post(CREATE, json=body | {"force": True}, headers={"x-stainless-retry-count": "0"}).json()["id"]
    assert deliberate != first, "two submissions on purpose are two jobs"


def test_a_clients_retry_after_a_cancelled_job_is_a_new_one(http: httpx.Client, client: openai.OpenAI, training_file: str) -> None:
    sent = client.with_options(timeout=20)._build_request(FinalRequestOptions(method="post", url="/x", json_data={}), retries_taken=1)
    retry = {name: value for name, value in sent.headers.items() if name in ("x-stainless-retry-count", "x-stainless-read-timeout")}
    assert retry == {"x-stainless-retry-count": "1", "x-stainless-read-timeout": "20"}, "what the installed client says"
    assert "idempotency-key" not in sent.headers
    body = {"model": "tiny-base", "training_file": training_file}
    first = http.post(CREATE, json=body).json()["id"]
    assert http.post(CREATE, json=body, headers=retry).json()["id"] == first
    http.post(f"{CREATE}/{first}/cancel")
    again = http.post(CREATE, json=body, headers=retry).json()
    assert again["id"] != first
    assert again["status"] != "cancelled"


def test_an_equal_body_sent_again_at_once_is_the_same_job_also_from_a_client_that_says_nothing(
    http: httpx.Client, training_file: str
) -> None:
    body = {"model": "tiny-base", "training_file": training_file, "suffix": "again"}
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: http.post(CREATE, json=body), range(20)))
    assert {a.status_code for a in answers} == {200}
    assert len({a.json()["id"] for a in answers}) == 1
    assert Counter(a.headers.get("idempotent-replayed") for a in answers) == {None: 1, "true": 19}
    first = answers[0].json()["id"]
    forced = [http.post(CREATE, json=body | {"force": True}).json()["id"] for _ in range(2)]
    named = http.post(CREATE, json=body, headers={"Idempotency-Key": "mine"}).json()["id"]
    assert len({first, named, *forced}) == 4
    http.post(f"{CREATE}/{named}/cancel")
    http.post(f"{CREATE}/{first}/cancel")
    assert http.post(CREATE, json=body).json()["id"] not in {first, named}, "one that has ended is no answer"


def test_a_retry_of_another_body_is_another_job(http: httpx.Client, training_file: str) -> None:
    one = http.post(CREATE, json={"model": "tiny-base", "training_file": training_file, "seed": 1}).json()["id"]
    headers = {"x-stainless-retry-count": "1"}
    two = http.post(CREATE, json={"model": "tiny-base", "training_file": training_file, "seed": 2}, headers=headers).json()["id"]
    assert one != two
