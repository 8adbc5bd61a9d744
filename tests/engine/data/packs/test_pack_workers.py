"""Packs built by several processes are the packs of one, and a kill costs each worker one shard at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from core.errors import IntegrityError, InvalidRequest, Unavailable
from engine.data.packs.build import PackProgress, PackSettings, build_pack
from engine.data.packs.manifest import PackManifest, verify_pack
from engine.data.packs.workers import PARALLEL_FROM, suitable_workers
from engine.data.schema import Example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.examples_of import chat_example, varied_chats
from tests.engine.data.packed_rows import write_rows

REPOSITORY = Path(__file__).parents[4]
SETTINGS = PackSettings(max_seq_len=1024, shard_examples=32, validation_fraction=0.1)
NUM_EXAMPLES = 3000
BUILD = """
import sys
from pathlib import Path
from engine.data.packs.build import PackSettings, build_pack
from engine.data.tokens.chat_tokenizer import ChatTokenizer

if __name__ == "__main__":
    rows, model, out = map(Path, sys.argv[1:])
    settings = PackSettings(max_seq_len=1024, shard_examples=32, validation_fraction=0.1)
    build_pack(rows, ChatTokenizer.load(model), settings, out, dataset_id="ds_1", workers=2, model_dir=model)
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    examples = [
        chat_example(f"question {i} " + "why " * (i % 50), f"answer {i} " + "so " * (i % 70), row=i) for i in range(1, NUM_EXAMPLES)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.parquet", examples)


@pytest.fixture(scope="module")
def by_one(rows: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> PackManifest:
    return build_pack(rows, ChatTokenizer.load(tiny_model), SETTINGS, tmp_path_factory.mktemp("one"), dataset_id="ds_1")


@pytest.mark.parametrize(("workers", "shard_examples"), [(2, 32), (3, 100), (1, 5000)])
def test_neither_workers_nor_shards_change_a_byte(
    rows: Path, tiny_model: Path, tokenizer: ChatTokenizer, by_one: PackManifest, tmp_path: Path, workers: int, shard_examples: int
) -> None:
    seen: list[PackProgress] = []
    settings = replace(SETTINGS, shard_examples=shard_examples)
    made = build_pack(rows, tokenizer, settings, tmp_path, dataset_id="ds_1", workers=workers, model_dir=tiny_model, progress=seen.append)
    assert made == by_one == verify_pack(tmp_path)  # digests of the files included
    assert made.validation is not None and made.validation["num_examples"] > 200
    done = [p.num_examples for p in seen if (p.stage, p.part) == ("tokenize", "train")]
    assert done == sorted(done) and done[-1] == made.num_examples
    assert len(done) == -(-made.num_examples // shard_examples)


def finished_shards(directory: Path) -> dict[str, int]:
    """Inode of each finished token shard."""
    return {str(f.parent): f.stat().st_ino for f in directory.glob(".tokens-*/*/[0-9]*/shard.json")}


@pytest.mark.slow
def test_a_kill_in_the_middle_costs_each_worker_one_shard_at_most(
    rows: Path, tiny_model: Path, tokenizer: ChatTokenizer, by_one: PackManifest, tmp_path: Path
) -> None:
    script, out = tmp_path / "build.py", tmp_path / "pack"
    script.write_text(BUILD)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, str(script), str(rows), str(tiny_model), str(out)], env=env)
    deadline = time.monotonic() + 60
    while len(finished_shards(out)) < 10:
        assert process.poll() is None, "ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "workers outlived the build"
    assert len(children) >= 2
    before = finished_shards(out)
    torn = list(out.glob(".tokens-*/*/.*.tmp"))
    assert len(torn) <= 2, "a worker had more than one shard in hand"
    seen: list[PackProgress] = []
    kept: dict[str, int] = {}

    def watch(progress: PackProgress) -> None:
        seen.append(progress)
        kept.update(finished_shards(out))

    resumed = build_pack(rows, tokenizer, SETTINGS, out, dataset_id="ds_1", progress=watch)
    assert resumed == by_one
    assert {name: kept[name] for name in before} == before, "a finished shard was written again"
    assert sum(p.stage == "tokenize" for p in seen) == len(kept) - len(before)
    assert 10 <= len(before) < len(kept)


def test_a_worker_that_is_killed_ends_the_build_and_leaves_its_shards(
    rows: Path, tiny_model: Path, tokenizer: ChatTokenizer, by_one: PackManifest, tmp_path: Path
) -> None:
    seen: list[PackProgress] = []

    def kill_one(progress: PackProgress) -> None:
        seen.append(progress)
        if len(seen) == 5:
            workers = [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]
            workers[0].kill()

    with pytest.raises(Unavailable, match="signal 9"):
        build_pack(rows, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", workers=2, model_dir=tiny_model, progress=kill_one)
    assert not any("spawn_main" in " ".join(c.cmdline()) for c in psutil.Process().children())
    with pytest.raises(IntegrityError, match="not finished"):
        PackManifest.read(tmp_path)
    assert len(finished_shards(tmp_path)) >= 5
    assert build_pack(rows, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1") == by_one


def test_what_a_worker_refuses_is_refused_as_by_one_process(tiny_model: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    one = chat_example("q", "a").messages
    examples = [*varied_chats(50), Example(kind="preference", messages=one[:1], chosen=one[1:], rejected=one[1:], row=51)]
    with pytest.raises(InvalidRequest) as refused:
        build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", workers=2, model_dir=tiny_model)
    assert refused.value.code == "preference_rows"


def test_workers_with_another_tokenizer_are_refused(merging_model: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="not the one that the pack is for"):
        build_pack(varied_chats(50), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", workers=2, model_dir=merging_model)


def test_small_datasets_are_tokenized_by_one_process() -> None:
    assert suitable_workers(PARALLEL_FROM - 1) == 1
    assert suitable_workers(PARALLEL_FROM) == len(os.sched_getaffinity(0))
