"""A training's log while it is written: in order, once, without credentials, whenever it is sent again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agent.api_client import ApiClient
from agent.messages import HEARTBEAT_S, Exit, Facts, Heartbeat, HeartbeatAnswer
from agent.reporter import Reporter, State
from agent.uploads.log_upload import PIECE_BYTES, LogUpload
from control_plane.attempts.claims import Claim
from control_plane.attempts.tables import agents as agents_table
from control_plane.jobs import job_logs
from control_plane.jobs.job_logs import MAX_LOG_BYTES, pieces, read_pieces
from control_plane.platform.context import Platform
from core.errors import Unavailable
from core.layout import attempt_prefix
from core.retries import RetryPolicy
from core.telemetry.redaction import without_secrets
from resources.object_store import LocalObjectStore


class Away(LocalObjectStore):
    """It takes no log while `is_away`."""

    is_away = False

    def put_bytes(self, key: str, data: bytes) -> None:
        if self.is_away and "/log/" in key:
            raise Unavailable("the object store is away", code="object_store_unavailable")
        super().put_bytes(key, data)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Away:
    return Away(tmp_path_factory.mktemp("store") / "objects")


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], store: Away) -> Platform:
    return replace(new_platform(), objects=store)


def send_all(upload: LogUpload, *, last: bool = False) -> None:
    while upload.send(last=last):
        pass


class World:
    """The output of a training process, and what is stored of it."""

    def __init__(self, path: Path, store: Away, held: Claim, api: ApiClient) -> None:
        self.objects, self.api = store, api
        self.prefix = attempt_prefix(held.tenant, held.job_id, held.attempt)
        self._log = path

    def write(self, data: bytes) -> None:
        with self._log.open("ab") as out:
            out.write(data)

    def upload(self) -> LogUpload:
        return LogUpload(self.api, self._log)

    def finish(self, upload: LogUpload) -> None:
        """What the agent does at the end, and then the control plane."""
        send_all(upload, last=True)
        job_logs.finish(self.objects, self.prefix)

    def stored(self) -> bytes:
        return read_pieces(self.objects, pieces(self.objects, self.prefix), 0)[1]

    def whole(self) -> bytes:
        return self.objects.get_bytes(f"{self.prefix}/train.log")

    def readable(self) -> bytes:
        return without_secrets(self._log.read_bytes().decode(errors="replace")).encode()


@pytest.fixture
def world(tmp_path: Path, store: Away, held: Claim, api: ApiClient) -> World:
    store.is_away = False
    return World(tmp_path / "train-a1.log", store, held, api)


def lines(rng: random.Random, num_bytes: int) -> bytes:
    """Output as trainings write it: lines, bars that end with a carriage return, long lines, credentials, broken UTF-8."""
    made = bytearray()
    while len(made) < num_bytes:
        text = rng.choice(
            ["loss 0.1", "token=hunter2 is used", "postgresql://u:pw@host/db", "\xe4".encode("latin-1").decode("latin-1"), ""]
        )
        made += text.encode() + b"." * rng.choice([0, 10, 3000]) + rng.choice([b"\n", b"\n", b"\r"]) + rng.choice([b"", b"\xff\n"])
    return bytes(made)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pieces_are_the_beginning_of_the_log_at_any_time_and_in_the_end_all_of_it(world: World, seed: int) -> None:
    rng, upload = random.Random(seed), world.upload()
    sizes = set()
    for _ in range(16):
        data = lines(rng, rng.choice([1, 500, 100_000, 100_000]))
        cut = rng.randrange(len(data) + 1)
        world.write(data[:cut])
        send_all(upload)
        seen = world.stored()
        assert world.readable().startswith(seen)
        sizes.add(len(pieces(world.objects, world.prefix)))
        world.write(data[cut:])
        if rng.random() < 0.2:
            upload = world.upload()  # from the first byte again
    assert max(sizes) > 2
    world.write(b"the last line has no end")
    world.finish(upload)
    assert world.whole() == world.readable()
    assert b"hunter2" not in world.whole() and b"u:pw" not in world.whole() and b"token=***" in world.whole()
    assert pieces(world.objects, world.prefix) == []


def test_progress_bar_is_sent_while_it_grows(world: World) -> None:
    upload = world.upload()
    world.write(b"step 1\rstep 2\rste")
    send_all(upload)
    assert world.stored() == b"step 1\rstep 2\r"
    world.write(b"p 3\r")
    send_all(upload)
    assert world.stored() == b"step 1\rstep 2\rstep 3\r"


def test_a_log_that_is_sent_twice_is_stored_once(world: World) -> None:
    one, other = world.upload(), world.upload()
    for i in range(40):
        world.write(b"%d " % i + b"x" * 20_000 + b"\n")
        send_all(one if i % 3 else other)
    send_all(other)
    send_all(one)
    assert world.stored() == world.readable()
    world.finish(one)
    world.finish(other)
    assert world.whole() == world.readable()


def test_a_line_longer_than_a_piece_is_stored_too(world: World) -> None:
    upload = world.upload()
    world.write(b"short\n" + b"y" * (3 * PIECE_BYTES))
    assert upload.send(), "a piece at a time"
    send_all(upload)
    assert len(world.stored()) >= 2 * PIECE_BYTES
    world.finish(upload)
    assert world.whole() == world.readable()


def test_of_a_very_long_log_the_end_is_kept_and_offsets_stay(world: World) -> None:
    upload = world.upload()
    for _ in range(27):
        world.write(b"z" * 999 + b"\n" + b"w" * 199_999 + b"\n")
        send_all(upload)
        assert len(world.stored()) < MAX_LOG_BYTES + 2 * PIECE_BYTES
    begins, data = read_pieces(world.objects, pieces(world.objects, world.prefix), 0)
    assert begins > 0
    assert world.readable()[begins:] == data
    world.finish(upload)
    begins = int(world.objects.get_bytes(f"{world.prefix}/train.log.begins"))
    assert world.readable()[begins:] == world.whole()
    assert len(world.whole()) <= MAX_LOG_BYTES


def test_a_store_that_is_away_for_a_while_misses_nothing(world: World) -> None:
    world.objects.is_away = True
    upload = world.upload()
    for i in range(20):
        world.write(b"line %d\n" % i)
        if i % 5 == 0:
            with pytest.raises(Unavailable, match="away"):
                upload.send()
    assert world.stored() == b""
    world.objects.is_away = False
    send_all(upload)
    assert world.stored() == world.readable()
    world.finish(upload)
    assert world.whole() == world.readable()


def reporter(world: World, **fields: Any) -> Reporter:
    return Reporter(
        api=world.api,
        log_upload=world.upload(),
        state=lambda: State(phase="train", facts=Facts()),
        unsent=lambda _: (),
        hangs=lambda: None,
        **fields,
    )


def agent_row(platform: Platform, held: Claim) -> Any:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(agents_table).where(agents_table.c.job_id == held.job_id)).one()


def test_a_store_that_is_away_delays_no_heartbeat(world: World, platform: Platform, held: Claim) -> None:
    world.objects.is_away = True
    reporting, beats, began = (
        reporter(world, log_retries=RetryPolicy(give_up_s=0.0)),
        {agent_row(platform, held).heartbeat_at},
        time.monotonic(),
    )
    reporting.start()
    while len(beats) < 5:  # with None, before the first
        world.write(b"a line\n")
        beats.add(agent_row(platform, held).heartbeat_at)
        time.sleep(0.1)
    assert time.monotonic() - began < 6.5 * HEARTBEAT_S
    assert reporting.finish(Exit(exit_code=0, evidence=None, stop_reason=None))


def test_heartbeats_come_as_seldom_as_the_control_plane_says(world: World) -> None:
    times: list[float] = []

    class Seldom(ApiClient):
        def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
            times.append(time.monotonic())
            return HeartbeatAnswer(next_s=2.0 if len(times) < 3 else 60.0)

    world.api = Seldom("http://127.0.0.1:9", "t")
    reporting = reporter(world)
    reporting.start()
    while len(times) < 3:
        time.sleep(0.05)
    assert times[2] - times[0] >= 3.9, "two intervals, seen from within the calls"
    began = time.monotonic()
    reporting.log_retries = RetryPolicy(give_up_s=0.0)
    assert reporting.finish(Exit(exit_code=0, evidence=None, stop_reason=None)), "the end waits for no interval"
    assert time.monotonic() - began < 30.0


def test_no_job_waits_for_its_log(world: World, platform: Platform, held: Claim) -> None:
    world.write(b"a line\n")
    world.objects.is_away = True
    reporting = reporter(world, log_retries=RetryPolicy(give_up_s=0.1))
    reporting.start()
    assert reporting.finish(Exit(exit_code=0, evidence=None, stop_reason=None))
    assert agent_row(platform, held).exit["exit_code"] == 0
    assert world.stored() == b""
