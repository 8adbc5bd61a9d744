"""Messages of the API name its routes; ``ft`` shows the command instead, for every route that a message names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from core.errors import NotFound
from core.telemetry.logs import PACKAGES
from ft_client.cli.command_tree import build
from ft_client.cli.model_commands import verdict
from ft_client.cli.output import fields, number, say, show_error
from ft_client.cli.remedies import COMMANDS, ROUTE, in_commands
from tests.ft_client.cli.conftest import ROOT

WITHOUT_A_COMMAND = {
    "GET /v1/fine_tuning/model_limits": "of hyperparameters with their bounds: docs/hyperparameters.md and docs/methods.md have the tables",
    "GET /v1/uploads/ID": "of the parts of an upload: `ft upload` takes their ids from the API and announces the size that the file has",
}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module but its docstrings; what is filled in reads ``ID``."""
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    parts |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "ID" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def messages() -> Iterator[tuple[str, str]]:
    """Texts that name a route, with their file; descriptions of the API's document are for its readers."""
    files = [p for root in PACKAGES for p in (ROOT / root).rglob("*.py")]
    for path in files:
        relative = path.relative_to(ROOT).as_posix()
        for_readers_of_the_api = relative.startswith(("control_plane/api/openapi", "control_plane/console/reference_calls")) or (
            path.name.startswith("schemas")
        )
        if for_readers_of_the_api or relative.startswith(("control_plane/cli/", "ft_client/")):
            continue
        source = path.read_text()
        if not any(f"{method} " in source for method in ("GET", "POST", "DELETE")):
            continue
        for text in texts(ast.parse(source)):
            if ROUTE.search(text):
                yield relative, text


def test_every_route_that_a_message_names_has_a_command() -> None:
    found = list(messages())
    assert {path for path, _ in found} >= {"control_plane/jobs/service.py", "engine/adapters/promotion_rules.py"}, (
        "the search finds nothing"
    )
    left = {f"{m['method']} {m['path']}" for _, text in found for m in ROUTE.finditer(in_commands(text))}
    assert left == set(WITHOUT_A_COMMAND)


def test_every_command_of_the_table_is_there() -> None:
    root: Any = typer.main.get_command(build())
    for command in COMMANDS.values():
        group = root
        for word in command.split()[1:]:
            if not hasattr(group, "commands"):
                break
            group = group.commands[word]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no job 'x'; list yours with GET /v1/fine_tuning/jobs", "no job 'x'; list yours with `ft jobs`"),
        ("approve it with POST /v1/adapters/adp-1/approve.", "approve it with `ft adapters approve adp-1`."),
        ("change the role with POST /v1/members/{id}", "change the role with `ft members update ID`"),
        ("ask again (GET /v1/files/file-1/events shows when)", "ask again (`ft files show file-1` shows when)"),
        ("one of yours (`GET /v1/models`)", "one of yours (`ft models`)"),
        ("GET /v1/uploads/up-1 lists its parts", "GET /v1/uploads/up-1 lists its parts"),
        ("files go through POST /v1/files or /v1/uploads", "files go through `ft upload FILE` or /v1/uploads"),
    ],
)
def test_a_route_reads_as_a_command(text: str, shown: str) -> None:
    assert in_commands(text) == shown


def test_errors_sentences_and_fields_show_commands_and_json_keeps_routes(capsys: pytest.CaptureFixture[str]) -> None:
    error = NotFound("no file 'x'; list yours with GET /v1/files", code="file_not_found", param="file_id")
    show_error(error, as_json=True)
    say("read GET /v1/datasets/ds_1/report")
    fields({"error": "see GET /v1/datasets/ds_1/report", "loss": 0.123456789})
    done = capsys.readouterr()
    assert done.err == "ft: no file 'x'; list yours with `ft files` [file_not_found, file_id]\nread `ft datasets show ds_1`\n"
    assert "\"no file 'x'; list yours with GET /v1/files\"" in done.out
    assert "see `ft datasets show ds_1`" in done.out and "0.1235\n" in done.out


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.123456789, "0.1235"), (2e-05, "2e-05"), (12345.678, "12,346"), (3.0, "3"), (1234.5678, "1235"), (9999.6, "10,000"), (0.0, "0")],
)
def test_a_number_has_four_digits_that_count(value: float, shown: str) -> None:
    assert number(value) == shown


def lineage(*holds: bool | None) -> dict[str, Any]:
    names = ("files", "base model", "dataset")
    return {"adapters": [{"links": [{"link": name, "holds": held} for name, held in zip(names, holds, strict=False)]}] if holds else []}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lineage(True, True, True), "VERIFIED: 3 of 3 links hold"),
        (lineage(True, None, True), "VERIFIED: 2 of 3 links hold; not readable: base model"),
        (lineage(False, None, True), "BROKEN at files: 1 of 3 links hold; not readable: base model"),
        (lineage(None, None, None), "NOT VERIFIED: 0 of 3 links hold; not readable: files, base model, dataset"),
        (lineage(), "NOTHING TO VERIFY"),
    ],
)
def test_a_verification_ends_with_a_verdict(found: dict[str, Any], said: str) -> None:
    assert verdict(found).startswith(said)
