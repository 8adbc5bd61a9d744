"""Every command and program of the README and of docs/ runs on a live stack.

The quickstart comes first: it makes the tenant, the key and the adapter that the other pages speak of. Nothing is shortened: its job trains
on all of the demo's tickets, which takes two minutes on two quiet cores and ten on busy ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.docs.pages import LIVE, QUICKSTART, ROOT, blocks, commands
from tests.docs.reader import Reader, reader
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import free_port
from tests.support.servers.webhook_receiver import receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RUNS = ("bash", "python")
PAGES_THAT_RUN = [page for page in LIVE if page != QUICKSTART and any(block.language in RUNS for block in blocks(page))]
UP_AND_DOWN = ("ft up", "ft down")
"""Of the quickstart: run before its first command and after the last page."""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A stack, and where its reader sits."""

    env: dict[str, str]
    directory: Path
    stands_for: dict[str, str]
    output: str
    """What the commands of the quickstart printed."""

    def ft(self, *args: str) -> str:
        done = subprocess.run(["ft", *args], env=self.env, cwd=self.directory, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    """A stack as the quickstart starts it, on ports of its own, with all that the quickstart's commands leave behind."""
    home = Path(tempfile.mkdtemp(prefix="ft-docs-"))
    directory = home / "desk"
    directory.mkdir()
    _lay_out(directory)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_"))}
    ports = {name: str(free_port()) for name in ("FT_API_PORT", "FT_DAGSTER_PORT", "FT_INFERENCE_PORT")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    state = {"FT_HOME": str(home / "state"), "HOME": str(home), "PATH": path, "FT_WEBHOOK_ALLOW": "127.0.0.0/8"}
    env = {**kept, **ports, **state}
    with ExitStack() as stack:
        hook = stack.enter_context(receiver()).url()
        api = f"http://127.0.0.1:{ports['FT_API_PORT']}"
        stands_for = {
            "http://127.0.0.1:8000": api,
            "https://ft.example.com": api,
            "127.0.0.1:3000": f"127.0.0.1:{ports['FT_DAGSTER_PORT']}",
            "https://hooks.example.com/ft": hook,
            "https://example.com/hook": hook,
            "/models/our-base": str(directory / "our-base"),
            ":demo-1a2b3c:": ":acme:",
        }
        me = stack.enter_context(reader(env=env, directory=directory, stands_for=stands_for))
        found = blocks(QUICKSTART)
        try:
            _only(me, "ft up")
            for block in found:
                if block.language in RUNS:
                    me.read(block, leave_out=UP_AND_DOWN)
            yield Desk(env=env, directory=directory, stands_for=stands_for, output=me.printed)
        except BaseException:
            sys.stderr.write("".join(f"\n== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((home / "state/logs").glob("*.log"))))
            raise
        finally:
            _only(me, "ft down")
    shutil.rmtree(home, ignore_errors=True)


def _only(me: Reader, begins: str) -> None:
    """Run the quickstart's one command that begins so."""
    (command,) = (c for block in blocks(QUICKSTART) if block.language == "bash" for c in commands(block) if c.text.startswith(begins))
    me.run(command)


def _lay_out(directory: Path) -> None:
    """The files that pages speak of and no command of theirs writes."""
    (directory / ".venv").symlink_to(sys.prefix)
    for name, seed in (("our-base", 1), ("our-base-2", 2)):
        build_tiny_model(directory / name, seed=seed)
    (directory / "mmlu/all").mkdir(parents=True)
    items = {"question": ["What is 6 times 7?"] * 3, "choices": [["42", "41", "40", "39"]] * 3, "answer": [0] * 3}
    pq.write_table(pa.table(items), directory / "mmlu/all/test-00000-of-00001.parquet")
    row = {"question": "Which planet is the largest of all?", "choices": {"text": ["Jupiter", "Mars"]}}
    (directory / "quiz.jsonl").write_text(json.dumps(row) + "\n")


def test_the_quickstart_ends_with_an_adapter_in_production(desk: Desk) -> None:
    assert re.search(r"\bft:demo-llama-3m:acme:tickets:\w+", desk.output)
    assert "production" in desk.ft("adapters")


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES_THAT_RUN])
def test_every_command_and_program_of_a_page_runs(desk: Desk, page: Path) -> None:
    key = re.findall(r"ft-sk-[\w-]+", desk.output)[0]
    env = {**desk.env, "FT_API_URL": desk.stands_for["http://127.0.0.1:8000"], "FT_API_KEY": key}
    with reader(env=env, directory=desk.directory, stands_for=desk.stands_for, known=desk.output) as me:
        for block in blocks(page):
            if block.language in RUNS:
                me.read(block)
    for job in json.loads(desk.ft("jobs", "--json")):
        if not job["finished_at"]:
            desk.ft("cancel", job["id"])  # so that the next page's job need not wait for it


def test_no_page_was_left_out() -> None:
    found = {page.name for page in PAGES_THAT_RUN}
    assert found >= {"README.md", "api.md", "client.md", "serving.md", "tenancy.md", "uploads.md", "webhooks.md"}
