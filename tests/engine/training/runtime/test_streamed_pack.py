"""A training whose pack is still on its way: it starts with what is there, waits for the rest, and ends with the same weights."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.training.failures import EXIT_CODES, Outcome
from engine.training.pack_stream import ARRIVING, GROUP_SHARDS, arrival_order
from engine.training.runtime import pack_loader
from engine.training.runtime.run_errors import BadExample, BadInput
from tests.engine.training.attempts import VOCAB, Job, job, write_pack

SHARDS, WINDOWS = 9, 27


class Line:
    """The pack's shards after the first, held back until they are let through."""

    def __init__(self, made: Job) -> None:
        shutil.rmtree(made.pack)
        write_pack(made.pack, num_windows=WINDOWS, shards=SHARDS)
        self.pack, self.aside = made.pack, made.root / "aside"
        self.aside.mkdir()
        self.order = arrival_order(made.spec, [WINDOWS // SHARDS] * SHARDS, step=0)
        for shard in range(1, SHARDS):
            self._path(shard).rename(self.aside / self._path(shard).name)
        (self.pack / ARRIVING).touch()

    def let_through(self, count: int) -> None:
        """Have the first `count` shards in the order of their use arrive."""
        for shard in self.order[:count]:
            held = self.aside / self._path(shard).name
            if held.exists():
                held.rename(self._path(shard))
        if count >= SHARDS:
            (self.pack / ARRIVING).unlink()

    def let_through_except(self, shard: int) -> None:
        """Have all shards but one arrive."""
        for name in {held.name for held in self.aside.iterdir()} - {self._path(shard).name}:
            (self.aside / name).rename(self.pack / name)

    def _path(self, shard: int) -> Path:
        return self.pack / f"shard-{shard:05d}.parquet"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path / "streamed") as streamed:
        yield streamed


def weights(made: Job) -> str:
    return hashlib.sha256((made.work / "final" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a training that had everything from the start."""
    with job(tmp_path_factory.mktemp("whole")) as undisturbed:
        shutil.rmtree(undisturbed.pack)
        write_pack(undisturbed.pack, num_windows=WINDOWS, shards=SHARDS)
        assert undisturbed.train() == 0, undisturbed.log()
        return weights(undisturbed)


def await_steps(made: Job, line: Line, count: int) -> int:
    """Wait until training has used up what has arrived; returns its steps."""
    line.let_through(count)
    made.wait_until(lambda: len(made.steps()) > 0)
    steps = -1
    while steps != (steps := len(made.steps())):
        time.sleep(1.5)
    return steps


def test_training_starts_with_the_first_shards_and_waits_for_the_others(made: Job, whole: str) -> None:
    line = Line(made)
    process = made.start()
    began = await_steps(made, line, GROUP_SHARDS)
    assert process.poll() is None and 0 < began < made.spec.optimization.total_steps(num_rows=WINDOWS, world_size=1)
    waited_since = time.time()
    time.sleep(2.0)
    made.wait_until(lambda: made.heartbeat()["progress_at"] > waited_since)  # waiting for data is no stall
    line.let_through(SHARDS)
    assert process.wait(timeout=120) == 0, made.log()
    slowest = max(made.steps(), key=lambda line: line["data_s"])
    assert slowest["data_s"] > 2.0 and slowest["step"] == began + 1, "the wait is the data's, in the step that needed it"
    assert weights(made) == whole


def test_a_stop_does_not_wait_for_a_shard(made: Job, whole: str) -> None:
    line = Line(made)
    process = made.start()
    began = await_steps(made, line, GROUP_SHARDS)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert process.wait(timeout=60) == EXIT_CODES[Outcome.PREEMPTED], made.log()
    assert time.monotonic() - asked < 10.0
    assert made.exit()["detail"]["committed_step"] == began
    line.let_through(SHARDS)
    assert made.train() == 0, made.log()
    assert weights(made) == whole


def test_a_damaged_shard_that_arrives_later_is_refused_by_its_name(made: Job) -> None:
    line = Line(made)
    pack = pack_loader.load(made.pack, made.spec, vocab_size=VOCAB)
    last = line.order[-1]
    damaged = line.aside / f"shard-{last:05d}.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    line.let_through(SHARDS)
    with pytest.raises(BadInput, match=f"{damaged.name} has digest .* fetch the pack again"):
        pack.train.read(last)


def test_a_bad_row_is_named_by_its_number_in_the_whole_pack(made: Job) -> None:
    Line(made).let_through(SHARDS)
    path = made.pack / f"shard-{SHARDS - 1:05d}.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1]["seq_lengths"] = [1]
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)
    manifest = json.loads((made.pack / "manifest.json").read_text())
    manifest["shards"][-1]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (made.pack / "manifest.json").write_text(json.dumps(manifest))
    pack = pack_loader.load(made.pack, made.spec, vocab_size=VOCAB)
    with pytest.raises(BadExample, match=f"train window {WINDOWS - 2} has seq_lengths"):
        pack.train.read(SHARDS - 1)


def test_a_shard_that_is_missing_and_not_on_its_way_is_refused_at_the_start(made: Job) -> None:
    Line(made)
    (made.pack / ARRIVING).unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        pack_loader.load(made.pack, made.spec, vocab_size=VOCAB)


def test_a_pack_without_any_label_is_refused(made: Job) -> None:
    manifest = json.loads((made.pack / "manifest.json").read_text()) | {"num_trained_tokens": 0}
    (made.pack / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadExample, match="no token of the pack carries loss"):
        pack_loader.load(made.pack, made.spec, vocab_size=VOCAB)
