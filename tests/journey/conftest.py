"""A whole platform: real processes started by ``ft up`` on free ports, one for all journeys."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from ft_client.demo import tickets as demo_tickets

ROOT = Path(__file__).resolve().parents[2]
FT = Path(sys.executable).parent / "ft"


def free_ports(count: int) -> list[str]:
    """Ports that are free and differ: one after the other, the same could be given twice."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(listener.getsockname()[1]) for listener in listeners]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    home: Path
    env: dict[str, str]
    endpoints: dict[str, str]
    command: tuple[str, ...] = (str(FT),)
    """What stands for ``ft``; a release before this one has its own."""
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def ft(self, *args: str, key: str = "", ok: bool = True) -> subprocess.CompletedProcess[str]:
        env = {**self.env, **({"FT_API_KEY": key} if key else {})}
        done = subprocess.run([*self.command, *args], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 or not ok, done.stdout + done.stderr
        return done

    def client(self, key: str) -> openai.OpenAI:
        """A client for the owner of `key`, closed with the stack."""
        if key not in self.clients:
            self.clients[key] = openai.OpenAI(base_url=f"{self.endpoints['api']}/v1", api_key=key, max_retries=0)
        return self.clients[key]

    def dagster_env(self) -> dict[str, str]:
        """The environment that `eval "$(ft env)"` makes."""
        lines = [line.removeprefix("export ") for line in self.ft("env").stdout.splitlines() if line.startswith("export ")]
        pairs = (line.split("=", 1) for line in lines)
        return {**self.env, **{name: value.strip("'\"") for name, value in pairs}}


def environment(home: Path) -> dict[str, str]:
    """The environment of a stack in `home`, on ports of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_"))}
    ports = dict(zip(("FT_API_PORT", "FT_DAGSTER_PORT", "FT_INFERENCE_PORT"), free_ports(3), strict=True))
    return {**kept, **ports, "FT_HOME": str(home), "HOME": str(home.parent)}


@contextmanager
def started(home: Path, env: dict[str, str], *, seconds: float = 170, command: tuple[str, ...] = (str(FT),)) -> Iterator[Stack]:
    """Everything that ``ft up --detach`` starts, healthy within `seconds`; ended by ``ft down``."""
    up = subprocess.run([*command, "up", "--detach"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    logs = "".join(f"\n== {p.name}\n{p.read_text()[-3000:]}" for p in sorted((home / "logs").glob("*.log"))) if up.returncode else ""
    try:
        assert up.returncode == 0, up.stdout + up.stderr + logs
        running = Stack(home=home, env=env, endpoints=json.loads((home / "endpoints.json").read_text()), command=command)
        yield running
        for client in running.clients.values():
            client.close()
    finally:
        down = subprocess.run([*command, "down"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert down.returncode == 0, down.stdout + down.stderr


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A whole platform for all journeys."""
    parent = Path(tempfile.mkdtemp(prefix="ft-journey-"))
    home = parent / "home"
    with started(home, environment(home)) as running:
        yield running
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def new_tenant(stack: Stack) -> Callable[[], tuple[str, str]]:
    """Makes a tenant; returns its id and its key."""

    def make() -> tuple[str, str]:
        name = f"t-{secrets.token_hex(4)}"
        made = json.loads(stack.ft("admin", "tenants", "create", name, "--tier", "standard", "--json").stdout)
        return name, str(made["api_key"])

    return make


@pytest.fixture(scope="session")
def tickets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 support tickets as chat rows."""
    small = tmp_path_factory.mktemp("tickets") / "small.jsonl"
    small.write_text("".join(demo_tickets.files()[demo_tickets.TICKETS].splitlines(keepends=True)[:200]))
    return small
