"""A tenant's scored suites: their versions, what a file must hold, and how jobs name them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.datasets.scored_suites.tables import ScoredSuite
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import InvalidRequest, NotFound
from engine.evals import config
from engine.evals.suites.answer_reader import AnswerReader
from ft_client import FtClient

REFUNDS = [{"prompt": f"May I return order {number}?", "completion": "yes" if number % 2 else "no"} for number in range(8)]
EXACT = Scoring(metric="exact_match")
IS_ONE = {"type": "string_check", "name": "one", "operation": "like", "input": "{{sample.output_text}}", "reference": "{{item.wanted}}"}


def add(platform: Platform, tenant: Tenant, rows: Sequence[Any], *, name: str = "refunds", scoring: Scoring = EXACT) -> ScoredSuite:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    return scored_suites.add(platform, tenant.id, io.BytesIO(lines.encode()), name=name, filename="refunds.jsonl", scoring=scoring)


def refusal(platform: Platform, tenant: Tenant, rows: Sequence[Any], scoring: Scoring = EXACT) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        add(platform, tenant, rows, scoring=scoring)
    return refused.value


def test_a_changed_file_is_the_next_version_and_the_same_file_is_none(platform: Platform, tenant: Tenant) -> None:
    first = add(platform, tenant, REFUNDS)
    assert (first.version, first.num_items, first.metric, first.max_drop, first.min_score) == (1, 8, "exact_match", 0.02, None)
    assert add(platform, tenant, REFUNDS).id == first.id
    second = add(platform, tenant, REFUNDS, scoring=Scoring(metric="exact_match", min_score=0.5))
    third = add(platform, tenant, REFUNDS[1:])
    assert [s.version for s in (second, third)] == [2, 3]
    assert [s.id for s in scored_suites.newest(platform, tenant.id)] == [third.id]
    assert add(platform, tenant, REFUNDS).version == 4, "an earlier content again is a version of its own"


def test_rows_that_are_no_items_are_refused_with_their_number(platform: Platform, tenant: Tenant) -> None:
    assert "row 2 of refunds.jsonl is no item" in refusal(platform, tenant, [REFUNDS[0], {"text": "no prompt"}]).message
    assert "row 1 of refunds.jsonl has no answer that exact_match can compare with" in refusal(platform, tenant, [{"prompt": "a?"}]).message
    assert "rows 1 and 3 of refunds.jsonl are the same item" in refusal(platform, tenant, [*REFUNDS[:2], REFUNDS[0]]).message
    assert "row 2 of refunds.jsonl is no item" in refusal(platform, tenant, [REFUNDS[0], ["a list"]]).message
    assert scored_suites.newest(platform, tenant.id) == []
    assert list(platform.objects.list(f"tenants/{tenant.id}/scored_suites")) == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"metric": "bleurt"}, "metric"),
        ({}, "metric"),
        ({"metric": "exact_match", "grader": IS_ONE}, "metric"),
        ({"metric": "exact_match", "min_score": 1.5}, "min_score"),
        ({"metric": "exact_match", "max_drop": float("nan")}, "max_drop"),
        ({"grader": {"type": "python"}}, "grader.type"),
    ],
)
def test_scoring_that_is_unclear_is_refused_by_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Scoring.of(**({"metric": None, "grader": None, "max_drop": None, "min_score": None} | given))
    assert refused.value.param == param


def test_a_name_that_no_job_could_give_is_refused(platform: Platform, tenant: Tenant) -> None:
    longest = "n" * 80
    assert config.parse_eval_config({"suites": [add(platform, tenant, REFUNDS, name=longest).reference]}).suites == (f"{longest}@1",)
    with pytest.raises(InvalidRequest, match="name has 81 characters, the limit is 80") as refused:
        add(platform, tenant, REFUNDS, name=f"{longest}n")
    assert refused.value.param == "name"


@pytest.mark.parametrize(
    ("templates", "path"),
    [
        ({"reference": "{{item.wnated}}"}, "item.wnated"),
        ({"input": "{{ sample.text }}"}, "sample.text"),
        ({"input": "{{sample.output_json.word}}", "reference": "{{item.wnated}}"}, "item.wnated"),
        ({"input": "{{sample.output_json.word}}"}, None),
    ],
)
def test_a_grader_that_reads_what_no_row_has_is_refused(
    platform: Platform, tenant: Tenant, templates: dict[str, str], path: str | None
) -> None:
    rows = [{"prompt": f"Say {word}", "wanted": word} for word in ("one", "two")]
    scoring = Scoring(metric="reward", grader=IS_ONE | templates)
    if path is None:
        assert add(platform, tenant, rows, scoring=scoring).num_items == 2
        return
    error = refusal(platform, tenant, rows, scoring)
    assert (error.param, f"the grader reads {{{{{path}}}}}, which row 1 of refunds.jsonl does not have" in error.message) == (
        "grader",
        True,
    )


def test_a_row_that_graders_cannot_read_is_refused(platform: Platform, tenant: Tenant) -> None:
    row = {"prompt": "Say one", "wanted": "one", "notes": "n" * 200_000}
    error = refusal(platform, tenant, [row], Scoring(metric="reward", grader=IS_ONE))
    assert "row 1 of refunds.jsonl has 200,0" in error.message and "at most 200,000" in error.message


def test_answers_are_scored_by_the_metric_or_by_a_grader_that_sees_the_row(platform: Platform, tenant: Tenant) -> None:
    exact = add(platform, tenant, REFUNDS)
    rows = [{"prompt": f"Say {word}", "wanted": word} for word in ("one", "two")]
    graded = add(platform, tenant, rows, name="words", scoring=Scoring(metric="reward", grader=IS_ONE, max_drop=0.1, min_score=0.4))
    asked = scored_suites.asked(platform, tenant.id, config.parse_eval_config({"suites": [exact.reference, graded.reference]}))
    answers = {one.id: {i.id: "<think>no</think>yes" if one.suite.name == "refunds" else "one or more" for i in one.items} for one in asked}
    result = {
        "suites": {one.id: {"kind": "scored", "version": str(one.suite.version)} for one in asked},
        "subjects": {"base": {id_: {"answers": given} for id_, given in answers.items()}, "adapter": None},
    }
    scored = scored_suites.with_scores(result, asked, reader=AnswerReader())
    values = {id_: [next(iter(item.values())) for item in items.values()] for id_, items in scored["scored"]["base"].items()}
    assert values == {"suite/refunds": [0.0, 1.0] * 4, "suite/words": [1.0, 0.0]}
    assert scored["suites"]["suite/words"] | {"kind": "", "version": ""} == {"kind": "", "version": "", "max_drop": 0.1, "min_score": 0.4}
    assert set(next(iter(scored["scored"]["base"]["suite/words"].values()))) == {"reward"}


def test_a_job_keeps_the_version_that_was_the_newest(platform: Platform, tenant: Tenant, training_file: str) -> None:
    add(platform, tenant, REFUNDS)
    add(platform, tenant, REFUNDS[1:])

    def stored(*suites: str) -> Any:
        body = {"model": "tiny-base", "training_file": training_file, "eval_config": {"suites": list(suites)}}
        return jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job.request["eval_config"]["suites"]

    assert (stored("refunds"), stored("refunds@1")) == (["refunds@2"], ["refunds@1"])
    for unknown, says in (("refunds@7", "it has versions 2, 1"), ("nothing", "ft scored-suites add NAME FILE")):
        with pytest.raises(InvalidRequest, match=says) as refused:
            stored(unknown)
        assert refused.value.param == "eval_config.suites"
    with pytest.raises(InvalidRequest, match="two versions of one suite"):
        stored("refunds@1", "refunds")


def test_a_suite_that_was_removed_is_asked_no_more(platform: Platform, tenant: Tenant) -> None:
    named = config.parse_eval_config({"suites": [add(platform, tenant, REFUNDS).reference]})
    assert len(scored_suites.asked(platform, tenant.id, named)) == 1
    scored_suites.remove(platform, tenant.id, "refunds")
    assert scored_suites.asked(platform, tenant.id, named) == []
    assert list(platform.objects.list(f"tenants/{tenant.id}/scored_suites")) == []
    with pytest.raises(NotFound):
        scored_suites.remove(platform, tenant.id, "refunds")


def test_a_version_that_is_added_during_the_removal_leaves_no_items(platform: Platform, tenant: Tenant) -> None:
    add(platform, tenant, REFUNDS)
    added: list[int] = []

    def add_another(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM scored_suites") and not added:
            added.append(add(platform, tenant, REFUNDS[1:]).version)

    sa.event.listen(platform.engine, "before_cursor_execute", add_another)
    try:
        scored_suites.remove(platform, tenant.id, "refunds")
    finally:
        sa.event.remove(platform.engine, "before_cursor_execute", add_another)
    assert added == [2]
    assert scored_suites.versions(platform, tenant.id, "refunds") == []
    assert list(platform.objects.list(f"tenants/{tenant.id}/scored_suites")) == []


def test_a_version_that_a_job_names_is_not_given_to_other_items(platform: Platform, tenant: Tenant, training_file: str) -> None:
    add(platform, tenant, REFUNDS)
    second = add(platform, tenant, REFUNDS[1:])
    body = {"model": "tiny-base", "training_file": training_file, "eval_config": {"suites": ["refunds"]}}
    jobs.submit(platform, tenant.id, JobRequest.from_body(body))
    scored_suites.remove(platform, tenant.id, "refunds")
    assert add(platform, tenant, REFUNDS[2:]).version == 3
    assert scored_suites.asked(platform, tenant.id, config.parse_eval_config({"suites": [second.reference]})) == []
    assert add(platform, tenant, REFUNDS, name="refunds-2").version == 1, "the name of another suite"


def test_a_suite_is_kept_listed_and_removed_over_the_api(ft: FtClient, tmp_path: Path) -> None:
    file = tmp_path / "refunds.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in REFUNDS))
    made = ft.scored_suites.create(file, name="refunds", grader=IS_ONE | {"reference": "yes"}, min_score=0.5)
    assert (made["version"], made["metric"], made["grader"]["operation"], made["min_score"]) == (1, "reward", "like", 0.5)
    ft.scored_suites.create(file, name="refunds", metric="accuracy", max_drop=0.0)
    assert [(s["name"], s["version"]) for s in ft.scored_suites.list()] == [("refunds", 2)]
    assert [(s["version"], s["max_drop"]) for s in ft.scored_suites.versions("refunds")] == [(2, 0.0), (1, 0.02)]
    with pytest.raises(InvalidRequest, match="min_score 'high' is not a number"):
        ft.scored_suites.create(file, name="refunds", metric="accuracy", min_score="high")  # type: ignore[arg-type]
    ft.scored_suites.delete("refunds")
    assert list(ft.scored_suites.list()) == []
