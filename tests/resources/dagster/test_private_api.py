"""Dagster's private modules: used in one place, which says so when a version lacks something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dagster
import pytest

from core.telemetry.logs import PACKAGES
from resources.dagster import private_api

ROOT = Path(__file__).parents[3]


def test_the_version_in_use_is_the_one_that_was_tried() -> None:
    assert dagster.__version__.startswith(f"{private_api.TRIED_WITH}.")


def test_private_modules_are_imported_in_one_place() -> None:
    private = re.compile(r"^\s*(?:from|import) dagster(?:_\w+)?\._", re.MULTILINE)
    found = {p.relative_to(ROOT).as_posix() for top in PACKAGES for p in (ROOT / top).rglob("*.py") if private.search(p.read_text())}
    assert found == {"resources/dagster/private_api.py"}


@pytest.mark.parametrize(
    ("module", "name"), [("dagster._core.launcher", "WorkerStatus"), ("dagster._cli.api", "_execute_run_command_body")]
)
def test_a_version_that_lacks_something_is_refused_at_once_by_name(module: str, name: str) -> None:
    code = f"import {module} as m; del m.{name}; import resources.dagster.private_api"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"ImportError: Dagster {re.escape(dagster.__version__)} has changed .*{name}.* requirements.lock \(tried with 1.13\)", last
    )
