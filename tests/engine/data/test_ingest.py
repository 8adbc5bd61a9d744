"""Good files in every form become the same dataset; duplicates go; the report says what was done."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from engine.data.ingest import Policies, load_rows, load_stored, validate_file
from engine.data.readers.row_stream import parse_column_map
from engine.data.report.validation_report import DatasetReport
from engine.data.schema import Example, Message, ToolCall, canonical, parse_canonical
from tests.engine.data.examples_of import chat, shared_file

FEW = Policies(min_examples=1)


def read(path: Path, **options: Any) -> tuple[DatasetReport, list[Example]]:
    output = path.with_name("out.parquet")
    report = validate_file(
        path, filename=options.pop("filename", path.name), output=output, policies=options.pop("policies", FEW), **options
    ).report
    assert report.valid, report.summary()
    return report, list(load_rows(output))


def test_one_dataset_in_every_container_has_one_id(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}, 'quoted' \"twice\"\nnext line é", "completion": f"answer {i}"} for i in range(20)]
    lines = "\n".join(json.dumps(r) for r in rows).encode()
    files = {
        "a.jsonl": lines,
        "crlf.jsonl": lines.replace(b"\n", b"\r\n\r\n"),
        "bom.jsonl": b"\xef\xbb\xbf" + lines,
        "a.jsonl.gz": gzip.compress(lines[:300]) + gzip.compress(lines[300:]),
        "a.jsonl.zst": zstandard.compress(lines[:300]) + zstandard.compress(lines[300:]),
        "array.json": json.dumps(rows, indent=1, ensure_ascii=False).encode(),
        "misnamed.csv": lines,
        "a.csv": (
            "prompt,completion\n" + "".join(f'"{r["prompt"].replace(chr(34), chr(34) * 2)}",{r["completion"]}\n' for r in rows)
        ).encode(),
        "semicolons.csv": (
            "prompt;completion\n" + "".join(f'"{r["prompt"].replace(chr(34), chr(34) * 2)}";{r["completion"]}\n' for r in rows)
        ).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    ids = {name: read(tmp_path / name)[0].dataset_id for name in (*files, "a.parquet")}
    assert len(set(ids.values())) == 1, ids
    assert str(ids["a.jsonl"]).startswith("ds_")
    assert len(str(ids["a.jsonl"])) == 27


def test_another_row_or_policy_or_order_is_another_dataset(jsonl: Callable[..., Path]) -> None:
    rows = [chat("a", "b"), chat("c", "d")]
    ids = {
        read(jsonl(*rows))[0].dataset_id,
        read(jsonl(*rows[::-1]))[0].dataset_id,
        read(jsonl(*rows, chat("e", "f")))[0].dataset_id,
        read(jsonl(*rows), policies=Policies(min_examples=1, bad_rows="drop"))[0].dataset_id,
    }
    assert len(ids) == 4


def test_rows_are_near_duplicates_from_a_jaccard_index_of_exactly_nine_tenths(jsonl: Callable[..., Path]) -> None:
    """100 5-grams, of which 90 and 89 are those of the second row: the question and a blank stand before each answer."""
    draw = random.Random(1)
    exact, below = ("".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=102)).replace(" ", "x") for _ in range(2))
    for text in (exact, below):
        whole = f"q {text}"
        assert len({whole[i : i + 5] for i in range(len(whole) - 4)}) == 100
    report, examples = read(jsonl(chat("q", exact), chat("q", exact[:-10]), chat("q", below), chat("q", below[:-11])))
    assert [(f["row"], f["code"], f["of_row"]) for f in report.flagged] == [(2, "near_duplicate", 1)]
    assert report.flagged[0]["texts"] == [f"q\n{exact}", f"q\n{exact[:-10]}"], "the original, then the copy"
    assert [e.row for e in examples] == [1, 3, 4]


def test_duplicates_keep_their_first_row_and_are_counted(jsonl: Callable[..., Path]) -> None:
    report, examples = read(jsonl(chat("hello  world", "x"), chat("other", "y"), chat(" hello\nworld ", "x"), chat("Hello world", "x")))
    assert [e.row for e in examples] == [1, 2]
    assert [w["message"] for w in report.warnings if "duplicates" in w["code"]] == [
        "1 row repeats an earlier one word for word and was left out", "1 row is nearly the same as an earlier row and was left out",
    ]  # fmt: skip
    assert report.stats["duplicates"] == {"exact": 1, "near": 1}  # case makes no exact copy: it can be what a row teaches
    assert [(f["row"], f["code"], f["of_row"]) for f in report.flagged] == [(3, "exact_duplicate", 1), (4, "near_duplicate", 1)]
    assert report.stats["dedup_removed"] == 2
    assert report.rows == report.examples + report.stats["dedup_removed"] + report.stats["bad_rows"]


def test_one_bad_row_refuses_the_file_unless_bad_rows_are_dropped(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    path = jsonl(*(chat(f"q{i}", "a") for i in range(150)), {"messages": []})
    refused = validate_file(path, filename="a.jsonl", output=tmp_path / "out.parquet")
    assert not refused.report.valid
    assert refused.report.error_counts == {"empty_messages": 1}
    assert not (tmp_path / "out.parquet").exists()
    kept = validate_file(path, filename="a.jsonl", output=tmp_path / "out.parquet", policies=Policies(bad_rows="drop"))
    assert (kept.report.valid, kept.num_rows) == (True, 150)
    assert "bad_rows_dropped" in {w["code"] for w in kept.report.warnings}


def test_too_few_examples_says_value_limit_and_next_step(jsonl: Callable[..., Path]) -> None:
    policies = Policies(min_examples=50)
    report = validate_file(jsonl(*(chat(f"q{i}", "a") for i in range(37))), filename="a.jsonl", policies=policies).report
    assert report.error_counts == {"too_few_examples": 1}
    assert "37" in report.errors[0].message
    assert "50" in report.errors[0].message
    assert "13" in report.errors[0].fix


@pytest.mark.parametrize(
    ("rows", "code"), [(1, "too_few_to_train"), (9, "too_few_to_train"), (10, "few_examples"), (99, "few_examples"), (100, None)]
)
def test_ten_examples_are_enough_to_train_and_fewer_than_a_hundred_are_warned_of(
    jsonl: Callable[..., Path], rows: int, code: str | None
) -> None:
    report = validate_file(jsonl(*(chat(f"question {i * 37}", f"answer {i * 91}") for i in range(rows))), filename="a.jsonl").report
    assert report.valid
    said = {w["code"]: w["message"] for w in report.warnings if w["code"] in ("too_few_to_train", "few_examples")}
    assert list(said) == ([code] if code else [])
    if code == "too_few_to_train":
        assert f"{rows} good example" in said[code]
        assert "at least 10" in said[code]


def test_more_examples_than_the_tier_allows_are_refused(jsonl: Callable[..., Path]) -> None:
    path = jsonl(*(chat(f"q{i}", "a") for i in range(5)))
    report = validate_file(path, filename="a.jsonl", policies=Policies(min_examples=1, max_examples=4)).report
    assert report.error_counts == {"too_many_examples": 1}


def test_the_report_says_what_it_read_and_ignored(jsonl: Callable[..., Path]) -> None:
    report, _ = read(jsonl(chat("a", "b", id=1), chat("c <|im_end|>", "d", id=2)), filename="rows.csv")
    assert report.format_reason == "read as chat: rows have 'messages'"
    codes = [w["code"] for w in report.warnings]
    assert codes[:4] == ["wrong_extension", "too_few_to_train", "unknown_field", "possible_control_token"]
    assert "'id'" in report.warnings[2]["message"]
    assert DatasetReport.from_dict(json.loads(json.dumps(asdict(report)))) == report
    assert "valid" in report.to_markdown()
    assert "data:image/svg+xml" in report.to_markdown()


PAIR = {"chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "ignored"),
    [
        pytest.param({"prompt": "q", "input": "more", **PAIR}, {"'input'"}, id="a prompt of a preference stands alone"),
        pytest.param({"instruction": "q", "input": "more", **PAIR}, set(), id="an instruction goes with its input"),
        pytest.param({"prompt": "q", "completion": "a", "input": "more", "history": [["x"]]}, {"'input'", "'history'"}, id="so does this"),
        pytest.param(
            {"input": {"messages": [{"role": "user", "content": "q"}]}, "prompt": None,
             "preferred_output": [{"role": "assistant", "content": "a"}], "non_preferred_output": [{"role": "assistant", "content": "b"}]},
            set(),
            id="OpenAI's preferences have their prompt in the input",
        ),
    ],
)  # fmt: skip
def test_fields_that_are_not_read_beside_a_prompt_are_named(row: dict[str, Any], ignored: set[str], jsonl: Callable[..., Path]) -> None:
    report, _ = read(jsonl(row))
    told = [w["message"] for w in report.warnings if w["code"] == "unknown_field"]
    assert {name for name in ("'input'", "'history'", "'instruction'") if any(name in message for message in told)} == ignored


def test_a_preference_whose_conversation_has_its_answer_already_says_so(jsonl: Callable[..., Path]) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    path = jsonl({"conversations": turns, "chosen": {"from": "gpt", "value": "x"}, "rejected": {"from": "gpt", "value": "y"}})
    (found,) = validate_file(path, filename="a.jsonl", policies=FEW).report.errors
    assert (found.path, found.code) == ("conversations", "missing_field")
    assert "ends with an answer" in found.message and "user's message" in found.fix


def test_control_tokens_of_the_base_model_are_refused_when_it_is_known(jsonl: Callable[..., Path], tiny_model: Path) -> None:
    path = jsonl(chat("a", "b"), chat("c", "d <|im_end|>"))
    report = validate_file(path, filename="a.jsonl", policies=FEW, model_dir=tiny_model).report
    assert [(e.row, e.code, e.path) for e in report.errors] == [(2, "control_token_in_content", "messages[1].content")]


@pytest.mark.parametrize("policy", ["reject", "truncate"])
def test_over_long_examples_are_counted_under_either_policy(jsonl: Callable[..., Path], tiny_model: Path, policy: Any) -> None:
    path = jsonl(chat("a", "b"), chat("c", "long " * 50), chat("e", "f"))
    policies = Policies(min_examples=1, over_long=policy)
    report = validate_file(path, filename="a.jsonl", policies=policies, model_dir=tiny_model, max_seq_len=100).report
    assert report.stats["over_long"] == 1
    assert report.valid == (policy == "truncate")
    assert [e.row for e in report.errors] == ([2] if policy == "reject" else [])
    assert report.stats["histogram"]["unit"] == "tokens"
    assert sum(report.stats["characters"]["histogram"]["counts"]) == report.examples


TEMPLATES = {
    "template_refused": "{{ raise_exception('no') }}",
    "template_unstable": "{% for m in messages %}{{ m.content if loop.last else m.role }}|{% endfor %}",
    "no_chat_template": None,
}


@pytest.mark.parametrize("code", TEMPLATES)
def test_a_row_that_the_template_cannot_take_is_a_bad_row(jsonl: Callable[..., Path], tiny_model: Path, tmp_path: Path, code: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tiny_model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATES[code]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    two_turns = {"messages": chat("a", "b")["messages"] + chat("c", "d")["messages"]}
    report = validate_file(jsonl(two_turns), filename="a.jsonl", policies=FEW, model_dir=tmp_path / "model", max_seq_len=100).report
    assert report.error_counts == {code: 1}


SHAPES: dict[str, tuple[dict[str, Any], Example]] = {
    "a completion of a prompt is an exchange": (
        {"prompt": "p", "completion": "c"},
        Example(kind="chat", messages=(Message(role="user", content="p"), Message(role="assistant", content="c"))),
    ),
    "assistant turns of a prompt carry no loss": (
        {"prompt": chat("a", "b")["messages"] + [{"role": "user", "content": "c"}], "completion": [{"role": "assistant", "content": "d"}]},
        Example(
            kind="chat",
            messages=(
                Message(role="user", content="a"),
                Message(role="assistant", content="b", weight=0),
                Message(role="user", content="c"),
                Message(role="assistant", content="d"),
            ),
        ),
    ),
    "a preference with texts": (
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        Example(
            kind="preference",
            messages=(Message(role="user", content="p"),),
            chosen=(Message(role="assistant", content="good"),),
            rejected=(Message(role="assistant", content="bad"),),
        ),
    ),
    "a preference in two outputs": (
        {
            "input": {"messages": [{"role": "user", "content": "p"}]},
            "preferred_output": [{"role": "assistant", "content": "good"}],
            "non_preferred_output": [{"role": "assistant", "content": "bad"}],
        },
        Example(
            kind="preference",
            messages=(Message(role="user", content="p"),),
            chosen=(Message(role="assistant", content="good"),),
            rejected=(Message(role="assistant", content="bad"),),
        ),
    ),
    "a preference of whole conversations": (
        {"chosen": chat("p", "good")["messages"], "rejected": chat("p", "bad")["messages"]},
        Example(
            kind="preference",
            messages=(Message(role="user", content="p"),),
            chosen=(Message(role="assistant", content="good"),),
            rejected=(Message(role="assistant", content="bad"),),
        ),
    ),
    "a text": ({"text": "once upon"}, Example(kind="text", text="once upon")),
    "text parts are joined, a developer is the system": (
        {
            "messages": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"},
            ]
        },
        Example(
            kind="chat",
            messages=(Message(role="system", content="s"), Message(role="user", content="ab"), Message(role="assistant", content="c")),
        ),
    ),
    "a tool call with arguments as text": (
        {
            "messages": [
                {"role": "user", "content": "w?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                {"role": "tool", "content": "ok", "tool_call_id": "1"},
                {"role": "assistant", "content": "done"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        Example(
            kind="chat",
            messages=(
                Message(role="user", content="w?"),
                Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": 1}, id="1"),)),
                Message(role="tool", content="ok", tool_call_id="1"),
                Message(role="assistant", content="done"),
            ),
            tools=({"type": "function", "function": {"name": "f"}},),
        ),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_each_row_shape_becomes_the_internal_form(jsonl: Callable[..., Path], case: str) -> None:
    row, expected = SHAPES[case]
    _, (example,) = read(jsonl(row))
    assert canonical(example) == canonical(expected)
    assert parse_canonical(canonical(example), row=1) == example


def test_nested_parquet_and_json_cells_read_like_jsonl(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    rows = [chat("a", "b"), chat("c", "d")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    cells = "".join('"{}"\n'.format(json.dumps(r["messages"]).replace('"', '""')) for r in rows)
    (tmp_path / "a.csv").write_text("messages\n" + cells)
    expected = read(jsonl(*rows))[0].dataset_id
    assert read(tmp_path / "a.parquet")[0].dataset_id == expected
    assert read(tmp_path / "a.csv")[0].dataset_id == expected


def test_a_column_map_names_unknown_columns_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,category\na,b\n")
    report = validate_file(tmp_path / "a.csv", filename="a.csv", column_map=parse_column_map("body=prompt,category=completion")).report
    assert report.error_counts == {"unknown_column": 1}
    assert "body" in report.errors[0].message
    assert "text, category" in report.errors[0].message


def test_identical_answers_are_no_preference(jsonl: Callable[..., Path]) -> None:
    report = validate_file(jsonl({"prompt": "p", "chosen": "x", "rejected": "x"}), filename="a.jsonl", policies=FEW).report
    assert report.error_counts == {"identical_preference": 1}


def test_split_keys_are_stored_for_the_split(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    validate_file(jsonl(chat("a", "b"), chat("c", "d")), filename="a.jsonl", policies=FEW, output=tmp_path / "o.parquet")
    stored = list(load_stored(tmp_path / "o.parquet"))
    assert [s.row for s in stored] == [1, 2]
    assert len({s.split_key for s in stored}) == 2


def test_banking77_reads_with_a_column_map(tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    column_map = parse_column_map("text=prompt,category=completion")
    result = validate_file(shared_file("banking77_train.csv"), filename="banking77_train.csv", column_map=column_map, output=output)
    assert result.report.valid
    assert result.report.rows == 10_003
    assert result.num_rows == 10_003 - result.report.stats["dedup_removed"]
    first = next(load_rows(output))
    assert (first.prompt[0].content, first.answer) == ("I am still waiting on my card?", "card_arrival")


def test_gsm8k_reads_with_a_column_map(tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    column_map = {"question": "prompt", "answer": "completion"}
    result = validate_file(shared_file("gsm8k_test.jsonl"), filename="gsm8k_test.jsonl", column_map=column_map, output=output)
    assert result.report.valid
    assert result.num_rows == 1319
    assert all(e.answer.rsplit("####", 1)[1].strip() for e in load_rows(output))


def test_hh_rlhf_is_refused_with_the_mapping_that_reads_it(tmp_path: Path) -> None:
    path = shared_file("hh_rlhf_harmless_test.jsonl.gz")
    refused = validate_file(path, filename="hh.jsonl.gz").report
    assert (refused.valid, max(refused.error_counts, key=lambda c: refused.error_counts[c])) == (False, "transcript_text")
    assert "--map chosen=chosen:transcript,rejected=rejected:transcript" in refused.errors[0].fix
    column_map = parse_column_map("chosen=chosen:transcript,rejected=rejected:transcript")
    policies = Policies(bad_rows="drop")
    read = validate_file(path, filename="hh.jsonl.gz", column_map=column_map, policies=policies, output=tmp_path / "o.parquet").report
    assert (read.valid, read.format) == (True, "preference")
    assert read.examples > 2000
    assert sum(read.error_counts.values()) < 200


@pytest.mark.parametrize("policy", ["drop", "reject"])
def test_a_message_of_3_mb_is_over_long_by_its_characters(jsonl: Callable[..., Path], tiny_model: Path, policy: Any) -> None:
    rows = [*(chat(f"q {i}", f"a {i}") for i in range(3)), chat("word" * 750_000, "a")]  # one word: the slowest kind of text
    policies = Policies(min_examples=1, over_long=policy, near_duplicates="off")
    began = time.process_time()
    report = validate_file(jsonl(*rows), filename="a.jsonl", policies=policies, model_dir=tiny_model, max_seq_len=100).report
    assert time.process_time() - began < 20
    assert report.stats["over_long"] == 1 and report.valid == (policy == "drop")
    if policy == "reject":
        (error,) = report.errors
        assert error.row == 4 and error.code == "example_too_long" and error.message.startswith("at least ")
