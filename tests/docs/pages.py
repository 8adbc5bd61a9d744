"""The pages of the documentation as their readers use them: fenced blocks, each with its language, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIVE = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OPERATIONS = tuple(sorted((ROOT / "docs/operations").rglob("*.md")))
"""Pages about a cluster, whose commands no stack of one machine can run."""
PAGES = (*LIVE, *OPERATIONS)
QUICKSTART = ROOT / "docs/quickstart.md"
"""Creates the tenant, the key and the adapter that the other pages use."""
LANGUAGES = ("bash", "python", "json", "yaml", "toml", "text")
"""Of fenced blocks: commands, programs, configuration and bodies, and what is only read (output, the form of a document)."""
FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", flags=re.DOTALL | re.MULTILINE)

CANNOT_RUN = {
    "make demo": "ends in what the commands of the quickstart show one by one, on a stack of its own at the default ports",
    "make setup && . .venv/bin/activate": "installs the packages of the environment that the tests run in",
    "sudo useradd --system --home-dir /var/lib/ft-platform ft": "changes the machine's users",
    "sudo cp deploy/systemd/ft-platform.service /etc/systemd/system/": "changes the machine's services",
    "sudo systemd-analyze verify /etc/systemd/system/ft-platform.service": "needs systemd; tests/deploy verifies the unit",
    "sudo systemctl enable --now ft-platform": "needs systemd as init",
    "ft admin models add meta-llama/Llama-3.1-8B-Instruct": "fetches 16 GB from the Hub, behind a licence to be accepted",
    "ft manifest server": "needs a model that was trained whole, and a cluster",
    "ft admin pool-manifest": "needs a cluster",
    "ft export ft:demo-llama-3m:acme:tickets:... --format merged --push": "pushes to the Hub with a token",
}
"""How a command begins that the live stack of the test has no means for, and why. At most ten."""
NOT_INSTALLED = {
    "langchain_openai": "a library of others that docs/frameworks.md shows",
    "pydantic_ai": "a library of others that docs/frameworks.md shows",
    "matplotlib": "draws in notebooks",
}
"""Modules that programs of pages import and the lock does not have, and why. Such a program is compiled and not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    page: str
    line: int
    """Of the block's first line of text, 1-based."""
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def not_installed(self) -> str | None:
        """A module that this program imports and the environment does not have."""
        imported = re.findall(r"^(?:from|import) (\w+)", self.text, flags=re.MULTILINE) if self.language == "python" else ()
        return next((name for name in imported if name in NOT_INSTALLED), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A line of a bash block, without its comment."""

    place: str
    text: str

    @property
    def cannot_run(self) -> str | None:
        return next((begin for begin in CANNOT_RUN if self.text.startswith(begin)), None)

    def words(self) -> list[list[str]]:
        """Words of each simple command in it: of ``ft audit --csv > audit.csv``, ``[["ft", "audit", "--csv"], ["audit.csv"]]``."""
        lexer = shlex.shlex(self.text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        simple: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("();<>|&"):
                simple.append([])
            else:
                simple[-1].append(word)
        return [words for words in simple if words]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, found.start("text")) + 1,
            language=found["language"],
            text=found["text"],
        )
        for found in FENCE.finditer(text)
    ]


def of_language(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> Iterator[Command]:
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        if text := re.sub(r"(^|\s+)#.*", "", line).strip():
            yield Command(place=f"{block.page}:{number}", text=text)
