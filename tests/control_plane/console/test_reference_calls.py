"""The reference's calls with OpenAI's client and ``ft`` exist, take what they are given, and belong to operations of the API."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.main import get_command

from control_plane.console.pages.reference_page import Operation, _by_tag
from control_plane.console.reference_calls import BODIES, FT, OPENAI
from ft_client.cli.command_tree import build
from tests.control_plane.api import openai_calls

DOCUMENT = Path(__file__).resolve().parents[1] / "api/openapi.json"
MADE_OF_OTHERS = {
    "files.retrieve_content", "files.wait_for_processing", "uploads.upload_file_chunked", "chat.completions.parse",
    "chat.completions.stream", "responses.parse", "responses.stream",
}  # fmt: skip
"""Methods of the client that make requests of other methods."""
DEPRECATED = {"fine_tuning.checkpoints.permissions.retrieve"}


@pytest.fixture(scope="module")
def operations() -> dict[str, Operation]:
    found = _by_tag(json.loads(DOCUMENT.read_text()), "http://127.0.0.1:8000")
    return {one.key: one for group in found.values() for one in group}


def test_every_example_belongs_to_an_operation(operations: dict[str, Operation]) -> None:
    assert [key for key in (*OPENAI, *FT, *BODIES) if key not in operations] == []


def test_every_call_of_openais_client_that_the_documentation_lists_has_an_example() -> None:
    listed = {call: route for call, route in openai_calls.documented().items() if route and call not in MADE_OF_OTHERS | DEPRECATED}
    shown = {call.method: key for key, call in OPENAI.items()}
    assert shown.keys() == listed.keys()
    assert [call for call, (method, path) in listed.items() if _shape(f"{method} {path}") != _shape(shown[call])] == []


def _shape(route: str) -> str:
    return re.sub(r"\{\w+\}", "{}", route)


@pytest.mark.parametrize("key", OPENAI)
def test_openais_client_takes_what_the_example_passes(operations: dict[str, Operation], key: str) -> None:
    method: Any = openai.OpenAI(api_key="none")
    for name in OPENAI[key].method.split("."):
        method = getattr(method, name)
    known = inspect.signature(method).parameters.keys()
    fields = operations[key].fields
    own = {one.name for one in fields if one.place in ("query", "body")} - known
    assert own == set(OPENAI[key].own), "the others are passed by name"
    paths = [one.name for one in fields if one.place == "path"]
    assert len(paths) < 2 or set(paths) <= known, "several are passed by name, one alone by its place"


@pytest.mark.parametrize("line", sorted(set(FT.values())))
def test_a_command_exists_with_its_arguments_and_options(ft: Any, line: str) -> None:
    words, command = line.split()[1:], ft
    while hasattr(command, "get_command") and words:
        command = command.get_command(None, words.pop(0))
        assert command is not None, line
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = {name: one for one in command.params if one not in arguments for name in (*one.opts, *one.secondary_opts)}
    given = [word for word in words if word.startswith("--")]
    assert set(given) <= options.keys(), line
    num_values = len(words) - len(given) - sum(not options[name].is_flag for name in given)
    assert num_values >= sum(one.required for one in arguments), line
    assert num_values <= len(arguments) or any(one.nargs == -1 for one in arguments), line


@pytest.fixture(scope="module")
def ft() -> Any:
    return get_command(build())


def test_a_command_names_the_parameters_of_its_path(operations: dict[str, Operation]) -> None:
    wrong = {key: line for key, line in FT.items() if not set(re.findall(r"\{(\w+)\}", line)) <= set(re.findall(r"\{(\w+)\}", key))}
    assert wrong == {}
    assert operations
