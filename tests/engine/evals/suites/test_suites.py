"""Holdout items, and the digest that names a suite."""

import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InvalidRequest
from engine.data.tokens.reasoning_probe import THINK_MARKS
from engine.evals import config
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import golden, model_requests, suite_items


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
    (item,) = suite_items.holdout_items([{"messages": messages}])
    assert (item.expected, len(item.messages)) == ("d", 4)


def test_prompt_and_completion_rows_are_items_too() -> None:
    (item,) = suite_items.holdout_items([{"prompt": "p", "completion": "c"}])
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
    assert suite_items.holdout_items([no_item]) == []


def test_the_choice_of_items_does_not_depend_on_the_order_of_rows() -> None:
    rows = [row(n) for n in range(50)]
    shuffled = random.Random(1).sample(rows, 50)
    assert suite_items.holdout_items(rows, limit=10) == suite_items.holdout_items(shuffled, limit=10)
    assert suite_items.holdout_items(rows, limit=10) == suite_items.holdout_items(rows, limit=100)[:10]
    assert len(suite_items.holdout_items(rows + rows, limit=100)) == 50


def test_items_survive_their_file(tmp_path: Path) -> None:
    items = suite_items.holdout_items([row(1, "snow \u2603\nline\u2028two"), row(2)])
    suite_items.write_items(items, tmp_path / "items.jsonl")
    assert suite_items.read_items(tmp_path / "items.jsonl") == items


def test_the_tools_of_a_row_are_asked_with_it_and_are_part_of_the_digest(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "no"}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    (plain,), (equipped,) = (suite_items.holdout_items([{"messages": turns, "tools": offered}]) for offered in ([], tools))
    assert plain == suite_items.holdout_items([{"messages": turns}])[0], "without tools an item is the one that it was"
    assert equipped.id != plain.id
    suite_items.write_items([equipped], tmp_path / "items.jsonl")
    assert suite_items.read_items(tmp_path / "items.jsonl") == [equipped]
    made = [suite_items.holdout_suite([item], suite_items.Decoding()) for item in (plain, equipped, replace(equipped, tools=()))]
    assert len({suite.digest for suite in made}) == 3
    assert made[1].requests[0].tools == tuple(tools)  # type: ignore[union-attr]


def test_free_text_is_not_asked_for_to_the_letter() -> None:
    essay = " ".join(["word"] * 30)
    assert suite_items.is_literal(
        suite_items.holdout_items([row(1, '{"a": 1, "b": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'), row(2, "two words"), row(3, essay)])
    )
    assert not suite_items.is_literal(suite_items.holdout_items([row(1, essay), row(2)]))
    assert not suite_items.is_literal([])


def test_every_suite_has_a_digest_that_follows_from_what_is_asked_and_from_nothing_else() -> None:
    items = suite_items.holdout_items([row(1), row(2)])
    decoding = suite_items.Decoding()
    digest = suite_items.holdout_suite(items, decoding).digest
    assert suite_items.holdout_suite(list(items), suite_items.Decoding(golden_max_new_tokens=1)).digest == digest
    wanted_otherwise = [replace(item, expected="no") for item in items]
    assert suite_items.holdout_suite(wanted_otherwise, decoding).digest == digest  # what is expected shapes a score, not an answer
    others = [
        suite_items.holdout_suite(items[:1], decoding),
        suite_items.holdout_suite(items[::-1], decoding),
        suite_items.holdout_suite(items, suite_items.Decoding(max_new_tokens=7)),
        suite_items.conversation_suite("safety", items, max_new_tokens=256),
        suite_items.conversation_suite("holdout", items, max_new_tokens=256, version="2"),
        suite_items.golden_suite(decoding),
    ]
    assert len({digest, *(other.digest for other in others)}) == len(others) + 1


def test_versions_of_a_scored_suite_share_the_answers_to_equal_prompts() -> None:
    items = suite_items.holdout_items([row(1), row(2)])

    def made(name: str, version: str, *, items: list[suite_items.Item] = items) -> suite_items.Suite:
        decoding = suite_items.Decoding()
        return suite_items.scored_suite(name, version, items, decoding, longest_expected=4, longest_reasoning=None)

    assert (made("refunds", "3").id, made("refunds", "3").version) == ("suite/refunds", "3")
    assert made("refunds", "3").digest == made("refunds", "4").digest
    assert made("refunds", "3").digest != made("refunds", "3", items=items[:1]).digest
    assert made("refunds", "3", items=[replace(item, expected=None) for item in items]).requests[0].max_new_tokens == 256  # type: ignore[union-attr]


def test_an_answer_may_be_half_as_long_again_as_the_longest_expected_one() -> None:
    items = suite_items.holdout_items([row(1)])
    asked = [
        suite_items.holdout_suite(items, suite_items.Decoding(max_new_tokens=100), longest_expected=n).requests[0] for n in (None, 10, 90)
    ]
    assert [request.max_new_tokens for request in asked if isinstance(request, model_requests.Generate)] == [100, 23, 100]


def test_the_golden_suite_asks_every_prompt_under_its_own_id() -> None:
    suite = suite_items.golden_suite(suite_items.Decoding(golden_max_new_tokens=9))
    assert (suite.kind, suite.version, suite.num_items) == ("golden", golden.version(), 50)
    assert [request.id for request in suite.requests] == [item.id for item in suite.items] == [p.id for p in golden.golden_prompts()]
    assert all(isinstance(request, model_requests.Generate) and request.max_new_tokens == 9 for request in suite.requests)


