"""Keys of tools, arguments and schemas keep their order from the file to the pack; only hashes of equal content ignore it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.packs.build import PackSettings, build_pack
from engine.data.report.validation_report import DatasetReport
from engine.data.row_preview import preview
from engine.data.schema import Example, Message, ToolCall, canonical, parse_canonical
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.evals.suites.model_requests import Generate, digest
from tests.engine.data.examples_of import shared_case
from tests.support.models.tiny_model import build_tiny_model

TEMPLATE = Path(__file__).parent / "tokens" / "templates" / "qwen2_5.jinja"
KEPT = Policies(exact_duplicates="warn", near_duplicates="off")
SCHEMA = {"type": "object", "properties": {"reason": {"type": "string"}, "grade": {"type": "integer"}}, "required": ["reason", "grade"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, with a template that renders tools."""
    return build_tiny_model(tmp_path_factory.mktemp("tools"), template=TEMPLATE.read_text())


def turned(value: Any) -> Any:
    """Return `value` with the keys of every object in reverse."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


def graded(number: int = 0, *, change: Callable[[Any], Any] = lambda value: value, text: bool = False) -> dict[str, Any]:
    arguments = change({"reason": f"clear, number {number}", "grade": number, "by": {"zoe": 1, "adam": 2}})
    call = {"id": "a", "type": "function", "function": {"name": "grade", "arguments": json.dumps(arguments) if text else arguments}}
    return {
        "messages": [{"role": "user", "content": f"Essay {number}"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": change({"name": "grade", "description": "d", "parameters": SCHEMA})}],
        "response_format": {"type": "json_schema", "json_schema": change({"name": "grade", "schema": SCHEMA})},
    }


def read(path: Path) -> tuple[DatasetReport, list[Example]]:
    output = path.with_name(f"{path.name}.rows")
    report = validate_file(path, filename=path.name, output=output, policies=KEPT).report
    assert report.valid, report.summary()
    return report, list(load_rows(output))


def rendered(examples: list[Example], model: Path) -> list[str]:
    return [shown.text for shown in preview(examples, ChatTokenizer.load(model), max_seq_len=4096, num_examples=len(examples))]


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("change", [lambda value: value, turned], ids=["as written", "reversed"])
def test_stored_rows_keep_the_key_order_of_the_file(text: bool, change: Callable[[Any], Any], jsonl: Callable[..., Path]) -> None:
    row = graded(change=change, text=text)
    (example,) = read(jsonl(row))[1]
    arguments = row["messages"][1]["tool_calls"][0]["function"]["arguments"]
    arguments = json.loads(arguments) if text else arguments
    assert json.dumps(example.messages[1].tool_calls[0].arguments) == json.dumps(arguments)
    assert json.dumps(example.tools) == json.dumps(row["tools"])
    assert json.dumps(example.response_format) == json.dumps(row["response_format"])


def test_templates_get_calls_in_the_order_of_requests() -> None:
    """Some write a whole call as JSON, and a model would learn another order than it is later shown."""
    call = ToolCall(name="weather", arguments={"reason": "asked", "city": "Lima"}, id="c1")
    assert json.dumps(call.as_template()) == (
        '{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"reason": "asked", "city": "Lima"}}}'
    )


def test_parquet_structs_keep_the_order_of_their_fields(tmp_path: Path) -> None:
    rows = [{**graded(i), "response_format": json.dumps(graded(i)["response_format"])} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for example, row in zip(read(tmp_path / "a.parquet")[1], rows, strict=True):
        called = row["messages"][1]["tool_calls"][0]["function"]
        assert json.dumps(example.messages[1].tool_calls[0].arguments) == json.dumps(called["arguments"])
        assert json.dumps(example.tools) == json.dumps(row["tools"])


def test_packs_and_previews_render_the_order_of_the_row(tmp_path: Path, jsonl: Callable[..., Path], model: Path) -> None:
    rows = [graded(i) for i in range(3)]
    path = jsonl(*rows)
    report, examples = read(path)
    wanted = [json.dumps(row["messages"][1]["tool_calls"][0]["function"]["arguments"]) for row in rows]
    texts = rendered(examples, model)
    assert all(arguments in text and json.dumps(rows[0]["tools"][0]) in text for arguments, text in zip(wanted, texts, strict=True))
    assert report.dataset_id is not None
    tokenizer = ChatTokenizer.load(model)
    build_pack(path.with_name(f"{path.name}.rows"), tokenizer, PackSettings(), tmp_path / "pack", dataset_id=report.dataset_id)
    windows = pq.read_table(tmp_path / "pack" / "shard-00000.parquet")["input_ids"].to_pylist()
    packed = "".join(tokenizer.decode(ids) for ids in windows)
    assert all(packed.count(text) == 1 for text in texts)


def test_files_that_differ_in_key_order_are_two_datasets(jsonl: Callable[..., Path]) -> None:
    ids = [read(jsonl(graded(change=change), name=name))[0].dataset_id for name, change in (("a", turned), ("b", lambda v: v))]
    assert None not in ids
    assert ids[0] != ids[1]


def test_of_rows_that_differ_in_key_order_only_the_first_is_kept(jsonl: Callable[..., Path]) -> None:
    path = jsonl(graded(), graded(change=turned))
    output = path.with_name("out.parquet")
    report = validate_file(path, filename=path.name, output=output, policies=Policies()).report
    (kept,) = load_rows(output)
    assert (kept.row, list(kept.messages[1].tool_calls[0].arguments)) == (1, ["reason", "grade", "by"])
    assert [(f["row"], f["of_row"], f["code"]) for f in report.flagged] == [(2, 1, "exact_duplicate")]


def test_rows_without_objects_of_their_own_keep_the_canonical_form_of_earlier_versions() -> None:
    every = Message(role="assistant", content="c", name="n", reasoning="r", tool_call_id="i", weight=0)
    called = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"a": 1, "b": 2}, id="x"),))
    preference = Example(kind="preference", messages=(every, called), chosen=(every,), rejected=(called,))
    whole = Example(
        kind="kto", messages=(every,), text="t", label=True, tools=({"name": "f"},), template_kwargs={"a": 1}, response_format={"b": 1}
    )
    earlier = msgspec.json.Encoder(order="sorted")
    for example in (preference, whole):
        assert canonical(example) == earlier.encode(example)


def test_rows_stored_by_earlier_versions_are_read(jsonl: Callable[..., Path]) -> None:
    (example,) = read(jsonl(graded()))[1]
    stored = msgspec.json.Encoder(order="sorted").encode(example)
    assert stored != canonical(example)
    assert parse_canonical(stored, row=1) == example


def test_cached_answers_are_not_shared_by_requests_that_differ_in_key_order() -> None:
    one = Generate(id="a", messages=({"role": "user", "content": "x"},), tools=(graded()["tools"][0],), max_new_tokens=1)
    other = Generate(id="a", messages=one.messages, tools=(turned(one.tools[0]),), max_new_tokens=1)
    assert digest("s", [one], protocol=1) != digest("s", [other], protocol=1)
    assert digest("s", [one], protocol=1) == digest("s", [one], protocol=1)


def test_a_file_with_the_reason_first_trains_the_reason_first(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "reason.jsonl"
    path.write_bytes(shared_case("02b_reason_first.jsonl").read_bytes())
    (text,) = rendered(read(path)[1], model)
    assert '"properties": {"reason": {"type": "string"}, "grade": {"type": "integer"}}' in text
    assert '"arguments": {"reason": "clear and short", "grade": 2}' in text
