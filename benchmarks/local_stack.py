"""A whole platform of its own, in a directory of its own: ``ft up`` on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from control_plane.platform.settings import load
from resources.database.engine import control_plane_url, make_engine
from tests.support.servers.inference_server import free_port

ROOT = Path(__file__).resolve().parents[1]
FT = str(Path(sys.executable).parent / "ft")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    home: Path
    """``FT_HOME``."""
    env: Mapping[str, str]
    api: str
    engine: sa.Engine

    def ft(self, *args: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of ``ft``; RuntimeError with its output if it fails and must not."""
        done = subprocess.run([FT, *args], env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=600)
        if ok and done.returncode:
            raise RuntimeError(f"ft {' '.join(args)}: {done.stdout}{done.stderr}")
        return done

    def create_tenant(self, name: str, *, tier: str) -> str:
        """Create a tenant; return its API key."""
        key: str = json.loads(self.ft("admin", "tenants", "create", name, "--tier", tier, "--json").stdout)["api_key"]
        return key


@contextlib.contextmanager
def local_stack(home: Path, extra: Mapping[str, str]) -> Iterator[Stack]:
    """The platform in ``home/ft`` with `extra` variables, without MLflow; ended on the way out, which keeps the directory."""
    home.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "DAGSTER_"))}
    ports = {name: str(free_port()) for name in ("FT_API_PORT", "FT_DAGSTER_PORT", "FT_INFERENCE_PORT")}
    env = {**kept, **ports, "FT_HOME": str(home / "ft"), "HOME": str(home), "FT_MLFLOW_URI": "off", "PYTHONPATH": str(ROOT), **extra}
    try:
        up = subprocess.run([FT, "up", "--detach"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if up.returncode:
            raise RuntimeError(f"ft up: {up.stdout}{up.stderr}")
        settings = load(env)
        engine = make_engine(control_plane_url(settings))
        yield Stack(home=settings.home, env=env, api=json.loads((settings.home / "endpoints.json").read_text())["api"], engine=engine)
        engine.dispose()
    finally:
        subprocess.run([FT, "down"], env=env, cwd=ROOT, capture_output=True, timeout=300, check=False)
