"""Calls a module's function in a short-lived child process, for libraries that long-lived processes must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from core.errors import Unavailable
from core.telemetry.redaction import without_credentials


def call_in_child(module: str, order: Mapping[str, Any], *, limit_s: float, failure: str, code: str | None = None) -> dict[str, Any]:
    """Run ``python -m module`` and return its answer, the last line of its output as JSON.

    `order` goes to standard input because it may contain a password. Raises ``Unavailable`` that begins with `failure` if it fails or
    takes longer than `limit_s`.
    """
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as e:
        raise Unavailable(f"{failure} within {limit_s:.0f} s; the next round continues", code=code) from e
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"{failure}: {without_credentials(last)[:300]}; the next round retries", code=code)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
