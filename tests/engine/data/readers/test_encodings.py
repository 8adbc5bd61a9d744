"""Text that is not UTF-8: recognised with the command that reads it, and read on request."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InvalidDataset, InvalidRequest
from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.readers.encodings import as_utf8, likely_encoding, not_utf8
from engine.data.report.validation_report import DatasetReport
from tests.engine.data.examples_of import chat

GERMAN = "Wie groß ist die Grundgebühr für „Köln“? Über 5 €"
LIKELY = [
    (GERMAN, "windows-1252", "windows-1252"),
    ("déjà créée à Montréal, l'été", "windows-1252", "windows-1252"),
    ("Grüße aus Köln, müde Bären überall", "mac-roman", "mac-roman"),
    ("Сколько стоит доставка", "windows-1251", "windows-1251"),
]


def read(path: Path, *, output: Path | None = None, **policies: Any) -> DatasetReport:
    asked = Policies.from_request(policies)
    return validate_file(path, filename=path.name, policies=asked, output=output).report


def german_rows(count: int) -> list[tuple[str, str]]:
    return [(f"Wie groß ist für Nr. {i} die Grundgebühr in {i * 37} Städten?", f"Sie beträgt {i} €, „ungefähr“.") for i in range(count)]


def write_csv(path: Path, rows: list[tuple[str, str]], encoding: str, *, header: str = "prompt;completion", start: str = "") -> Path:
    path.write_bytes((start + "".join(f"{a};{b}\r\n" for a, b in [tuple(header.split(";")), *rows])).encode(encoding))
    return path


@pytest.mark.parametrize(("text", "encoding", "likely"), LIKELY)
def test_the_likely_encoding_is_named_with_a_word_read_in_it(text: str, encoding: str, likely: str) -> None:
    raw = text.encode(encoding)
    assert likely_encoding(raw) == likely
    problem = not_utf8(raw)
    assert (problem.code, problem.options) == ("invalid_utf8", f"--encoding {likely}")
    word = next(w.strip("„“,?") for w in text.split() if not w.isascii())
    assert word[-3:] in problem.message


def test_a_text_that_is_half_utf8_has_no_likely_encoding() -> None:
    raw = "für ".encode() + "für".encode("windows-1252")
    assert likely_encoding(raw) is None
    assert "--encoding" not in not_utf8(raw).fix


def test_one_encoding_in_many_rows_is_one_entry_with_three_rows_and_the_command(tmp_path: Path) -> None:
    report = read(write_csv(tmp_path / "faq.csv", german_rows(1319), "windows-1252"))
    (problem,) = report.problems
    assert (problem.code, problem.count) == ("invalid_utf8", 1319)
    assert [e.row for e in problem.examples] == [1, 2, 3]
    assert problem.command == "ft check faq.csv --encoding windows-1252"
    assert "groß" in problem.message
    assert "surrogate" not in json.dumps(asdict(report))
    assert report.verdict == "not valid: 1,319 of 1,319 rows cannot be trained on: bytes that are not UTF-8"


@pytest.mark.parametrize("encoding", ["windows-1252", "iso-8859-15", "mac-roman", "utf-16"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_text_in_another_encoding_reads_as_the_same_rows(tmp_path: Path, encoding: str, name: str) -> None:
    rows = [(a.replace("„", "").replace("“", ""), b.replace("„", "").replace("“", "")) for a, b in german_rows(12)]
    spelled = [json.dumps({"prompt": a, "completion": b}, ensure_ascii=False) for a, b in rows]
    text = {"rows.csv": "prompt;completion\r\n" + "".join(f"{a};{b}\r\n" for a, b in rows), "rows.json": f"[{', '.join(spelled)}]"}
    content = text.get(name, "\n".join(spelled)).encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    report = read(path, output=tmp_path / "out.parquet", encoding=encoding, near_duplicates="off")
    assert (report.valid, report.errors) == (True, ())
    stored = [(e.messages[0].content, e.messages[1].content) for e in load_rows(tmp_path / "out.parquet")]
    assert stored == rows
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(spelled))
    assert read(plain, near_duplicates="off").dataset_id == report.dataset_id, "the content alone makes the id"


@pytest.mark.parametrize("name", ["latin1", "ISO-8859-1", "cp1252", "Windows-1252"])
def test_other_names_of_an_encoding_are_understood(name: str) -> None:
    assert Policies.from_request({"encoding": name}).encoding == "windows-1252"


@pytest.mark.parametrize("name", ["utf-7", "idna", "rot13", "nonsense", "a\0b", "", 7])
def test_an_encoding_that_is_not_read_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="windows-1252"):
        Policies.from_request({"encoding": name})


def test_a_header_that_is_not_utf8_names_the_command(tmp_path: Path) -> None:
    report = read(write_csv(tmp_path / "faq.csv", german_rows(12), "windows-1252", header="Straße;completion"))
    assert [(p.code, p.command) for p in report.problems] == [("invalid_utf8", "ft check faq.csv --encoding windows-1252")]
    assert "Straße" in report.problems[0].message


def test_utf16_is_refused_with_the_command_that_reads_it(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "excel.txt", german_rows(12), "utf-16")
    assert [p.command for p in read(path).problems] == ["ft check excel.txt --encoding utf-16"]
    assert read(path, encoding="utf-16").valid


def test_bytes_that_the_encoding_does_not_have_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,completion\na\x81,b\n")
    (problem,) = read(path, encoding="windows-1252").problems
    assert problem.code == "wrong_encoding"
    assert "19" in problem.message
    with pytest.raises(InvalidDataset, match="at 300 "):
        list(as_utf8([b"a" * 200, b"b" * 100 + b"\x81"], "windows-1252"))


def test_utf8_read_as_something_else_is_warned_of(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.csv", german_rows(12), "utf-8")
    assert "already_utf8" in {w["code"] for w in read(path, encoding="windows-1252").warnings}
    assert "already_utf8" not in {w["code"] for w in read(path).warnings}
    plain = write_csv(tmp_path / "plain.csv", [(f"question {i}", f"answer {i}") for i in range(12)], "utf-8")
    assert "already_utf8" not in {w["code"] for w in read(plain, encoding="windows-1252").warnings}


@pytest.mark.parametrize("every", [2, 12], ids=["half of it", "one row"])
def test_a_file_of_two_encodings_is_read_in_none_of_them(tmp_path: Path, every: int) -> None:
    path = tmp_path / "joined.csv"
    rows = (f"Gebühr {i};jährlich {i * 7} €\r\n".encode("windows-1252" if i % every == 0 else "utf-8") for i in range(12))
    path.write_bytes(b"prompt;completion\r\n" + b"".join(rows))
    report = read(path)
    (problem,) = report.problems
    assert (problem.code, problem.command) == ("invalid_utf8", None)
    assert "parts of it are, parts are not" in problem.fix and "--encoding" not in problem.fix
    assert all("--encoding" not in error.fix for error in report.errors)
    (warning,) = (w for w in read(path, encoding="windows-1252").warnings if w["code"] == "already_utf8")
    assert "parts of joined.csv read as UTF-8" in warning["message"]


def test_parquet_has_no_encoding_to_choose(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet", encoding="windows-1252").error_counts == {"wrong_encoding": 1}


@pytest.mark.parametrize("line", ["sep=;\r\n", "sep=;\n", '"sep=;"\r\n', "SEP=;\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1252", "utf-16"])
def test_the_line_that_tells_excel_the_separator_is_read(tmp_path: Path, line: str, encoding: str) -> None:
    rows = [(f"Gebühr, jährlich {i * 7}", f"ja, {i * 13} mal") for i in range(12)]
    path = write_csv(tmp_path / "faq.csv", rows, encoding, start=line)
    report = read(path, output=tmp_path / "out.parquet", encoding=encoding.removesuffix("-sig"))
    assert report.errors == ()
    assert [e.messages[0].content for e in load_rows(tmp_path / "out.parquet")] == [a for a, _ in rows]


def test_rows_below_the_separator_line_are_named_by_their_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    content = b'sep=|\nprompt|completion\na|b\nc|"d" e\n'
    path.write_bytes(content)
    (error,) = read(path).errors
    assert (error.row, error.byte_offset) == (2, content.index(b"c|"))
    assert "line 4" in error.message


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-8"])
def test_a_separator_beyond_ascii_is_a_header_without_the_columns(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "faq.csv"
    path.write_bytes(("sep=§\r\nprompt§completion\r\n" + "".join(f"wie {i}§so {i}\r\n" for i in range(12))).encode(encoding))
    assert not read(path).valid


def test_a_separator_inside_the_quotes_of_a_header_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('"Frage, kurz, klar";Antwort\n' + "".join(f"wie {i};so {i}\n" for i in range(12)))
    report = validate_file(path, filename="rows.csv", column_map={"Frage, kurz, klar": "prompt", "Antwort": "completion"}).report
    assert report.rows == 12
    assert report.errors == ()


WORKBOOKS = {
    "faq.xlsx": b"PK\x03\x04\x14\x00\x06\x00[Content_Types].xml" + bytes(40) + b"xl/workbook.xml" + bytes(40),
    "old.xls": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100),
    "faq.ods": b"PK\x03\x04\x14\x00\x00\x08\x00\x00" + bytes(20) + b"mimetypeapplication/vnd.oasis.opendocument.spreadsheet" + bytes(40),
}


@pytest.mark.parametrize("name", WORKBOOKS)
def test_a_workbook_is_refused_with_the_way_to_export_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WORKBOOKS[name])
    (problem,) = read(tmp_path / name).problems
    assert problem.code == "unsupported_container"
    assert "File > Save As" in problem.message
    assert f"`ft check {name.rsplit('.', 1)[0]}.csv`" in problem.message


def test_an_old_word_document_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter.DOC").write_bytes(WORKBOOKS["old.xls"])
    (problem,) = read(tmp_path / "letter.DOC").problems
    assert (problem.code, "letter.DOC is a Word document, no dataset" in problem.message) == ("binary_file", True)


@pytest.mark.parametrize(("name", "exported"), [("my book.xlsx", "'my book.csv'"), (".", "rows.csv")])
def test_the_exported_file_is_named_as_a_shell_takes_it(tmp_path: Path, name: str, exported: str) -> None:
    (tmp_path / "stored").write_bytes(WORKBOOKS["old.xls"])
    assert f"`ft check {exported}`" in validate_file(tmp_path / "stored", filename=name).report.verdict


def test_rows_beside_bytes_that_are_not_utf8_are_kept(jsonl: Callable[..., Path]) -> None:
    path = jsonl(chat("a", "b"), json.dumps(chat("für", "x"), ensure_ascii=False).encode("windows-1252"), chat("c", "d"))
    report = read(path, bad_rows="drop")
    assert (report.examples, report.error_counts) == (2, {"invalid_utf8": 1})
