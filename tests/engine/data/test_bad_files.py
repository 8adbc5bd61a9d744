"""A table of bad files and bad rows, each with its code and place; arbitrary bytes never crash anything."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.data.checks import all_codes
from engine.data.ingest import Policies, validate_file
from tests.engine.data.bad_files import FEW, GOOD, LINES, tar_of, validate, zip_of, zstd_of
from tests.engine.data.examples_of import chat
from tests.engine.data.test_bombs import BOMBS

BAD_FILES: dict[str, tuple[bytes, str, str]] = {
    "no bytes": (b"", "rows.jsonl", "empty_file"),
    "white space only": (b"\n \n\t\n", "rows.jsonl", "empty_file"),
    "an empty array": (b"[ ]", "rows.json", "empty_file"),
    "a CSV with a header only": (b"prompt,completion\n", "rows.csv", "empty_file"),
    "a PNG named jsonl": (b"\x89PNG\r\n\x1a\n" + bytes(64), "rows.jsonl", "binary_file"),
    "a PDF": (b"%PDF-1.7\n" + bytes(200), "rows.csv", "binary_file"),
    "a pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "rows.jsonl", "binary_file"),
    "noise": (bytes(range(1, 32)) * 50, "rows.jsonl", "binary_file"),
    "bzip2": (bz2.compress(LINES), "rows.jsonl.bz2", "unsupported_container"),
    "xz": (lzma.compress(LINES), "rows.jsonl.xz", "unsupported_container"),
    "a tar archive": (tar_of(LINES), "rows.tar", "unsupported_container"),
    "a tar archive within gzip": (gzip.compress(tar_of(LINES)), "rows.tar.gz", "unsupported_container"),
    "a zip bomb": (zip_of(b"x" * 10_000_000), "rows.zip", "unsupported_container"),
    "a zip archive": (b"PK\x03\x04" + bytes(100), "rows.zip", "unsupported_container"),
    "gzip within gzip": (gzip.compress(gzip.compress(LINES)), "rows.jsonl.gz", "unsupported_container"),
    "gzip cut short": (gzip.compress(LINES * 500)[:-40], "rows.jsonl.gz", "truncated_container"),
    "gzip with a damaged checksum": (gzip.compress(LINES)[:-8] + bytes(8), "rows.jsonl.gz", "truncated_container"),
    "zstd cut short": (zstandard.compress(LINES * 500)[:-5], "rows.jsonl.zst", "truncated_container"),
    "zstd noise": (b"\x28\xb5\x2f\xfd" + bytes(range(60)), "rows.jsonl.zst", "truncated_container"),
    "Parquet cut short": (b"PAR1" + bytes(200), "rows.parquet", "truncated_container"),
    "UTF-16 with a mark": (LINES.decode().encode("utf-16"), "rows.jsonl", "unsupported_encoding"),
    "UTF-16 with a mark, the other way round": (b"\xfe\xff" + LINES.decode().encode("utf-16-be"), "rows.jsonl", "unsupported_encoding"),
    "UTF-16 within gzip": (gzip.compress(LINES.decode().encode("utf-16")), "rows.jsonl.gz", "unsupported_encoding"),
    "UTF-32 with a mark": (LINES.decode().encode("utf-32"), "rows.jsonl", "unsupported_encoding"),
    "a mark and nothing else": (b"\xef\xbb\xbf", "rows.jsonl", "empty_file"),
    "gzip of nothing": (gzip.compress(b""), "rows.jsonl.gz", "empty_file"),
    "a bomb of 300 MB in 30 KB": (zstd_of(LINES, *[b" " * 1_000_000] * 300), "rows.jsonl.zst", "file_too_large"),
    "UTF-16 without a mark": (LINES.decode().encode("utf-16-le"), "rows.jsonl", "unsupported_encoding"),
    "prose": (b"Dear diary\ntoday nothing happened\n", "notes.txt", "unknown_format"),
    "one object over many lines": (json.dumps(chat("a", "b"), indent=2).encode(), "rows.json", "unknown_format"),
    "a CSV with a repeated column": (b"text,text\na,b\n", "rows.csv", "invalid_csv"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    content, name, code = BAD_FILES[case]
    report = validate(tmp_path, content, name=name).report
    assert not report.valid
    assert report.dataset_id is None
    of_file = [e for e in report.errors if e.row is None]
    assert [e.code for e in of_file] == [code]
    assert of_file[0].message
    assert of_file[0].fix


BAD_ROWS: dict[str, tuple[bytes | Any, str, str]] = {
    "invalid UTF-8": (GOOD.replace(b"hello", b"h\xff\xfelo"), "invalid_utf8", ""),
    "a NUL byte": (GOOD.replace(b"hello", b"h\0lo"), "nul_character", ""),
    "an escaped NUL": (GOOD.replace(b"hello", b"h\\u0000lo"), "nul_character", "messages[1].content"),
    "half of a surrogate pair": (GOOD.replace(b"hello", b"h\\ud83dlo"), "lone_surrogate", "messages[1].content"),
    "JSON cut short": (GOOD[:-10], "truncated_json", ""),
    "JSON with a trailing comma": (GOOD[:-1] + b",}", "invalid_json", ""),
    "a key that stands twice": (GOOD[:-1] + b', "messages": []}', "duplicate_key", "messages"),
    "a key with a NUL that stands twice": (b'{"\\u0000":1,"\\u0000":2}', "duplicate_key", "\\u0000"),
    "a key of half a surrogate pair that stands twice": (b'{"\\ud800":1,"\\ud800":2}', "duplicate_key", "\\ud800"),
    "NaN": (GOOD[:-1] + b', "score": NaN}', "non_finite_number", ""),
    "Infinity in disguise": (GOOD[:-1] + b', "score": 1e999}', "non_finite_number", ""),
    "a number of 5,000 digits": (GOOD[:-1] + b', "score": ' + b"9" * 5000 + b"}", "invalid_json", ""),
    "nesting of 70": (GOOD[:-1] + b', "x": ' + b"[" * 70 + b"]" * 70 + b"}", "too_deep", ""),
    "nesting of 100,000": (b"[" * 100_000, "too_deep", ""),
    "a line over 16 MiB": (chat("a", "x" * (16 * 1024 * 1024)), "line_too_long", ""),
    "a number": (b"42", "not_an_object", ""),
    "an array": (b"[1, 2]", "not_an_object", ""),
    "an unknown shape": ({"x": "a", "y": "b"}, "unknown_row_shape", ""),
    "another format": ({"text": "abc"}, "mixed_formats", ""),
    "messages that are text": ({"messages": "hi"}, "wrong_type", "messages"),
    "no messages": ({"messages": []}, "empty_messages", "messages"),
    "a message that is text": ({"messages": ["hi"]}, "wrong_type", "messages[0]"),
    "an unknown role": ({"messages": [{"role": "bot", "content": "x"}]}, "invalid_role", "messages[0].role"),
    "no role": ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
    "content that is a number": ({"messages": [{"role": "user", "content": 5}]}, "wrong_type", "messages[0].content"),
    "no content": ({"messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "unsupported_content",
        "messages[0].content[0]",
    ),
    "a weight of 0.5": ({"messages": [{"role": "user", "content": "x", "weight": 0.5}]}, "invalid_weight", "messages[0].weight"),
    "a tool call without a name": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "invalid_tool_call",
        "messages[1].tool_calls[0]",
    ),
    "arguments that are no object": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "invalid_tool_call",
        "messages[0].tool_calls[0]",
    ),
    "a late system message": (
        {"messages": [*chat("a", "b")["messages"], {"role": "system", "content": "x"}, *chat("c", "d")["messages"]]},
        "system_not_first",
        "messages[2].role",
    ),
    "an assistant that starts": ({"messages": [{"role": "assistant", "content": "x"}]}, "no_user_before_assistant", "messages[0].role"),
    "a tool message from nowhere": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]},
        "unexpected_tool_message",
        "messages[1].role",
    ),
    "a last word of the user": (
        {"messages": [*chat("a", "b")["messages"], {"role": "user", "content": "c"}]},
        "last_not_assistant",
        "messages[2].role",
    ),
    "an empty answer": (chat("a", "  "), "empty_content", "messages[1].content"),
    "no message to train on": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
        "nothing_to_train",
        "messages",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_reported_with_its_place_and_the_rows_around_it_survive(tmp_path: Path, case: str) -> None:
    row, code, path = BAD_ROWS[case]
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    content = GOOD + b"\n" + raw + b"\n" + json.dumps(chat("later", "row")).encode()
    result = validate(tmp_path, content)
    assert not result.report.valid
    assert result.num_rows == 2
    errors = result.report.errors
    assert {"row": 2, "byte_offset": len(GOOD) + 1, "path": path, "code": code} in [
        {k: getattr(e, k) for k in ("row", "byte_offset", "path", "code")} for e in errors
    ]
    assert all(e.row == 2 and e.message and e.fix for e in errors)
    dropped = validate(tmp_path, content, policies=Policies(min_examples=1, bad_rows="drop"))
    assert dropped.report.valid
    assert dropped.report.error_counts == result.report.error_counts


def test_every_bad_row_is_reported_and_at_most_1000_are_stored(tmp_path: Path) -> None:
    rows = [chat("q", "") if i % 2 else {"messages": [{"role": "bot", "content": "x"}]} for i in range(2400)]
    report = validate(tmp_path, b"\n".join(json.dumps(r).encode() for r in rows)).report
    assert report.stats["bad_rows"] == 2400
    assert report.error_counts["empty_content"] == report.error_counts["invalid_role"] == 1200
    assert len(report.errors) == 1000
    assert [e.row for e in report.errors] == sorted(e.row for e in report.errors)


def test_all_problems_of_a_row_are_reported(tmp_path: Path) -> None:
    row = {"messages": [{"role": "bot", "content": 1, "weight": 7}, "x"]}
    report = validate(tmp_path, json.dumps(row).encode()).report
    assert set(report.error_counts) == {"invalid_role", "wrong_type", "invalid_weight"}
    assert report.error_counts["wrong_type"] == 2


CSV_CASES = {
    "too few fields": (b"only one", "column_count"),
    "too many fields": (b"a,b,c", "column_count"),
    "a quote in the middle": (b'"a"b,c', "invalid_csv"),
    "bytes that are not UTF-8": (b"caf\xe9,b", "invalid_utf8"),
    "an empty cell": (b"a,", "unknown_row_shape"),
}


@pytest.mark.parametrize("case", CSV_CASES)
def test_a_bad_csv_record_is_reported_with_its_place(tmp_path: Path, case: str) -> None:
    record, code = CSV_CASES[case]
    start = b'prompt,completion\n"q, with\na line break",a\n'
    result = validate(tmp_path, start + record + b"\nq2,a2\n", name="rows.csv")
    assert [(e.row, e.byte_offset, e.code) for e in result.report.errors] == [(2, len(start), code)]
    assert result.num_rows == 2


def test_array_elements_are_reported_alone(tmp_path: Path) -> None:
    content = b"[\n " + GOOD + b",\n {'single': 1},\n " + json.dumps(chat("x]}", 'y"[')).encode() + b"\n]"
    report = validate(tmp_path, content, name="rows.json").report
    assert [(e.row, e.code, e.byte_offset) for e in report.errors] == [(2, "invalid_json", content.index(b"{'single"))]
    assert report.examples == 2


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"[" + GOOD + b",", "truncated_json"), (b"[" + GOOD, "truncated_json"), (b"[" + GOOD + b"] tail", "invalid_json")],
)
def test_an_array_that_does_not_end_well_is_reported(tmp_path: Path, content: bytes, code: str) -> None:
    assert code in validate(tmp_path, content, name="rows.json").report.error_counts


def test_a_mark_and_a_wrong_name_are_warned_of_and_no_more(tmp_path: Path) -> None:
    report = validate(tmp_path, b"\xef\xbb\xbf" + LINES, name="rows.csv").report
    assert report.valid
    assert {"bom_skipped", "wrong_extension"} <= {w["code"] for w in report.warnings}


ELSEWHERE = {
    "invalid_label": "test_shapes.py",
    "invalid_response_format": "test_shapes.py",
    "invalid_template_kwargs": "test_reasoning_templates.py",
    "too_few_examples": "test_ingest.py",
    "wrong_encoding": "test_encodings.py",
    "rows_in_object": "test_json_object.py",
    "too_many_examples": "test_ingest.py",
    "identical_preference": "test_ingest.py",
    "too_many_messages": "test_shapes.py",
    "more_problems": "test_shapes.py",
    "near_duplicate": "test_pipeline.py",
    "contaminated": "test_pipeline.py",
    "toxic": "test_pipeline.py",
    "personal_data": "test_pipeline.py",
    "unknown_column": "test_readers_mapping.py",
    "transcript_text": "test_readers_mapping.py",
    "control_token_in_content": "test_ingest.py",
    "example_too_long": "test_packs.py",
    "template_refused": "test_ingest.py",
    "invalid_reasoning": "test_reasoning.py",
    "reasoning_not_rendered": "test_reasoning.py",
    "tools_not_rendered": "test_tool_probe.py",
    "answer_not_rendered": "test_tool_probe.py",
    "template_unstable": "test_ingest.py",
    "no_chat_template": "test_ingest.py",
}
"""Codes that need more than a file, and the test that makes them."""


def test_every_code_of_a_report_has_a_test() -> None:
    seen = {code for _, _, code in BAD_FILES.values()} | {code for _, code, _ in BAD_ROWS.values()} | {c for _, c in CSV_CASES.values()}
    seen |= {code for _, _, code in BOMBS.values()}
    assert seen <= set(all_codes())
    assert set(all_codes()) == seen | set(ELSEWHERE), "a code without a test"
    for code, name in ELSEWHERE.items():
        assert code in next(Path(__file__).parent.rglob(name)).read_text(), f"{name} does not speak of {code}"


NASTY = st.one_of(
    st.binary(max_size=400),
    st.lists(
        st.sampled_from([GOOD, b"{", b"}", b"[", b"]", b'"', b"\\", b",", b"\n", b"\0", b"\xff", b"a,b\n", b"\xef\xbb\xbf", b"\\ud800"]),
        max_size=20,
    ).map(b"".join),
    st.builds(
        lambda head, tail: head + tail,
        st.sampled_from([b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"]),
        st.binary(max_size=200),
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "role",
                        "content",
                        "prompt",
                        "completion",
                        "chosen",
                        "rejected",
                        "text",
                        "tools",
                        "tool_calls",
                        "function",
                        "weight",
                        "input",
                        "preferred_output",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=NASTY, name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a"]))
def test_arbitrary_bytes_never_crash_and_always_give_a_report(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / "upload"
    path.write_bytes(content)
    report = validate_file(path, filename=name, policies=FEW, output=tmp_path / "rows.parquet").report
    assert report.valid == (not report.error_counts)
    assert set(report.error_counts) <= set(all_codes())
    json.dumps(asdict(report), allow_nan=False).encode()
