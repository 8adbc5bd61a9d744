"""A reader at a terminal: runs a page's commands and programs in order, and fills in what the page leaves to earlier output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import Block, Command, commands

END = "end-of-a-documented-command"
PLACEHOLDER = re.compile(r"(ft:[\w:.-]*:|[A-Za-z]\w*(?:-[a-z]+)*[-_])\.\.\.")
"""``ftjob-...``, ``ft-sk-...``, ``ft:demo-llama-3m:acme:tickets:...``: its beginning, and the rest is what an earlier command printed."""
FILE_NAME = re.compile(r"# (\w+\.py)\n")
"""First line of a program that the page saves, to start it with a command."""
PROGRAM = f"""
import json, sys, traceback
names = {{"__name__": "example"}}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "the page", "exec"), names)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        code = 1
    print("\\n{END} %d" % code, flush=True)
"""


@dataclass(kw_only=True)
class Reader:
    """One terminal and one Python session for a page. What it printed is searched for placeholders, the newest first."""

    env: Mapping[str, str]
    directory: Path
    stands_for: Mapping[str, str]
    """What the page calls things, and what they are called here: addresses and directories."""
    known: str = ""
    """Output of earlier pages, in which a placeholder is looked up that this page has not printed."""
    printed: str = ""
    sessions: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def fill(self, text: str) -> str:
        for name, here in self.stands_for.items():
            text = text.replace(name, here)
        return PLACEHOLDER.sub(lambda found: self._newest(found[1]), text)

    def _newest(self, beginning: str) -> str:
        pattern = re.compile(rf"(?<![\w:-]){re.escape(beginning)}[\w-]+")
        for output in (self.printed, self.known):
            if found := pattern.findall(output):
                return str(found[-1])
        raise AssertionError(f"{beginning}... stands for something that no command has printed:\n{self.known}{self.printed}"[-6000:])

    def read(self, block: Block, *, leave_out: tuple[str, ...] = ()) -> None:
        """Run a block of bash or Python; commands of `leave_out`, and what cannot run, are passed over."""
        if block.not_installed:
            return
        if block.language == "python" and (named := FILE_NAME.match(block.text)):
            (self.directory / named[1]).write_text(self.fill(block.text))
        elif block.language == "python":
            self._run("python", json.dumps(self.fill(block.text)), block.place)
        for command in commands(block) if block.language == "bash" else ():
            if not command.cannot_run and not command.text.startswith(leave_out):
                self.run(command)

    def run(self, command: Command) -> None:
        text = self.fill(command.text)
        self._run("bash", f"{{ {text}\n}} </dev/null 2>&1\nprintf '\\n%s %d\\n' {END} $?", f"{command.place} {text}")

    def _run(self, language: str, line: str, what: str) -> None:
        session = self.sessions.get(language) or self._start(language)
        assert session.stdin is not None and session.stdout is not None
        session.stdin.write(line + "\n")
        session.stdin.flush()
        output = ""
        for answer in session.stdout:
            if answer.startswith(END):
                self.printed += output
                assert answer.split()[1] == "0", f"{what}\n{output}"
                return
            output += answer
        raise AssertionError(f"{what} ended its session\n{output}")

    def _start(self, language: str) -> subprocess.Popen[str]:
        program = ["bash", "--norc"] if language == "bash" else [sys.executable, "-u", "-c", PROGRAM]
        session = subprocess.Popen(
            program,
            env=dict(self.env),
            cwd=self.directory,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.sessions[language] = session
        return session


@contextmanager
def reader(*, env: Mapping[str, str], directory: Path, stands_for: Mapping[str, str], known: str = "") -> Iterator[Reader]:
    made = Reader(env=env, directory=directory, stands_for=stands_for, known=known)
    try:
        yield made
    finally:
        for session in made.sessions.values():
            session.kill()
            session.communicate()
