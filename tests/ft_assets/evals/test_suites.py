"""Holdout items, and the digest that names a suite."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ft_assets.errors import InvalidRequest
from ft_assets.evals import config, suites
from ft_assets.evals.run_file import EvalRun


def row(n: int, answer: str = "yes") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": answer}]}


def test_the_last_assistant_turn_is_what_is_expected() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (item,) = suites.holdout_items([{"messages": messages}])
    assert (item.expected, len(item.messages)) == ("d", 4)


def test_prompt_and_completion_rows_are_items_too() -> None:
    (item,) = suites.holdout_items([{"prompt": "p", "completion": "c"}])
    assert item.messages == ({"role": "user", "content": "p"},)
    assert item.expected == "c"


@pytest.mark.parametrize(
    "no_item",
    [
        {"text": "plain"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "user", "content": "u"}]},
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
    ],
)
def test_rows_without_a_textual_answer_give_no_item(no_item: dict[str, object]) -> None:
    assert suites.holdout_items([no_item]) == []


def test_the_choice_of_items_does_not_depend_on_the_order_of_rows() -> None:
    rows = [row(n) for n in range(50)]
    shuffled = random.Random(1).sample(rows, 50)
    assert suites.holdout_items(rows, limit=10) == suites.holdout_items(shuffled, limit=10)
    assert len(suites.holdout_items(rows + rows, limit=100)) == 50


def test_items_survive_their_file(tmp_path: Path) -> None:
    items = suites.holdout_items([row(1, "snow \u2603\nline\u2028two"), row(2)])
    suites.write_items(items, tmp_path / "items.jsonl")
    assert suites.read_items(tmp_path / "items.jsonl") == items


def test_free_text_is_not_asked_for_to_the_letter() -> None:
    essay = " ".join(["word"] * 30)
    assert suites.is_literal(
        suites.holdout_items([row(1, '{"a": 1, "b": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'), row(2, "two words"), row(3, essay)])
    )
    assert not suites.is_literal(suites.holdout_items([row(1, essay), row(2)]))
    assert not suites.is_literal([])


def test_the_digest_changes_with_all_that_shapes_an_answer_and_nothing_else(tmp_path: Path) -> None:
    items = suites.holdout_items([row(1), row(2)])
    suites.write_items(items, tmp_path / "items.jsonl")
    suites.write_items(items[:1], tmp_path / "fewer.jsonl")
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "val-00000.parquet").write_bytes(b"windows")
    run = EvalRun(base_model_dir=tmp_path, adapter_dir=None, holdout=tmp_path / "items.jsonl", out_dir=tmp_path)
    digest = run.suite_digest()
    changed = [
        {"holdout": tmp_path / "fewer.jsonl"},
        {"golden": False},
        {"max_new_tokens": 7},
        {"max_items": 1},
        {"validation_pack_dir": pack},
    ]
    others = [replace(run, **change).suite_digest() for change in changed]  # type: ignore[arg-type]
    assert len({digest, *others}) == len(changed) + 1
    assert replace(run, batch_size=1, out_dir=tmp_path / "elsewhere").suite_digest() == digest


def test_a_run_file_survives_being_written_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    run = EvalRun(base_model_dir=tmp_path, adapter_dir=None, out_dir=tmp_path / "out")
    run.write(tmp_path / "run.json")
    assert EvalRun.read(tmp_path / "run.json") == run
    (tmp_path / "bad.json").write_text('{"base_model_dir": ".", "adapter_dir": null, "colour": 1}')
    with pytest.raises(InvalidRequest, match=r"unknown fields \['colour'\], missing fields \['out_dir'\]"):
        EvalRun.read(tmp_path / "bad.json")
    replace(run, adapter_dir=tmp_path / "absent").write(tmp_path / "gone.json")
    with pytest.raises(InvalidRequest, match=r"adapter_dir .*absent does not exist"):
        EvalRun.read(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"metric": "x"}, "metric", "unknown key 'metric'; known keys: approval, block_regression"),
        ({"task_metric": "blue"}, "task_metric", "not one of auto"),
        ({"min_relative_gain": "5%"}, "min_relative_gain", "not a number from 0 to 10"),
        ({"golden_min_share": 90}, "golden_min_share", "from 0 to 1"),
        ({"max_items": 2.5}, "max_items", "not a whole number"),
        ({"max_items": True}, "max_items", "not a whole number"),
        ({"mode": "async"}, "mode", "not one of gate, monitor"),
        ({"block_regression": 1}, "block_regression", "not one of True, False"),
        ({"judge": "yes"}, "judge", "not one of True, False, null"),
        ({"capability": "mmlu"}, "capability", "not a list of at most 16 suite names"),
        ({"capability": ["../mmlu"]}, "capability", "not a list of at most 16 suite names"),
        ({"skip": ["adapter_applied"]}, "skip", "may only list golden, task, perplexity"),
    ],
)
def test_an_eval_config_that_cannot_be_meant_is_refused_by_name(given: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        config.parse(given)
    assert caught.value.param == f"eval_config.{param}"


def test_no_eval_config_is_the_default() -> None:
    assert config.parse(None) == config.parse({}) == config.EvalConfig()
    assert config.parse({"min_relative_gain": 0, "skip": ["golden"]}).skip == ("golden",)