def write_validation(pack: Path, rows: list[dict[str, object]]) -> Path:
    pack.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), pack / "val-00000.parquet")
    return pack


def test_packed_windows_are_one_suite_of_their_examples(tmp_path: Path) -> None:
    window = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5], "seq_lengths": [3, 2]}
    (suite,), kind = suite_items.validation_suites(write_validation(tmp_path / "pack", [window]), limit=10)
    assert kind is None
    assert suite.requests == (
        model_requests.Loss(id="example-00000", input_ids=(1, 2, 3), labels=(-100, 2, 3)),
        model_requests.Loss(id="example-00001", input_ids=(4, 5), labels=(-100, 5)),
    )


def test_of_pairs_both_sides_are_asked_under_the_same_ids(tmp_path: Path) -> None:
    pairs: list[dict[str, object]] = [
        {"chosen_input_ids": [1, n], "chosen_labels": [-100, n], "rejected_input_ids": [1, n + 1], "rejected_labels": [-100, n + 1]}
        for n in range(5)
    ]
    (wanted, unwanted), kind = suite_items.validation_suites(write_validation(tmp_path / "pack", pairs), limit=3)
    assert kind == "pairs"
    assert [(s.id, s.num_items) for s in (wanted, unwanted)] == [("validation", 3), ("unwanted", 3)]
    assert [request.id for request in wanted.requests] == [request.id for request in unwanted.requests]
    assert wanted.digest != unwanted.digest


def test_a_pack_without_validation_gives_no_suite(tmp_path: Path) -> None:
    assert suite_items.validation_suites(tmp_path, limit=10) == ((), None)


def test_a_choice_of_positions_is_even_and_always_the_same() -> None:
    assert suite_items.spread(3, 10) == [0, 1, 2]
    assert suite_items.spread(10, 5) == [0, 2, 4, 6, 8]
    assert suite_items.spread(14_042, 200) == sorted(set(suite_items.spread(14_042, 200)))
    assert len(suite_items.spread(14_042, 200)) == 200


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
        ({"mode": "async"}, "mode", "not one of gate, experiment, monitor, off"),
        ({"block_regression": 1}, "block_regression", "not one of True, False"),
        ({"judge": "yes"}, "judge", "not one of True, False, null"),
        ({"capability": "mmlu"}, "capability", "not a list of at most 16 suite names"),
        ({"capability": ["../mmlu"]}, "capability", "not a list of at most 16 suite names"),
        ({"suites": "refunds"}, "suites", "not a list of at most 16 suite names"),
        ({"suites": ["refunds@0"]}, "suites", "not a list of at most 16 suite names"),
        ({"suites": ["refunds", "refunds@2"]}, "suites", "two versions of one suite"),
        ({"skip": ["adapter_applied"]}, "skip", "may only list golden, task, answers, perplexity, suites"),
    ],
)
def test_an_eval_config_that_cannot_be_meant_is_refused_by_name(given: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        config.parse_eval_config(given)
    assert caught.value.param == f"eval_config.{param}"


def test_no_eval_config_is_the_default() -> None:
    assert config.parse_eval_config(None) == config.parse_eval_config({}) == config.EvalConfig()
    assert config.parse_eval_config({"min_relative_gain": 0, "skip": ["golden"]}).skip == ("golden",)


THOUGHT = "The user asks for a yes or a no, so I think about it at some length, and then once more. " * 3


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "yes", "reasoning_content": THOUGHT},
        {"content": "yes", "thinking": THOUGHT},
        {"content": f"<think>\n{THOUGHT}\n</think>\n\nyes"},
    ],
)
def test_the_reasoning_of_a_row_is_not_expected_and_has_room_beside_the_answer(answer: dict[str, str], tmp_path: Path) -> None:
    (item,) = suite_items.holdout_items([{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", **answer}]}])
    assert (item.expected, THOUGHT.strip() in item.reasoning) == ("yes", True)
    suite_items.write_items([item], tmp_path / "items.jsonl")
    assert suite_items.read_items(tmp_path / "items.jsonl") == [item]
    asked = suite_items.holdout_suite([item], suite_items.Decoding(), longest_expected=2, longest_reasoning=400).requests[0]
    assert isinstance(asked, model_requests.Generate)
    assert asked.max_new_tokens == (2 + 1 + 8) + (400 + 200 + 8)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "yes"),
        ("hm, so\n</think>\n\nyes", "yes"),
        ("<think>\n\n</think>\n\n{}", "{}"),
        ("<think>without an end", "<think>without an end"),
        ("yes <think>late</think>", "yes <think>late</think>"),
        ("<think>a</think>yes</think>", "yes</think>"),
        ("<think>a <think>b</think>yes", "<think>a <think>b</think>yes"),
        ("Close the tag with </think> and go on.", "Close the tag with </think> and go on."),
        ("</think>\nyes", "yes"),
        ("hm\n</think>", ""),
        ("yes", "yes"),
    ],
)
def test_an_answer_begins_after_the_leading_reasoning(text: str, answer: str) -> None:
    assert THINK_MARKS.split(text)[1] == answer
