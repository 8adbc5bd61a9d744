"""Answers to rows with a response format are checked against its JSON schema, in a process with limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.evaluations import schema_checks
from control_plane.evaluations.schema_checks import with_schema_verdicts
from control_plane.platform.context import Platform
from core.errors import Unavailable
from engine.data import shapes
from engine.evals.scoring.scores import SCHEMA_VALID
from engine.evals.suites import suite_items
from engine.evals.suites.answer_reader import STRIP
from engine.evals.suites.suite_items import Item
from tests.support.jobs.evaluation_results import built, result, section, subject
from tests.support.processes.small_disk import small_disk

ORDER = {
    "type": "object",
    "properties": {"id": {"type": "string", "pattern": "^(A+)+$"}},
    "required": ["id"],
    "additionalProperties": False,
}


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "order", "schema": schema}}


def items_of(*formats: dict[str, Any]) -> list[Item]:
    rows = []
    for n, form in enumerate(formats):
        turns = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": '{"id": "A"}'}]
        example, problems = shapes.to_example({"messages": turns, "response_format": form}, "chat", row=n)
        assert example is not None and not problems
        rows.append(example.as_row())
    found = suite_items.holdout_items(rows)
    return sorted(found, key=lambda item: str(item.messages[0]["content"]))


def verdicts(platform: Platform, items: Sequence[Item], base: Sequence[str], adapter: Sequence[str]) -> dict[str, Any]:
    sides = [{**subject(items), "holdout": section({i.id: t for i, t in zip(items, texts, strict=True)})} for texts in (base, adapter)]
    return dict(with_schema_verdicts(platform, "t-schemas", result(*sides), items, reader=STRIP))


def test_valid_answers_are_a_score_and_part_of_the_samples(platform: Platform) -> None:
    items = items_of(*[named(ORDER)] * 4, {"type": "json_object"}, {"type": "text"}, named({"$ref": "https://example.com/order.json"}))
    right = [
        '{"id": "AA"}',
        "<think>hm</think>\n" + '{"id": "A"}',
        '{"id": "' + "A" * 60 + 'b"}',
        "no JSON",
        '{"x": 1}',
        "hi",
        '{"id": "A"}',
    ]
    made = verdicts(platform, items, ['{"id": 1}'] * 7, right)
    found = made[SCHEMA_VALID]
    assert [found["adapter"].get(item.id) for item in items] == [1.0, 1.0, 0.0, 0.0, 1.0, None, None]
    score = built(made, items).score("holdout", "schema_valid")
    assert score is not None and (score.n, score.base, score.adapter) == (5, 0.2, 0.6)


def test_checks_that_exceed_their_limits_give_no_score(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_checks, "LIMITS", replace(schema_checks.LIMITS, wall_s=2.0))
    doubling: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    items = items_of(named({"$defs": {**doubling, "d40": {"type": "object"}}, "$ref": "#/$defs/d0"}))
    made = verdicts(platform, items, ["{}"], ["{}"])
    assert SCHEMA_VALID not in made
    assert built(made, items).score("holdout", "schema_valid") is None


def test_a_full_disk_leaves_no_answer_unchecked(platform: Platform, tmp_path: Path) -> None:
    on_disk = replace(platform, settings=replace(platform.settings, home=tmp_path))
    with small_disk(on_disk.settings.work_dir, "1m") as disk:
        disk.fill()
        with pytest.raises(Unavailable, match="disk space"):
            verdicts(on_disk, items_of(named(ORDER)), ["{}"], ["{}"])
