"""``ft eval`` against the real API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from ft_client import FtClient
from ft_client.cli.evaluation_commands import printable, show_samples
from tests.support.jobs.evaluation_results import store_evaluation

Ft = Callable[..., Any]


@pytest.fixture
def job(platform: Platform, tenant: Tenant, api_url: str, api_key: str, write_chat_rows: Callable[..., Path]) -> str:
    with FtClient(base_url=api_url, api_key=api_key) as client:
        job_id = str(client.jobs.create(model="tiny-base", training_file=client.files.create(write_chat_rows(120))["id"])["id"])
    store_evaluation(platform, tenant.id, job_id)
    return job_id


def test_a_quarantined_adapter_fails_the_build_and_says_why(ft: Ft, job: str, tmp_path: Path) -> None:
    shown = ft("eval", job, "--html", tmp_path / "page.html")
    assert (shown.code, (tmp_path / "page.html").read_text()[:15]) == (1, "<!doctype html>")
    shown = ft("eval", job)
    assert shown.code == 1
    assert shown.out.startswith("QUARANTINED\n")
    assert "failed capability: capability/arc-standin (acc) 0.600 to 0.450" in shown.out
    assert "holdout\texact_match\t60\t0.333\t0.667\t0.783\t" in shown.out
    assert "ft submit FILE --hp learning_rate=0.0001 --hp rank=8" in shown.out


def test_answers_are_listed_without_what_a_terminal_would_obey(ft: Ft, job: str) -> None:
    shown = ft("eval", job, "--only", "changed", "--suite", "holdout")
    assert ("\x1b" in shown.out, "delivery" in shown.out) == (False, True)
    told = [json.loads(line) for line in ft("eval", job, "--samples", "--json").out.splitlines()]
    assert len({s["id"] for s in told}) == len(told) > 400
    assert printable("a\x1b[31m\nb\u202e") == "a?[31m\\nb?"


def test_empty_answers_are_shown_as_such_and_missing_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"id": "golden/g1", "suite": "golden", "change": "worse", "prompt": "Hi?", "expected": "", "base": "Hello.", "adapter": " "}
    likelihoods = {**sample, "id": "capability/x/1", "suite": "capability/x", "prompt": "", "base": "", "adapter": ""}
    show_samples([sample, likelihoods], as_json=False)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["golden/g1", "worse"], ["prompt:", "Hi?"], ["base:", "Hello."], ["adapter:", "(empty answer)"], ["capability/x/1", "worse"],
    ]  # fmt: skip


def test_a_passed_adapter_passes_the_build(platform: Platform, tenant: Tenant, ft: Ft, job: str) -> None:
    store_evaluation(platform, tenant.id, job, quarantined=False)
    passed = ft("eval", job, "--json")
    assert (passed.code, passed.json["verdict"]["outcome"]) == (0, "passed")
