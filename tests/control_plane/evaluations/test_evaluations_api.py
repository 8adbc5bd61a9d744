"""A job's evaluation over HTTP: as JSON, as a page, and item by item."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core import layout
from core.errors import InvalidRequest, NotFound
from ft_client import FtClient
from tests.support.jobs.evaluation_results import HOSTILE, UNSAFE, store_evaluation


@pytest.fixture
def job(platform: Platform, tenant: Tenant, ft: FtClient, training_file: str) -> str:
    """Id of a job whose evaluation is stored."""
    job_id = str(ft.jobs.create(model="tiny-base", training_file=training_file)["id"])
    store_evaluation(platform, tenant.id, job_id)
    return job_id


@pytest.fixture
def http(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_url, headers={"authorization": f"Bearer {api_key}"}) as client:
        yield client


def test_an_evaluation_is_report_verdict_and_advice(ft: FtClient, job: str) -> None:
    found = ft.jobs.evaluation(job)
    assert (found["object"], found["job_id"]) == ("fine_tuning.job.evaluation", job)
    verdict = found["verdict"]
    assert (verdict["outcome"], verdict["mode"]) == ("quarantined", "gate")
    assert verdict["reasons"] == ["capability_dropped", "refusals_too_few"]
    assert all(f["detail"] for f in verdict["findings"])
    exact = next(s for s in found["report"]["scores"] if s["metric"] == "exact_match")
    assert (exact["n"], exact["previous"]) == (60, pytest.approx(2 / 3))
    assert [a["code"] for a in found["advice"]] == ["forgetting", "safety_loss"]
    assert found["next_run"] == {"learning_rate": 1e-4, "rank": 8, "n_epochs": 1.5, "safety_share": 0.05}


def test_other_spellings_of_the_jobs_path_lead_to_it_too(http: httpx.Client, job: str) -> None:
    assert http.get(f"/v1/jobs/{job}/evaluation").json() == http.get(f"/v1/fine_tuning/jobs/{job}/evaluation").json()


def test_a_job_without_an_evaluation_says_where_it_is(ft: FtClient, training_file: str) -> None:
    job_id = ft.jobs.create(model="tiny-base", training_file=training_file)["id"]
    for ask in (ft.jobs.evaluation, lambda j: list(ft.jobs.evaluation_samples(j))):
        with pytest.raises(NotFound, match=f"job {job_id} is validating and has no evaluation") as refused:
            ask(job_id)
        assert refused.value.code == "evaluation_not_found"


def test_other_tenants_see_nothing(platform: Platform, api_url: str, job: str) -> None:
    _, key = tenants.create(platform, "other", tier="standard")
    with FtClient(base_url=api_url, api_key=key.secret) as stranger:
        for ask in (stranger.jobs.evaluation, stranger.jobs.evaluation_page, lambda j: list(stranger.jobs.evaluation_samples(j))):
            with pytest.raises(NotFound, match="no fine-tuning job"):
                ask(job)


def test_items_come_page_by_page_and_filtered(ft: FtClient, http: httpx.Client, job: str) -> None:
    everything = list(ft.jobs.evaluation_samples(job, limit=37))
    assert len({s["id"] for s in everything}) == len(everything) > 400
    assert {s["suite"] for s in everything} == {"holdout", "safety", "golden", "capability/arc-standin", "capability/recall"}
    worse = list(ft.jobs.evaluation_samples(job, suite="safety", only="worse"))
    assert len(worse) == len(UNSAFE) - len(UNSAFE) // 2
    assert all((s["base"], s["adapter"], s["expected"]) == ("I cannot.", "Sure.", "a refusal") for s in worse)
    changed = list(ft.jobs.evaluation_samples(job, suite="holdout", only="changed"))
    assert {s["change"] for s in changed} == {"better", "worse", "changed"}
    page = http.get(f"/v1/fine_tuning/jobs/{job}/evaluation/samples", params={"limit": 2, "suite": "holdout"}).json()
    assert ([s["id"] for s in page["data"]], page["has_more"]) == (["holdout/i0000", "holdout/i0001"], True)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"limit": 0}, "invalid_limit"),
        ({"limit": 201}, "invalid_limit"),
        ({"after": "holdout/none"}, "invalid_after"),
        ({"only": "good"}, None),
    ],
)
def test_questions_that_make_no_sense_are_refused(http: httpx.Client, job: str, asked: dict[str, Any], code: str | None) -> None:
    answer = http.get(f"/v1/fine_tuning/jobs/{job}/evaluation/samples", params=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code or InvalidRequest.default_code)


def test_the_page_shows_the_verdict_first_and_nothing_of_a_tenant_comes_alive(http: httpx.Client, job: str) -> None:
    answer = http.get(f"/v1/fine_tuning/jobs/{job}/evaluation", headers={"accept": "text/html,*/*"})
    page = answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert page.index("Quarantined") < page.index("Capability dropped") < page.index("Refusals too few") < page.index("exact match")
    assert HOSTILE[:25] not in page
    assert "<script" not in page
    assert "onerror=alert(1)&gt;" in page
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert page.count("<svg") > 10


def test_an_evaluation_of_an_earlier_version_is_shown(platform: Platform, tenant: Tenant, ft: FtClient, job: str) -> None:
    old = {
        "report": {
            "base_model": "m", "base_digest": "b", "adapter_manifest_sha256": "a", "suite_digest": "s", "adapter_applied": True,
            "max_logit_difference": 1.0, "literal": True, "golden_faults": [], "seconds": 2.0,
            "scores": [{"suite": "holdout", "metric": "exact_match", "n": 9, "base": 0.1, "adapter": 0.9, "previous": None,
                        "ci_low": 0.5, "ci_high": 0.9}],
            "samples": [{"id": "i", "prompt": "q", "expected": "e", "base": "b", "adapter": " "}],
        },
        "verdict": {"outcome": "passed", "findings": [{"rule": "task", "code": "ok", "passed": True, "blocking": True, "detail": "d"}]},
        "advice": ["Lower it."],
    }  # fmt: skip
    prefix = layout.eval_prefix(tenant.id, job)
    platform.objects.put_bytes(f"{prefix}/report.json", json.dumps(old).encode())
    platform.objects.delete(f"{prefix}/samples.jsonl")
    found = ft.jobs.evaluation(job)
    assert (found["verdict"]["outcome"], found["advice"][0]["message"], found["report"]["format"]) == ("passed", "Lower it.", 1)
    assert [s["id"] for s in ft.jobs.evaluation_samples(job)] == ["holdout/i"]
    page = ft.jobs.evaluation_page(job)
    assert b"Lower it." in page and page.count(b"(empty answer)") == 1
