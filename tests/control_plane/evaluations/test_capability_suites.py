"""Capability suites over HTTP, and at the door of a job."""

from __future__ import annotations

import openai
import pytest

from core.errors import InvalidRequest
from ft_client import FtClient


def test_suites_are_listed_with_their_examples_items_and_readiness(ft: FtClient) -> None:
    found = {suite["name"]: suite for suite in ft.capability_suites.list().all()}
    assert set(found) >= {"mmlu", "hellaswag", "arc_challenge", "standin_choices", "standin_copy"}
    assert found["standin_choices"] == {
        "object": "capability_suite", "name": "standin_choices", "version": "1.0", "num_fewshot": 0, "num_items": 200,
        "output": "multiple_choice", "shipped": True, "ready": True, "reason": None, "default": False,
    }  # fmt: skip
    assert (found["mmlu"]["ready"], found["mmlu"]["num_fewshot"]) == (False, 5)
    assert "FT_EVAL_DATA" in found["mmlu"]["reason"]


@pytest.mark.parametrize(("name", "code"), [("mmlu", "capability_suite_not_ready"), ("mmul", "capability_suite_unknown")])
def test_a_job_that_names_a_suite_that_cannot_be_asked_is_refused(ft: FtClient, training_file: str, name: str, code: str) -> None:
    body = {"model": "tiny-base", "training_file": training_file, "eval_config": {"capability": ["standin_choices", name]}}
    with pytest.raises(InvalidRequest) as refused:
        ft.jobs.create(**body)
    assert (refused.value.code, refused.value.param) == (code, "eval_config.capability")


def test_a_job_may_name_a_suite_that_is_ready(client: openai.OpenAI, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny-base", training_file=training_file, extra_body={"eval_config": {"capability": ["standin_choices"]}}
    )
    assert job.status in ("validating_files", "queued")
