"""Fenced blocks of the documentation, without a platform: commands exist, programs compile, configuration is read by what reads it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from control_plane.billing import prices
from control_plane.capacity import configured_pools
from control_plane.http.error_responses import Error
from control_plane.planning import job_mix, kind_sizes
from core.telemetry.logs import PACKAGES
from engine.evals.suites import task_files
from engine.training.memory.gpus import GPUS
from ft_client.cli.command_tree import build
from tests.docs.pages import CANNOT_RUN, FENCE, LANGUAGES, NOT_INSTALLED, PAGES, ROOT, Block, Command, blocks, commands, of_language
from tests.docs.reader import reader

COMMANDS = [command for block in of_language("bash") for command in commands(block)]


def of_ft(command: Command) -> list[list[str]]:
    """Return the words after each ``ft`` of a command, also of one that runs in a pod (``kubectl exec ... -- ft ...``)."""
    run = [words[words.index("--") + 1 :] if words[0] == "kubectl" and "--" in words else words for words in command.words()]
    return [words[1:] for words in run if words[0] == "ft"]


FT = [(command.place, words) for command in COMMANDS for words in of_ft(command)]
RUNNER, APP = CliRunner(), build()


def test_every_fenced_block_names_its_language() -> None:
    fences = {page: page.read_text().count("\n```") for page in PAGES}
    assert {page: 2 * len(blocks(page)) for page in PAGES} == fences, "a fence was left open, or is indented"
    unknown = {block.place: block.language for page in PAGES for block in blocks(page) if block.language not in LANGUAGES}
    assert unknown == {}, "commands are bash, what is only read is text"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_code_is_fenced_and_not_only_indented(page: Path) -> None:
    paragraphs = FENCE.sub("", page.read_text()).split("\n\n")
    assert [p for p in paragraphs if p.startswith("    ") and not p.startswith("    |")] == [], "what is only indented is run by no test"


@pytest.mark.parametrize(("place", "words"), [pytest.param(*ft, id=f"{ft[0]} {' '.join(ft[1][:3])}") for ft in FT])
def test_every_documented_command_and_option_exists(place: str, words: list[str]) -> None:
    done = RUNNER.invoke(APP, [*words, "--help"])  # an unknown command or option is refused before the help is shown
    assert done.exit_code == 0, f"{place}: ft {' '.join(words)}\n{done.output}"
    assert "Usage" in done.output


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", FENCE.sub("", page.read_text()))
        for path, _, anchor in [link.partition("#")]
        if not (target := (page.parent / path).resolve() if path else page).exists() or (anchor and anchor not in headings(target))
    ]
    assert lost == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_decision_is_listed_with_its_title() -> None:
    folder = ROOT / "docs/decisions"
    titles = {path.name: path.read_text().partition("\n")[0] for path in folder.glob("0*.md")}
    listed = re.findall(r"^- \[(\d{4})\]\((.+?)\): (.+)$", (folder / "README.md").read_text(), flags=re.MULTILINE)
    assert {name: title for _, name, title in listed} == {name: re.sub(r"^# \d{4}:? ", "", title) for name, title in titles.items()}
    assert [name for number, name, _ in listed if name[:4] != number] == []


def test_a_command_or_an_option_that_does_not_exist_is_found() -> None:
    for words in (["jobs", "--no-such-option"], ["admin", "no-such-command"], ["no-such-command"]):
        assert RUNNER.invoke(APP, [*words, "--help"]).exit_code == 2, words


def test_api_keys_are_not_written_on_command_lines() -> None:
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".md", ".sh", ".yaml")]
    pages = [*PAGES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    assert [str(path.relative_to(ROOT)) for path in {*pages, *examples} if "--api-key" in path.read_text()] == [], "use FT_API_KEY"


EXTRA = re.compile(r"\b(?:the|optional) extra `{0,2}([\w-]+)|(?:ft-platform|pip install \S*?|\"\.)\[([\w,-]+)\]")
"""Extras as pages, messages and the Makefile name them: "the extra `gguf`", ``".[gguf]"``."""
NO_EXTRAS = {"comma"}
"""Other words after "the extra"."""


def test_every_extra_that_a_page_or_a_message_names_exists() -> None:
    sources = [path for package in (*PACKAGES, "tools") for path in (ROOT / package).rglob("*.py")]
    named = {
        (path, name)
        for path in (*PAGES, *(ROOT / "docs").rglob("*.md"), *sources, ROOT / "Makefile")
        for found in EXTRA.finditer(path.read_text())
        for name in (found[1] or found[2]).split(",")
        if name not in NO_EXTRAS
    }
    assert {path.name for path, _ in named} >= {"Makefile", "errors.md", "models-and-exports.md", "archive.py"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in sorted(named) if name not in extras] == []


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for b in of_language("python")])
def test_every_documented_program_compiles(block: Block) -> None:
    compile(block.text, block.place, "exec")


def test_each_reason_not_to_run_a_command_belongs_to_one() -> None:
    excused = [command.cannot_run for command in COMMANDS if command.cannot_run]
    assert sorted(excused) == sorted(CANNOT_RUN), "an entry excuses one command"
    assert len(CANNOT_RUN) <= 10


def test_each_module_that_is_not_installed_excuses_a_program() -> None:
    assert {block.not_installed for block in of_language("python")} - {None} == set(NOT_INSTALLED)
    assert [name for name in NOT_INSTALLED if importlib.util.find_spec(name)] == [], "what is installed is run"


def only(page: str, language: str) -> Block:
    (found,) = (block for block in of_language(language) if block.page == page)
    return found


def test_the_documented_pools_are_pools() -> None:
    priced = prices.load().at(datetime(2026, 11, 22, tzinfo=UTC)).gpus
    for page, nodes in (("docs/pools.md", {"fabric": 29}), ("docs/operations/spot-pools.md", {"steady": 2, "spot": 4})):
        pools = configured_pools.parse(yaml.safe_load(only(page, "yaml").text), gpu_types=[name for name in GPUS if name in priced])
        assert {pool.name: len(pool.nodes) for pool in pools} == nodes


def test_the_documented_mix_is_one_that_the_documented_pools_hold() -> None:
    pools = configured_pools.parse(yaml.safe_load(only("docs/pools.md", "yaml").text), gpu_types=["h100-80gb"])
    pools = (*pools, replace(pools[0], name="small", takes=frozenset({"lora"}), reserved_gpus=0))
    mix = job_mix.parse(yaml.safe_load(only("docs/operations/capacity.md", "yaml").text))
    kinds = kind_sizes.sized(mix, pools)
    assert [kind.job_class for kind in kinds] == ["lora", "lora", "large", "lora"]
    assert kinds[-1].gpu_hours > 1.0


def test_the_documented_task_is_a_capability_suite(tmp_path: Path) -> None:
    (tmp_path / "returns").mkdir()
    (tmp_path / "returns/returns_policy.yaml").write_text(only("docs/evaluation-suites.md", "yaml").text)
    row = json.dumps({"question": "May I return it?", "choices": ["yes", "no"], "answer": 0}) + "\n"
    for name in ("questions.jsonl", "examples.jsonl"):
        (tmp_path / "returns" / name).write_text(row)
    task_files.check_suites(["returns_policy"], [tmp_path], None)


def test_the_documented_error_is_one_as_the_api_sends_it() -> None:
    error = Error.model_validate_json(only("docs/errors.md", "json").text, strict=True)
    assert error.error.code == "invalid_seed"


def test_the_documented_event_is_json() -> None:
    assert json.loads(only("docs/webhooks.md", "json").text)["object"] == "event"


def test_a_reader_fills_in_what_was_printed_and_stops_at_what_fails(tmp_path: Path) -> None:
    def block(language: str, text: str) -> Block:
        return Block(page="page", line=3, language=language, text=text)

    with reader(
        env=os.environ, directory=tmp_path, stands_for={"http://there": "http://here"}, known="key ft-sk-old ft:base:acme:t:9f"
    ) as me:
        me.read(block("bash", "echo job ftjob-1: http://there # ft-op-...\nexport A=ft-sk-new\necho $A\n"))
        me.read(block("python", 'x = "ft-sk-..."'))
        me.read(block("python", 'print(x, "ft:base:acme:t:...", "acme:ftjob-...")'))
        assert me.printed.split() == ["job", "ftjob-1:", "http://here", "ft-sk-new", "ft-sk-new", "ft:base:acme:t:9f", "acme:ftjob-1"]
        with pytest.raises(AssertionError, match="page:4 false"):
            me.read(block("bash", "true\nfalse"))
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            me.read(block("python", "1 / 0"))
        with pytest.raises(AssertionError, match=r"mem_\.\.\. stands for something that no command has printed"):
            me.read(block("bash", "echo mem_..."))
