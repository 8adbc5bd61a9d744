"""``ft check`` says of a file what the platform says of it after an upload: the same report, down to the dataset's id."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from control_plane.tenants.rules import Tenant, tier_named
from core.errors import InvalidRequest
from ft_client import FtClient
from ft_client.cli.command_tree import build

CLI = build()


def chats(count: int) -> list[dict[str, Any]]:
    said = (("user", "Question"), ("assistant", "Answer"))
    return [{"messages": [{"role": role, "content": f"{word} {i * 7919} of Köln"} for role, word in said]} for i in range(count)]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


PAIRS = [{"question": f"q {i * 7919}", "ground_truth": f"a {i * 104729}"} for i in range(30)]
CSV = "sep=;\r\nFrage;Antwort\r\n" + "".join(f"Für {i * 7919} Städte?;Ja, {i * 104729} €\r\n" for i in range(30))
MAP = {"Frage": "prompt", "Antwort": "completion"}
FILES: dict[str, tuple[str, bytes, dict[str, Any], bool]] = {
    "nothing": ("a.jsonl", b"", {}, False),
    "one row": ("a.jsonl", lines(*chats(1)), {}, True),
    "9 rows": ("a.jsonl", lines(*chats(9)), {}, True),
    "10 rows": ("a.jsonl", lines(*chats(10)), {}, True),
    "50 rows": ("a.jsonl", lines(*chats(50)), {}, True),
    "99 rows": ("a.jsonl", lines(*chats(99)), {}, True),
    "120 rows": ("a.jsonl", lines(*chats(120)), {}, True),
    "120 rows, compressed": ("a.jsonl.gz", gzip.compress(lines(*chats(120))), {}, True),
    "the same row 50 times": ("a.jsonl", lines(*chats(1) * 50), {}, True),
    "a bad row among 50": ("a.jsonl", lines(*chats(50), {"messages": 3}), {}, False),
    "a bad row that is dropped": ("a.jsonl", lines(*chats(50), {"messages": 3}), {"policies": {"bad_rows": "drop"}}, True),
    "bad rows alone, dropped": ("a.jsonl", lines({"messages": 3}), {"policies": {"bad_rows": "drop"}}, False),
    "question and ground truth": ("a.jsonl", lines(*PAIRS), {}, False),
    "question and ground truth, mapped": (
        "a.jsonl", lines(*PAIRS), {"column_map": {"question": "prompt", "ground_truth": "completion"}}, True,
    ),
    "Windows-1252": ("faq.csv", CSV.encode("windows-1252"), {"column_map": MAP}, False),
    "Windows-1252, named": ("faq.csv", CSV.encode("windows-1252"), {"column_map": MAP, "encoding": "windows-1252"}, True),
    "UTF-16, named": ("faq.csv", CSV.encode("utf-16"), {"column_map": MAP, "encoding": "utf-16"}, True),
    "rows under a key": ("a.json", json.dumps({"train": chats(30), "test": chats(2)}).encode(), {}, False),
    "rows under a key, named": ("a.json", json.dumps({"train": chats(30), "test": chats(2)}).encode(), {"rows_at": "train"}, True),
    "a workbook": ("faq.xlsx", b"PK\x03\x04[Content_Types].xml xl/workbook.xml" + bytes(99), {}, False),
    "personal data, refused": (
        "a.jsonl", lines(*chats(20), *[{"prompt": "jane.doe@example.com", "completion": "x"}]), {"policies": {"pii": "reject"}}, False,
    ),
}  # fmt: skip


def checked(path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Exit code and report of ``ft check`` for a file whose use is open, as that of an upload is."""
    options = [f"--policy={name}={value}" for name, value in asked.get("policies", {}).items()]
    options += [f"--{name.replace('_', '-')}={asked[name]}" for name in ("encoding", "rows_at") if name in asked]
    if "column_map" in asked:
        options.append("--map=" + ",".join(f"{theirs}={ours}" for theirs, ours in asked["column_map"].items()))
    monkeypatch.chdir(path.parent)
    done = CliRunner().invoke(CLI, ["check", path.name, "--json", "--as-validation", *options])
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("case", FILES)
def test_a_check_gives_the_report_of_an_upload(
    case: str, ft: FtClient, tenant: Tenant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content, asked, valid = FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    code, offline = checked(path, asked, monkeypatch)
    made = ft.files.create(path, **asked)
    if made["status"] == "uploaded":
        made = ft.files.wait(made["id"])
    online = dict(ft.datasets.report(made["id"]))
    assert online["policies"].pop("max_examples") == tier_named(tenant.tier).max_examples
    assert offline["policies"].pop("max_examples") is None, "what a tier allows, only the platform knows"
    assert offline.pop("platform")["not_compared"][0] == "the limits of your tier"
    assert online == offline
    assert list(online) == list(offline), "the verdict comes first from either"
    assert (code, made["status"], offline["valid"]) == ((0, "processed", True) if valid else (1, "error", False))


def test_reading_options_reach_a_file_through_parts_too(ft: FtClient, tmp_path: Path) -> None:
    (tmp_path / "faq.csv").write_bytes(CSV.encode("windows-1252"))
    made = ft.uploads.send(tmp_path / "faq.csv", column_map=MAP, encoding="windows-1252")["file"]
    whole = ft.files.create(tmp_path / "faq.csv", column_map=MAP, encoding="windows-1252")
    assert made is not None
    assert made["dataset_id"] == whole["dataset_id"] is not None
    assert made["policies"] == whole["policies"] == {"encoding": "windows-1252"}
    (tmp_path / "data.json").write_text(json.dumps({"train": chats(30)}))
    keyed = ft.uploads.send(tmp_path / "data.json", rows_at="train")["file"]
    assert keyed is not None
    assert keyed["status"] == "processed"


@pytest.mark.parametrize(
    "send", [lambda ft, path, **asked: ft.files.create(path, **asked), lambda ft, path, **asked: ft.uploads.send(path, **asked)]
)
def test_an_encoding_that_is_not_read_is_refused_before_a_byte_is(ft: FtClient, tmp_path: Path, send: Callable[..., Any]) -> None:
    (tmp_path / "faq.csv").write_bytes(CSV.encode("windows-1252"))
    with pytest.raises(InvalidRequest, match="windows-1252") as refused:
        send(ft, tmp_path / "faq.csv", encoding="klingon")
    assert (refused.value.code, refused.value.param) == ("invalid_policy", "policies.encoding")
