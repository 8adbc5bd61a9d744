"""Ranks that hold the output layer in parts call it equally often, however many tokens each of them scores."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the training environment")

from tests.engine.training.attempts import REPOSITORY
from tests.support.processes import forked_modules
from tests.support.processes.forked_modules import Forked

HANGS_S = 150
"""Far longer than two ranks take to score a few tokens."""


def run_ranks(directory: Path) -> list[list[dict[str, Any]]]:
    """What each of the two ranks printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    logs = [directory / f"rank{rank}" for rank in range(2)]
    ranks: list[Forked] = []
    try:
        for rank, log in enumerate(logs):
            words = [str(rank), str(directory / "rendezvous")]
            ranks.append(forked_modules.start("tests.engine.training.runtime.parallel.split_head", words, env=env, cwd=directory, log=log))
        codes = [rank.wait(timeout=HANGS_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], printed
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in printed]


def test_ranks_with_unequal_numbers_of_labels_call_a_split_head_equally_often(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path)
    # Slices of four tokens, each computed again in the backward pass where there are several of them.
    assert [case["calls"] for case in first] == [case["calls"] for case in second] == [2 * 3, 2 * 5, 1, 2 * 2]
    assert max(case["error"] for case in first + second) < 1e-5
    assert max(case["gradient_error"] for case in first + second) < 1e-5
