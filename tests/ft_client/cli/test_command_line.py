"""What is true of every command: the version, where ``--json`` may stand, groups named alone, mistyped options, what is imported."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ft_client import FtClient, cli
from ft_client.cli.command_tree import MODULES, build
from ft_client.cli.commands import imported as imported_function
from ft_client.cli.output import print_manifests
from tests.ft_client.cli import json_paths
from tests.ft_client.cli.conftest import ROOT, Ft

HEAVY = ("torch", "transformers", "dagster", "pandas", "pyarrow", "numpy", "sqlalchemy", "fastapi", "starlette", "boto3", "mlflow",
    "alembic", "tokenizers", "huggingface_hub", "yaml", "rich", "pygments", "click", "jinja2", "numba")  # fmt: skip


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below `group` with the words that call it."""
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def groups(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in group.commands:
        if hasattr(command := group.commands[name], "commands"):
            yield (*path, name), command
            yield from groups(command, (*path, name))


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(build(), ["--version"])
    assert (done.exit_code, done.output) == (0, f"ft {version('ft-platform')}\n")


def test_the_table_of_modules_names_every_command_that_they_register() -> None:
    for module, names in MODULES.items():
        apart = typer.Typer()
        import_module(module).register(apart)
        registered = [c.name or typer.main.get_command_name(c.callback.__name__) for c in apart.registered_commands if c.callback]
        assert [*registered, *(g.name for g in apart.registered_groups)] == list(names), module


def test_a_table_passes_options_that_its_function_takes() -> None:
    with FtClient(base_url="http://127.0.0.1:9", api_key="x") as client:
        seen = 0
        for name, command in leaves(typer.main.get_command(build())):
            call = inspect.unwrap(command.callback)
            if isinstance(function := getattr(call, "function", None), str):
                is_of_client = not function.startswith(("control_plane.", "resources."))
                found, first = (attrgetter(function)(client), ()) if is_of_client else (imported_function(function), (None,))
                inspect.signature(found).bind(*first, **dict.fromkeys(call.passes))
                assert set(call.passes) <= set(inspect.signature(found).parameters) | documented_options(found), name
                seen += 1
    assert seen > 60


def documented_options(method: Callable[..., Any]) -> set[str]:
    """Options that a method of the client passes on in the body, as its docstring lists them."""
    return set(re.findall(r"`(\w+)`", (inspect.getdoc(method) or "").partition("Options:")[2]))


def test_json_may_stand_before_the_command_its_group_or_after() -> None:
    for args in (
        ["--json", "webhooks", "types"],
        ["webhooks", "--json", "types"],
        ["webhooks", "types", "--json"],
        ["--json", "--url", "http://127.0.0.1:9", "webhooks", "types"],
        ["--url", "http://127.0.0.1:9", "--json", "webhooks", "types"],
    ):
        assert "fine_tuning.job.succeeded" in json.loads(CliRunner().invoke(build(), args).stdout), args
    assert CliRunner().invoke(build(), ["webhooks", "types"]).stdout.startswith("TYPE"), "without it, a table"


def test_json_before_the_command_holds_for_errors_and_for_a_group_named_alone(offline: Ft) -> None:
    done = offline("--json", "--url", "http://127.0.0.1:9", "datasets")
    assert (done.code, done.json["error"]["code"]) == (4, "unreachable")


def test_manifests_as_json_are_a_list_that_kubectl_takes(capsys: pytest.CaptureFixture[str]) -> None:
    print_manifests("# why\nkind: Service\nmetadata: {name: a}\n---\nkind: Pod\n", as_json=True)
    listed = {"apiVersion": "v1", "kind": "List", "items": [{"kind": "Service", "metadata": {"name": "a"}}, {"kind": "Pod"}]}
    assert json.loads(capsys.readouterr().out) == listed


def test_every_command_takes_json_and_writes_it_on_every_path() -> None:
    found = dict(leaves(typer.main.get_command(build())))
    assert len(found) > 100
    assert [name for name, command in found.items() if not any("--json" in p.opts for p in command.params)] == []
    files = {file for command in found.values() if (file := inspect.getsourcefile(inspect.unwrap(command.callback)))}
    files |= {str(path) for path in Path(cli.__file__).parent.rglob("*.py") if path.name != "command_tree.py"}
    assert [f"{Path(file).name}:{fault}" for file in sorted(files) for fault in json_paths.faults(Path(file).read_text())] == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("show(1, as_json=as_json)", []),
        ("if as_json:\n  print_json(1)\n  return\n print('a')", []),
        ("if watch and not as_json:\n  print('a')\n  return\n print_json(1)", []),
        ("for one in ():\n  if as_json:\n   print_json(one)\n   continue\n  print(one)", []),
        ("print('a', file=sys.stderr)\n print_json(1)", []),
        ("print_json(1) if as_json else print(1)", ["2 f: print writes text"]),
        ("say('done')", ["1 f: ends without JSON"]),
        ("if html:\n  say('done')\n  return\n print_json(1)", ["4 f: ends without JSON"]),
        ("if not found:\n  raise typer.Exit(1)\n print_json(1)", ["3 f: ends without JSON"]),
        ("if as_json:\n  pass\n else:\n  print_json(1)", ["1 f: ends without JSON"]),
        ("table((), ())\n print_json(1)", ["2 f: table writes text"]),
    ],
)
def test_a_path_without_json_is_found(body: str, found: list[str]) -> None:
    assert json_paths.faults(f"def f(as_json):\n {body}\n") == found


