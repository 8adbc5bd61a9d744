"""Two real ranks that each read a part of a base model hold and train the same bytes as ranks that each read all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.training.attempts import REPOSITORY
from tests.engine.training.runtime.parallel.test_parallel import COMPILES
from tests.support.processes import forked_modules
from tests.support.processes.forked_modules import Forked

SHARDS = "tests.engine.training.runtime.model.shards"
WHOLE = ("mixtral", "without a norm", "of another shape")
"""Cases whose files need more than renaming."""
IN_SHARDS = (
    "llama", "llama in bf16", "llama, all parameters", "recomputed activations", "tied", "tied, all parameters", "in two files",
    "without a prefix", "odd vocabulary", "gpt2", "qwen3",
)  # fmt: skip


@pytest.fixture(scope="module", params=["fsdp2", pytest.param("zero3", marks=[pytest.mark.slow, COMPILES])])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by case."""
    strategy: str = request.param
    directory = tmp_path_factory.mktemp("shards")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    logs = [directory / f"rank{rank}.log" for rank in range(2)]
    ranks: list[Forked | subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            words = [strategy, str(rank), str(directory / "rendezvous"), str(directory)]
            ranks.append(start(words, env=env, cwd=directory, log=log))
        codes = [rank.wait(timeout=240 if strategy == "fsdp2" else 540) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0], printed[0][-4000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in "\n".join(printed).splitlines():
        if line.startswith("{"):
            found.setdefault(json.loads(line)["case"], []).append(json.loads(line))
    return found


def start(words: list[str], *, env: dict[str, str], cwd: Path, log: Path) -> Forked | subprocess.Popen[bytes]:
    if words[0] == "fsdp2":
        return forked_modules.start(SHARDS, words, env=env, cwd=cwd, log=log)
    with log.open("wb") as out:  # the fork server hides DeepSpeed
        return subprocess.Popen([sys.executable, "-m", SHARDS, *words], env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", IN_SHARDS)
def test_a_model_read_in_shards_is_the_one_read_whole(case: str, compared: dict[str, list[dict[str, Any]]]) -> None:
    assert [found["loaded"] for found in compared[case]] == ["in shards"] * 2
    assert [found["share"] for found in compared[case]] == pytest.approx([0.5, 0.5], abs=0.01)
    assert [found["different"] for found in compared[case]] == [[], []]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", IN_SHARDS)
def test_a_model_read_in_shards_trains_to_the_same_bytes(case: str, compared: dict[str, list[dict[str, Any]]]) -> None:
    assert [found["different when trained"] for found in compared[case]] == [[], []]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", WHOLE)
def test_files_that_need_more_than_renaming_are_read_whole(case: str, compared: dict[str, list[dict[str, Any]]]) -> None:
    assert [found["loaded"] for found in compared[case]] == ["whole"] * 2
