"""Rows as pandas, Arrow, Excel, ShareGPT and other APIs write them mean what their writers meant, or are named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.data.conversation import read_conversation
from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.readers.free_form import allows_null, without_nulls
from engine.data.readers.parquet_rows import parquet_rows
from engine.data.report.validation_report import DatasetReport
from engine.data.schema import Example
from tests.engine.data.examples_of import chat, shared_case

KEPT = Policies(exact_duplicates="warn", near_duplicates="off")
MOVE = {"type": "object", "properties": {"room": {"type": "string", "enum": ["a", "b"]}}, "required": ["room"]}
WATER = {"type": "object", "properties": {"plant": {"type": "string"}, "ml": {"type": "integer"}}, "required": ["plant", "ml"]}


def check(path: Path, **policies: Any) -> tuple[DatasetReport, list[Example]]:
    output = path.with_name(f"{path.name}.rows")
    policy = Policies(**{**KEPT.options, **policies})
    report = validate_file(path, filename=path.name, output=output, policies=policy).report
    return report, list(load_rows(output)) if report.valid else []


def read(path: Path) -> list[Example]:
    report, examples = check(path)
    assert report.valid, report.summary()
    return examples


def codes(report: DatasetReport) -> list[str]:
    return [warning["code"] for warning in report.warnings if warning["code"] not in ("few_examples", "tools_not_checked")]


def called(name: str, arguments: dict[str, Any], parameters: dict[str, Any], number: int = 0) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": f"Do {number}."}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
    }


def both_calls(count: int = 12) -> list[dict[str, Any]]:
    """Return rows of two tools whose arguments have different keys."""
    made = [called("move", {"room": "a"}, MOVE, i) if i % 2 else called("water", {"plant": "ivy", "ml": i}, WATER, i) for i in range(count)]
    assert len({json.dumps(row["tools"]) for row in made}) == 2
    return made


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(value) for name, value in row.items()}


# nulls


def test_nulls_that_arrow_fills_in_are_not_trained(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    rows = both_calls()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    filled = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert filled[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["room"] is None, "Arrow fills nothing in any more"
    assert read(tmp_path / "a.parquet") == read(jsonl(*rows))


def test_nulls_that_pandas_fills_in_are_dropped_in_tools_and_warned_about_in_arguments(tmp_path: Path) -> None:
    rows = both_calls()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, pq.read_table(tmp_path / "a.parquet").to_pylist())))
    report, examples = check(path)
    assert "null" in path.read_text()
    assert [e.tools for e in examples] == [tuple(row["tools"]) for row in rows]
    assert [e.messages[1].tool_calls[0].arguments["room"] for e in examples][:2] == [None, "a"]
    assert codes(report) == ["null_argument"]
    assert "12 rows (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)" in next(w["message"] for w in report.warnings if w["code"] == "null_argument")


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "a key that another tool has": ({"name": "f", "description": None, "strict": None}, {"name": "f"}),
    "a default that the schema allows": (NULLABLE, NULLABLE),
    "a default that the schema does not allow": ({"type": "integer", "default": None}, {"type": "integer"}),
    "a constant": ({"const": None}, {"const": None}),
    "null among the values": ({"enum": ["a", None]}, {"enum": ["a", None]}),
    "null inside a value": ({"type": "object", "default": {"a": None}}, {"type": "object", "default": {"a": None}}),
    "parameters named like keywords": (
        {"properties": {"default": None, "const": {"type": "string", "title": None}}},
        {"properties": {"const": {"type": "string"}}},
    ),
    "a null type beside alternatives": (
        {"type": None, "anyOf": [{"type": "string", "items": None}, {"type": "null"}], "default": None},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    ),
    "a reference": ({"$ref": "#/$defs/a", "default": None}, {"$ref": "#/$defs/a"}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_nulls_that_a_schema_means_stay(name: str, jsonl: Callable[..., Path]) -> None:
    given, kept = SCHEMAS[name]
    assert without_nulls(given) == kept
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": None, "schema": {"type": "object", "properties": {"x": given}}}}
    (example,) = read(jsonl({**chat("q", "a"), "response_format": form}))
    assert example.response_format["json_schema"] == {"name": "n", "schema": {"type": "object", "properties": {"x": kept}}}


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({}, True),
        (True, True),
        (False, False),
        ({"type": ["string", "null"]}, True),
        ({"type": "string", "nullable": True}, True),
        ({"type": "string"}, False),
        ({"enum": ["a"]}, False),
        ({"oneOf": [{"type": "string"}, {"enum": [None]}]}, True),
        ({"allOf": [{"type": "string"}]}, False),
        ({"const": 1}, False),
    ],
)
def test_a_schema_allows_null_by_its_own_keywords(schema: Any, allowed: bool) -> None:
    assert allows_null(schema) is allowed


def test_null_arguments_that_the_schema_allows_stay_without_a_warning(jsonl: Callable[..., Path]) -> None:
    schema = {"type": "object", "properties": {"until": {"type": ["string", "null"]}}}
    report, (example,) = check(jsonl(called("book", {"until": None}, schema)))
    assert example.messages[1].tool_calls[0].arguments == {"until": None}
    assert codes(report) == ["too_few_to_train"]


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    column = pa.array([[("x", {"a": 1}), ("y", None)]], kind)
    pq.write_table(
        pa.table([pa.array(["p"]), pa.array(["c"]), column], names=["prompt", "completion", "chat_template_kwargs"]), tmp_path / "m"
    )
    report, _ = check(tmp_path / "m")
    assert [(e.code, e.path) for e in report.errors] == [("invalid_template_kwargs", "chat_template_kwargs.x")]


def test_null_under_a_key_of_a_map_stays_and_of_a_struct_is_absent(tmp_path: Path) -> None:
    """A map has the keys that were written, a struct those of every row."""
    given = [{"a": "x", "b": None}]
    for kind, found in (
        (pa.map_(pa.string(), pa.string()), given[0]),
        (pa.struct([("a", pa.string()), ("b", pa.string())]), {"a": "x"}),
    ):
        column = pa.array([list(given[0].items())] if pa.types.is_map(kind) else given, kind)
        pq.write_table(pa.table([column], names=["arguments"]), tmp_path / "rows")
        assert [row.value for row in parquet_rows(tmp_path / "rows", max_bytes=1 << 20)[1]] == [{"arguments": found}]


# JSON as text


def test_json_in_texts_is_read_alike_in_every_container(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    rows = both_calls()
    texts = [as_text(row) for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(texts))
    pd.DataFrame(texts).to_csv(tmp_path / "a.csv", index=False)
    ids = {
        check(path)[0].dataset_id
        for path in (jsonl(*rows), jsonl(*texts, name="texts"), *map(tmp_path.joinpath, ("a.parquet", "a.json", "a.csv")))
    }
    assert len(ids) == 1
    assert None not in ids


def test_tool_calls_inside_messages_may_be_text(jsonl: Callable[..., Path]) -> None:
    rows = both_calls()
    for row in rows:
        row["messages"][0]["tool_calls"], row["messages"][1]["tool_calls"] = "[]", json.dumps(row["messages"][1]["tool_calls"])
    assert read(jsonl(*rows)) == read(jsonl(*both_calls(), name="plain"))


CALLER: dict[str, Any] = {"role": "assistant", "content": None}
BAD_TEXTS: dict[str, dict[str, Any]] = {
    "tools": {**chat("q", "a"), "tools": '[{"type": '},
    "tools[1]": {**chat("q", "a"), "tools": ["{}", '{"type": ']},
    "messages": {"messages": '[{"role": '},
    "conversations": {"conversations": '[{"from": '},
    "history": {"instruction": "q", "output": "a", "history": '[["q", '},
    "input": {"input": '{"messages": ', "preferred_output": "a", "non_preferred_output": "b"},
    "messages[1].tool_calls": {"messages": [{"role": "user", "content": "q"}, {**CALLER, "tool_calls": '[{"function": '}]},
}


@pytest.mark.parametrize("field", BAD_TEXTS)
def test_invalid_json_text_is_refused_with_its_field(field: str, jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl(BAD_TEXTS[field]))
    assert [(e.code, e.path) for e in report.errors] == [("truncated_json", field)]
    assert report.errors[0].message.startswith(f"the text in {field!r}: ")
    assert report.errors[0].fix == f"write {field} as JSON, or leave it out"


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"text": "t"}, ["history", "tools"]),
        ({"prompt": "q", "completion": "a"}, ["history"]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ["conversations", "messages"]),
        (chat("q", "a"), ["conversations", "prompt"]),
    ],
)
def test_invalid_json_text_in_an_unread_column_is_kept(row: dict[str, Any], unread: list[str], jsonl: Callable[..., Path]) -> None:
    report, (example,) = check(jsonl({**row, **dict.fromkeys(unread, "[no json")}))
    assert example == read(jsonl(row, name="alone"))[0]
    told = [w["message"].partition(" is read by nothing")[0].strip("'") for w in report.warnings if w["code"] == "unknown_field"]
    assert sorted(told) == unread


def test_tools_may_be_a_list_of_texts(jsonl: Callable[..., Path]) -> None:
    rows = both_calls()
    texts = [{**row, "tools": [json.dumps(tool) for tool in row["tools"]]} for row in rows]
    assert read(jsonl(*texts)) == read(jsonl(*rows, name="plain"))


@pytest.mark.parametrize("answer", ['{"role": "admin"}', json.dumps({"role": "user", "content": "x"}), "[INST] is a mark", '["a", "b"]'])
def test_answers_that_look_like_json_stay_text(answer: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"[{i}] Which?", "chosen": answer, "rejected": f"no {i}"} for i in range(12)]
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    assert {e.chosen[0].content for e in read(tmp_path / "a.csv")} == {answer}


def test_an_alpaca_input_that_is_json_stays_text(tmp_path: Path) -> None:
    pd.DataFrame([{"instruction": "Sum up", "input": '{"a": 1}', "output": "one"}]).to_csv(tmp_path / "a.csv", index=False)
    assert read(tmp_path / "a.csv")[0].messages[0].content == 'Sum up\n\n{"a": 1}'


ASKED, SAID, OTHER = ([{"role": role, "content": said}] for role, said in (("user", "x"), ("assistant", "y"), ("assistant", "z")))


def test_prompts_are_messages_in_text_beside_answers_that_are(jsonl: Callable[..., Path]) -> None:
    pair = {"prompt": json.dumps(ASKED), "chosen": json.dumps(SAID), "rejected": json.dumps(OTHER), "completion": None}
    report, (example,) = check(jsonl(pair))
    assert [m.content for m in (*example.messages, *example.chosen, *example.rejected)] == ["x", "y", "z"]
    assert "messages_as_text" not in codes(report)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": TWO[0]}]}
    (called,) = read(jsonl({"prompt": json.dumps(ASKED), "completion": json.dumps([call]), "chosen": None}, name="call"))
    assert called.messages[-1].tool_calls[0].name == "water"


def test_answers_are_messages_in_text_beside_a_prompt_of_text(jsonl: Callable[..., Path]) -> None:
    (example,) = read(jsonl({"prompt": "x", "chosen": json.dumps(SAID), "rejected": json.dumps(OTHER)}))
    assert [m.content for m in (*example.messages, *example.chosen, *example.rejected)] == ["x", "y", "z"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": json.dumps(ASKED), "completion": "y"},
        {"prompt": "x", "completion": json.dumps(SAID)},
        {"prompt": json.dumps(ASKED), "completion": "y", "label": True},
        {"prompt": "x", "chosen": json.dumps(SAID), "rejected": "z"},
        {"input": {"messages": ASKED}, "preferred_output": "y", "non_preferred_output": json.dumps(OTHER)},
    ],
)
def test_messages_in_text_beside_a_text_stay_text_with_a_warning(row: dict[str, Any], jsonl: Callable[..., Path]) -> None:
    report, (example, _) = check(jsonl(row, row))
    said = next(text for text in row.values() if isinstance(text, str) and text.startswith("["))
    assert said in [m.content for m in example.all_messages()]
    (told,) = [w["message"] for w in report.warnings if w["code"] == "messages_as_text"]
    assert told.startswith("2 rows (1, 2) train JSON with messages as plain text")


# ShareGPT, other APIs


def sharegpt(value: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "Water?"}, {"from": "function_call", "value": value}]}


TWO = [{"name": "water", "arguments": {"plant": "fern"}}, {"name": "water", "arguments": '{"plant": "ivy"}'}]


@pytest.mark.parametrize("value", [json.dumps(TWO), TWO, json.dumps([{"type": "function", "function": f} for f in TWO])])
def test_a_list_of_calls_in_one_turn_is_parallel_calls(value: Any, jsonl: Callable[..., Path]) -> None:
    (example,) = read(jsonl(sharegpt(value)))
    assert [c.arguments for c in example.messages[1].tool_calls] == [{"plant": "fern"}, {"plant": "ivy"}]


def test_bare_functions_become_the_tools_that_requests_send(jsonl: Callable[..., Path]) -> None:
    function = {"name": "water", "parameters": WATER}
    kept = {"type": "web_search"}
    row = {**chat("q", "a"), "tools": [function, {"type": "function", **function, "strict": True}, kept, {"type": "custom", "name": "x"}]}
    (example,) = read(jsonl(row))
    wrapped = {"type": "function", "function": function}
    strict = {"type": "function", "function": {**function, "strict": True}}
    assert example.tools == (wrapped, strict, kept, {"type": "custom", "name": "x"})
    assert read_conversation(row["messages"], tools=row["tools"]).tools == example.tools


def test_a_call_after_thinking_has_reasoning(jsonl: Callable[..., Path]) -> None:
    (example,) = read(jsonl(sharegpt(f"<think>\nIt is dry.\n</think>\n\n{json.dumps(TWO[0])}")))
    assert (example.messages[1].reasoning, len(example.messages[1].tool_calls)) == ("It is dry.", 1)


def test_reasoning_that_differs_from_the_thinking_before_a_call_is_refused(jsonl: Callable[..., Path]) -> None:
    thought = f"<think>\nIt is dry.\n</think>\n\n{json.dumps(TWO[0])}"

    def rows(reasoning: str) -> list[dict[str, Any]]:
        turn = {"from": "function_call", "value": thought, "reasoning": reasoning}
        older = {"role": "assistant", "content": None, "function_call": thought, "reasoning_content": reasoning}
        asked = {"role": "user", "content": "Water?"}
        return [{"conversations": [{"from": "human", "value": "Water?"}, turn]}, {"messages": [asked, older]}]

    report, _ = check(jsonl(*rows("It is wet.")))
    assert [(e.code, e.path) for e in report.errors] == [
        ("invalid_reasoning", "conversations[1]"), ("invalid_reasoning", "messages[1]")
    ]  # fmt: skip
    assert report.errors[1].message == "reasoning_content and the <think> before its call differ"
    assert {e.messages[1].reasoning for e in read(jsonl(*rows("It is dry."), name="alike"))} == {"It is dry."}


@pytest.mark.parametrize("value", ["[]", "<think>x", "<think>x</think>", '[{"name": "f"}]', "call water"])
def test_a_turn_without_a_call_in_it_is_refused(value: str, jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl(sharegpt(value)))
    assert {e.code for e in report.errors} == {"invalid_tool_call"}


def test_older_function_calls_as_text_and_names_of_sharegpt_are_read(jsonl: Callable[..., Path]) -> None:
    message = {"role": "assistant", "content": None, "function_call": json.dumps(TWO[0])}
    (example,) = read(jsonl({"messages": [{"role": "user", "content": "q"}, message]}))
    assert example.messages[1].tool_calls[0].arguments == {"plant": "fern"}
    (named,) = read(jsonl({"conversations": [{"from": "human", "name": "Ann", "value": "q"}, {"from": "gpt", "value": "a"}]}, name="b"))
    assert named.messages[0].name == "Ann"


def test_reasoning_is_read_under_each_of_its_names_in_every_format(jsonl: Callable[..., Path]) -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        answer = {"role": "assistant", "content": "a", name: "because"}
        asked = {"role": "user", "content": "q"}
        rows = [
            {"messages": [asked, answer]},
            {"prompt": [asked], "completion": [answer]},
            {"prompt": [asked], "chosen": [answer], "rejected": [{"role": "assistant", "content": "b"}]},
            {"prompt": [asked], "completion": [answer], "label": True},
        ]
        for number, row in enumerate(rows):
            report, (example,) = check(jsonl(row, name=f"{name}-{number}"))
            assert [m.reasoning for m in example.all_messages() if m.content == "a"] == ["because"]
            assert codes(report) == ["too_few_to_train", "reasoning_not_checked"]


def test_text_parts_of_the_responses_api_are_text_and_their_annotations_are_named(jsonl: Callable[..., Path]) -> None:
    def row(annotations: list[Any]) -> dict[str, Any]:
        said = [{"type": "output_text", "text": "Fine, ", "annotations": annotations}, {"type": "output_text", "text": "fern."}]
        return {
            "messages": [{"role": "user", "content": [{"type": "input_text", "text": "Well?"}]}, {"role": "assistant", "content": said}]
        }

    report, (example,) = check(jsonl(row([])))
    assert [m.content for m in example.messages] == ["Well?", "Fine, fern."]
    assert codes(report) == ["too_few_to_train"]
    report, _ = check(jsonl(row([{"url": "x"}]), name="b"))
    assert "'messages[].content[].annotations' is read by nothing (1 rows)" in [w["message"] for w in report.warnings]


# fields, labels, weights, marks


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "a", "train": False}]}, ["completion[].train"]),
        ({"prompt": [{"role": "user", "content": "q", "loss": 1}], "completion": "a", "label": True}, ["prompt[].loss"]),
        ({"prompt": "q", "chosen": {"role": "assistant", "content": "a", "score": 1}, "rejected": "b"}, ["chosen[].score"]),
        (
            {
                "input": {"messages": [{"role": "user", "content": "q", "x": 1}], "metadata": {"a": 1}},
                "preferred_output": [{"role": "assistant", "content": "a", "y": 1}],
                "non_preferred_output": [{"role": "assistant", "content": "b"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            ["input.messages[].x", "input.metadata", "preferred_output[].y", "tools"],
        ),
        ({**chat("q", "a"), "conversations": [{"from": "human", "value": "b"}], "metadata": {"a": None}}, ["conversations", "metadata"]),
        ({"instruction": "q", "output": "a", "completion": "other"}, ["completion"]),
        ({"prompt": "q", "completion": "a", "label": True, "system": "s"}, []),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "index": 0, "extra_content": {"x": 1}, "function": {"name": "f", "arguments": "{}", "z": 1}}]}]},
            ["messages[].tool_calls[].extra_content", "messages[].tool_calls[].function.z"],
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": json.dumps([
                {"id": "a", "extra_content": {"x": 1}, "function": {"name": "f", "arguments": "{}", "z": 1}}])}]},
            ["messages[].tool_calls[].extra_content", "messages[].tool_calls[].function.z"],
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None,
                "function_call": json.dumps({"name": "f", "arguments": {}, "z": 1})}]},
            ["messages[].function_call.z"],
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call",
                "value": f"<think>x</think>{json.dumps([{'name': 'f', 'arguments': {}, 'z': 1}])}"}]},
            ["conversations[].value[].z"],
        ),
        ({**chat("q", "a"), "prompt": "q", "completion": None}, ["prompt"]),
        (
            {"messages": [{"role": "user", "content": "q", "x": 1}, {"role": "assistant", "content": "a"}], "prompt": ASKED},
            ["messages[].x", "prompt"],
        ),
    ],
)  # fmt: skip
def test_every_field_that_is_not_used_is_named(row: dict[str, Any], named: list[str], jsonl: Callable[..., Path]) -> None:
    report, examples = check(jsonl(row))
    assert len(examples) == 1
    told = [w["message"].partition(" is read by nothing")[0].strip("'") for w in report.warnings if w["code"] == "unknown_field"]
    assert sorted(told) == named


@pytest.mark.parametrize(
    ("good", "bad"),
    [(True, False), ("TRUE", "FALSE"), ("yes", "No"), (1, 0), (1.0, 0.0), ("1", "0"), ("Desirable", "undesirable"), ("good", "bad"),
     ("WAHR", "FALSCH"), ("VRAI", "FAUX"), ("thumbs-up", "thumbs down")],
)  # fmt: skip
def test_labels_are_understood_in_every_spelling(good: Any, bad: Any, jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"a {i}", "label": good if i % 2 else bad} for i in range(12)]
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame(rows).to_csv(tmp_path / "excel.csv", index=False, sep=";", encoding="utf-8-sig")
    for path in (jsonl(*rows), tmp_path / "a.csv", tmp_path / "excel.csv"):
        assert [(e.kind, e.label) for e in read(path)] == [("kto", bool(i % 2)) for i in range(12)]


def test_labels_that_judge_nothing_are_an_error_of_their_own(jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl(*[{"prompt": "q", "completion": f"a {i}", "label": label} for i, label in enumerate(("billing", 2, [], -1))]))
    assert report.format == "kto"
    assert report.error_counts == {"invalid_label": 4}


def test_flags_of_a_csv_file_are_read_in_every_case(tmp_path: Path) -> None:
    messages = json.dumps(chat("q", "a")["messages"])
    for on, off in (("TRUE", "FALSE"), ("Yes", "no"), ("1", "0")):
        rows = [{"messages": messages, "parallel_tool_calls": on, "enable_thinking": off}]
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        assert read(tmp_path / "a.csv")[0].template_kwargs == {"enable_thinking": False}


def test_a_text_for_a_switch_of_the_template_is_refused(jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl({**chat("q", "a"), "chat_template_kwargs": {"enable_thinking": "False"}}))
    assert [(e.code, e.path) for e in report.errors] == [("invalid_template_kwargs", "chat_template_kwargs.enable_thinking")]


@pytest.mark.parametrize(
    "row", [chat("q", "a"), {"prompt": "q", "completion": "a"}, {"text": "t"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
)
def test_rows_of_weight_0_are_left_out_and_counted(row: dict[str, Any], jsonl: Callable[..., Path]) -> None:
    weights = [1, 0, 1.0, 0.0, "0", None, "", " "]
    report, examples = check(jsonl(*[{**row, "weight": weight} for weight in weights]))
    assert [e.row for e in examples] == [1, 3, 6, 7, 8]
    assert (report.rows, report.examples) == (8, 5)
    assert "3 rows (2, 4, 5) with weight 0 were left out" in [w["message"] for w in report.warnings]


@pytest.mark.parametrize("weight", [2.5, 0.5, -1, True, "much", [1]])
def test_other_weights_of_rows_are_refused(weight: Any, jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl({**chat("q", "a"), "weight": weight}))
    assert [(e.code, e.path) for e in report.errors] == [("invalid_weight", "weight")]


def test_a_file_whose_rows_all_have_weight_0_says_so(jsonl: Callable[..., Path]) -> None:
    report, _ = check(jsonl({**chat("q", "a"), "weight": 0}))
    assert "0 good examples, and 1 row (1) with weight 0" in report.verdict


def test_byte_order_marks_of_joined_files_are_skipped_and_named(tmp_path: Path) -> None:
    lines = [json.dumps(chat(f"q {i}", f"a {i}")).encode() for i in range(12)]
    marked = [b"\xef\xbb\xbf" + line if i in (0, 4, 7) else line for i, line in enumerate(lines)]
    (tmp_path / "plain.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "joined.jsonl").write_bytes(b"\n".join(marked))
    report, _ = check(tmp_path / "joined.jsonl")
    assert report.dataset_id == check(tmp_path / "plain.jsonl")[0].dataset_id
    told = [w["message"] for w in report.warnings if w["code"] == "bom_skipped"]
    assert told == [
        "a UTF-8 byte order mark at the start was skipped",
        "byte order marks at the start of lines 5, 8 skipped; the file was probably joined",
    ]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_headers_inside_a_csv_file_are_refused(mark: str, tmp_path: Path) -> None:
    rows = io.StringIO()
    pd.DataFrame([{"prompt": f"q {i}", "completion": f"a {i}"} for i in range(12)]).to_csv(rows, index=False)
    (tmp_path / "a.csv").write_text(mark + rows.getvalue() + mark + rows.getvalue(), encoding="utf-8")
    report, _ = check(tmp_path / "a.csv", bad_rows="drop")
    assert (report.error_counts, report.examples) == ({"invalid_csv": 1}, 24)


# files of other tools beside the repository


@pytest.mark.parametrize(
    ("name", "fmt", "rows", "warned"),
    [
        ("03_null_filled.parquet", "chat", 16, []),
        ("03b_to_json_nulls.jsonl", "chat", 16, ["null_argument"]),
        ("04_json_text.parquet", "chat", 16, []),
        ("04_tool_calls_text.jsonl", "chat", 16, []),
        ("06a_sharegpt_parallel_list.jsonl", "chat", 24, []),
        ("06c_sharegpt_call_with_thought.jsonl", "chat", 24, ["reasoning_not_checked"]),
        ("09b_reasoning_preference.jsonl", "preference", 24, ["reasoning_not_checked"]),
        ("09c_unknown_in_prompt_completion.jsonl", "prompt_completion", 24, ["unknown_field", "reasoning_not_checked"]),
        ("15a_kto_excel.csv", "kto", 24, ["bom_skipped"]),
        ("15b_kto_01.jsonl", "kto", 24, []),
        ("15e_csv_flags.csv", "chat", 16, []),
        ("16a_two_boms.jsonl", "chat", 24, ["bom_skipped", "bom_skipped"]),
        ("21b_missing_result.jsonl", "chat", 24, ["missing_tool_result", "orphaned_tool_result"]),
        ("22_responses_parts.jsonl", "chat", 24, []),
    ],
)
def test_files_of_other_tools_are_read(name: str, fmt: str, rows: int, warned: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(shared_case(name).read_bytes())
    report, examples = check(path)
    assert (report.valid, report.format, len(examples), codes(report)) == (True, fmt, rows, warned), report.summary()
    assert b"null" not in path.with_name(f"{name}.rows").read_bytes() or name.startswith("03b")
    if name.startswith("06a"):
        assert all(len(e.messages[1].tool_calls) == 2 for e in examples)
    if name.startswith("15") and fmt == "kto":
        assert [e.label for e in examples] == [False, True] * 12


def test_a_file_with_weights_of_rows_names_those_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(shared_case("08_sample_weight.jsonl").read_bytes())
    report, _ = check(path)
    assert report.error_counts == {"invalid_weight": 12}
    assert codes(report) == ["rows_of_weight_0"]