def test_a_group_named_alone_lists_where_there_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", "none")
    monkeypatch.setenv("FT_API_KEY", "x")
    monkeypatch.setenv("FT_API_URL", "without a scheme")  # each command over the API ends before it sends anything
    called: list[tuple[str, ...]] = []
    found = dict(groups(typer.main.get_command(build())))
    assert {("datasets",), ("files",), ("recipes",), ("sweep",), ("admin", "tenants")} <= set(found)
    for path, group in found.items():
        alone, listed = (CliRunner().invoke(build(), [*path, *more]) for more in ((), ("list",)))
        if "list" in group.commands:
            assert (alone.exit_code, str(alone.exception), alone.output) == (listed.exit_code, str(listed.exception), listed.output), path
            called.append(path)
        else:
            assert "Commands:" in alone.output, path
    assert len(called) > 12


def test_options_of_a_group_named_alone_are_those_of_its_list() -> None:
    done = CliRunner().invoke(build(), ["datasets", "--limit", "x"])
    assert done.exit_code == 2 and "datasets list" in done.output and "--limit" in done.output
    assert "Without a command: list." in CliRunner().invoke(build(), ["datasets", "--help"]).output


def test_usage_lines_show_arguments_without_braces() -> None:
    def usage(*command: str) -> str:
        return next(line for line in CliRunner().invoke(build(), [*command, "--help"]).output.splitlines() if line.startswith("Usage:"))

    assert usage("submit").endswith("submit [OPTIONS] FILE_OR_ID...")
    assert usage("chat").endswith("chat [OPTIONS] MODEL [PROMPT]")
    assert usage("routes", "set").endswith("set [OPTIONS] NAME MODEL=WEIGHT...")
    assert usage("webhooks", "replay").endswith("replay [OPTIONS] ENDPOINT [DELIVERY]")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["jobs", "--limt", "3"], "No such option: --limt. Did you mean --limit?"),
        (["submit", "x", "--val", "y"], "Did you mean --validation-file?"),
        (["submit", "x", "--modle", "y"], "Did you mean --model?"),
        (["submit", "x", "--n-epochs", "3"], "A hyperparameter is written --hp n_epochs=3"),
        (["jobs", "--url", "http://x"], "--url goes before the command: `ft --url ... jobs`"),
        (["jobs", "--ulr", "http://x"], "--url goes before the command"),
        (["--josn", "jobs"], "Did you mean --json?"),
        (["datasets", "--limt", "3"], "Did you mean --limit?"),
        (["jbos"], "Did you mean 'jobs'"),
        (["datasets", "lst"], "Did you mean 'list'?"),
        (["jobs", "--zzz"], "No such option: --zzz"),
    ],
)
def test_a_mistyped_option_or_command_is_answered_with_the_one_that_was_meant(args: list[str], says: str) -> None:
    done = CliRunner().invoke(build(), args)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def imported(code: str, env: Mapping[str, str]) -> set[str]:
    """Top-level modules after `code` in a fresh interpreter."""
    code += "\nprint('\\nIMPORTED', *sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.rpartition("IMPORTED")[2].split())


def call(*args: str) -> str:
    return f"import sys\nsys.argv = ['ft', *{args!r}]\nfrom ft_client.cli import main\ntry: main()\nexcept SystemExit: pass"


def test_help_imports_no_heavy_library(ft_env: dict[str, str]) -> None:
    found = imported(call("--help"), ft_env)
    assert "typer" in found
    assert not found & {*HEAVY, "httpx", "pydantic", "ssl"}


@pytest.mark.parametrize("command", [("--json", "jobs"), ("chat", "m", "hello")])
def test_a_command_over_the_api_imports_no_heavy_library(ft_env: dict[str, str], command: tuple[str, ...]) -> None:
    env = {**ft_env, "FT_API_URL": "http://127.0.0.1:9", "FT_API_KEY": "x"}
    found = imported(call(*command), env)
    assert "httpx" in found, "the command has not come as far as its request"
    assert not found & set(HEAVY)


def test_a_command_imports_its_own_module_and_no_other_one(ft_env: dict[str, str]) -> None:
    code = call("recipes", "--help") + "\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ft_env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert {*done.stdout.rpartition("MODULES")[2].split()} & {*MODULES} == {"ft_client.cli.job_commands"}


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ft dat", {"datasets"}),
        ("ft datasets ", {"list", "show", "approve"}),
        ("ft submit --mo", {"--model"}),
        ("ft --vers", {"--version"}),
    ],
)
def test_shells_complete_commands_groups_and_options(words: str, completed: set[str]) -> None:
    typed = words.split(" ")
    bash = {"_FT_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    zsh = {"_FT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}
    assert set(CliRunner().invoke(build(), [], prog_name="ft", env=bash).stdout.split()) == completed
    shown = CliRunner().invoke(build(), [], prog_name="ft", env=zsh).stdout
    assert shown.startswith("_arguments") and all(f'"{word}"' in shown for word in completed)
