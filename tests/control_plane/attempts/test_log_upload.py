"""A training's log while it is written: in order, once, without credentials, whoever ships it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from control_plane.attempts.log_upload import MAX_LOG_BYTES, PIECE_BYTES, LogShipper
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.attempts import service as attempts
from control_plane.jobs import job_logs
from control_plane.jobs.job_logs import pieces, read_pieces
from control_plane.tenants import service as tenants
from ft_assets.errors import NotFound, Unavailable
from ft_assets.layout import attempt_prefix
from ft_assets.retries import RetryPolicy
from ft_assets.telemetry.redaction import without_secrets
from resources.launcher import LocalLauncher
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import Job, until
from tests.support.processes.scripted_training import Scenario

PREFIX = "tenants/t/jobs/j/attempts/a1"
SHORT = RetryPolicy(give_up_s=2.0)


class World:
    """A workload's own log, and what is stored of it."""

    def __init__(self, root: Path) -> None:
        self.objects = LocalObjectStore(root / "objects")
        self.launcher = LocalLauncher(root / "launcher")
        self._log = root / "launcher" / "j-a1" / "log"
        self._log.parent.mkdir(parents=True)

    def write(self, data: bytes) -> None:
        with self._log.open("ab") as out:
            out.write(data)

    def shipper(self, objects: LocalObjectStore | None = None) -> LogShipper:
        return LogShipper(objects or self.objects, self.launcher, workload="j-a1", prefix=PREFIX, every_s=0.01)

    def stored(self) -> bytes:
        return read_pieces(self.objects, pieces(self.objects, PREFIX), 0)[1]

    def whole(self) -> bytes:
        return self.objects.get_bytes(f"{PREFIX}/train.log")

    def readable(self) -> bytes:
        return without_secrets(self._log.read_bytes().decode(errors="replace")).encode()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def lines(rng: random.Random, num_bytes: int) -> bytes:
    """Output as trainings write it: lines, bars that end with a carriage return, long lines, credentials, broken UTF-8."""
    made = bytearray()
    while len(made) < num_bytes:
        text = rng.choice(
            ["loss 0.1", "token=hunter2 is used", "postgresql://u:pw@host/db", "\xe4".encode("latin-1").decode("latin-1"), ""]
        )
        made += text.encode() + b"." * rng.choice([0, 10, 3000]) + rng.choice([b"\n", b"\n", b"\r"]) + rng.choice([b"", b"\xff\n"])
    return bytes(made)


@pytest.mark.parametrize("seed", range(2))
def test_pieces_are_the_beginning_of_the_log_at_any_time_and_in_the_end_all_of_it(world: World, seed: int) -> None:
    rng, shipper = random.Random(seed), world.shipper()
    sizes = set()
    for _ in range(16):
        data = lines(rng, rng.choice([1, 500, 100_000, 100_000]))
        cut = rng.randrange(len(data) + 1)
        world.write(data[:cut])
        shipper.ship()
        seen = world.stored()
        assert world.readable().startswith(seen)
        sizes.add(len(pieces(world.objects, PREFIX)))
        world.write(data[cut:])
        if rng.random() < 0.2:
            shipper = world.shipper()  # whoever takes over
    assert max(sizes) > 2
    world.write(b"the last line has no end")
    shipper.finish(SHORT)
    assert world.whole() == world.readable()
    assert b"hunter2" not in world.whole() and b"u:pw" not in world.whole() and b"token=***" in world.whole()
    assert pieces(world.objects, PREFIX) == []


def test_two_who_ship_the_same_log_store_it_once(world: World) -> None:
    one, other = world.shipper(), world.shipper()
    for i in range(40):
        world.write(b"%d " % i + b"x" * 20_000 + b"\n")
        (one if i % 3 else other).ship()
    other.ship()
    one.ship()
    assert world.stored() == world.readable()
    one.finish(SHORT)
    other.finish(SHORT)
    assert world.whole() == world.readable()


def test_a_line_longer_than_a_piece_is_stored_too(world: World) -> None:
    shipper = world.shipper()
    world.write(b"short\n" + b"y" * (3 * PIECE_BYTES))
    shipper.ship()
    assert len(world.stored()) >= 2 * PIECE_BYTES
    shipper.finish(SHORT)
    assert world.whole() == world.readable()


def test_of_a_very_long_log_the_end_is_kept_and_offsets_stay(world: World) -> None:
    shipper = world.shipper()
    for _ in range(27):
        world.write(b"z" * 999 + b"\n" + b"w" * 199_999 + b"\n")
        shipper.ship()
        assert len(world.stored()) < MAX_LOG_BYTES + 2 * PIECE_BYTES
    begins, data = read_pieces(world.objects, pieces(world.objects, PREFIX), 0)
    assert begins > 0
    assert world.readable()[begins:] == data
    shipper.finish(SHORT)
    begins = int(world.objects.get_bytes(f"{PREFIX}/train.log.begins"))
    assert world.readable()[begins:] == world.whole()
    assert len(world.whole()) <= MAX_LOG_BYTES


def test_a_store_that_is_away_for_a_while_misses_nothing(world: World, tmp_path: Path) -> None:
    class Away(LocalObjectStore):
        is_away = True

        def put_bytes(self, key: str, data: bytes) -> None:
            if self.is_away:
                raise Unavailable("the object store is away", code="object_store_unavailable")
            super().put_bytes(key, data)

    store = Away(tmp_path / "objects")
    shipper = world.shipper(store)
    shipper.start()
    for i in range(20):
        world.write(b"line %d\n" % i)
    store.is_away = False
    until(lambda: world.stored() == world.readable())
    shipper.finish(SHORT)
    assert world.whole() == world.readable()
    store.is_away = True
    late = World(tmp_path / "late").shipper(Away(tmp_path / "nowhere"))
    late.finish(RetryPolicy(first_s=0.01, most_s=0.01, give_up_s=0.05))  # nothing is raised: no job waits for its log


@pytest.fixture
def followed(new_job: Callable[..., Job], serve: Callable[[ASGIApp], str]) -> tuple[Job, httpx.Client]:
    job = new_job()
    key = tenants.create_key(job.platform, job.tenant, name="k", scopes=["read"]).secret
    api = serve(create_app(job.platform))
    return job, httpx.Client(base_url=f"{api}/v1/fine_tuning/jobs/{job.id}", headers={"authorization": f"Bearer {key}"}, timeout=30)


def test_a_log_is_streamed_while_training_runs_and_taken_up_where_it_broke_off(followed: tuple[Job, httpx.Client]) -> None:
    job, client = followed
    with client:
        missing = client.get("/logs")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "log_not_found")
        with client.stream("GET", "/logs", params={"follow": "true"}) as answer:  # begins before the attempt does
            assert answer.headers["content-type"].startswith("text/plain")
            held, thread, endings = job.following(Scenario(steps=6, hold_at=3, says="password=hunter2"))
            arriving = answer.iter_lines()
            assert [next(arriving) for _ in range(3)] == [f"step {i} password=***" for i in (1, 2, 3)]
            assert not endings
            assert job.platform.objects.exists(f"{attempt_prefix(job.tenant, job.id, 1)}/train.log") is False
        so_far = client.get("/logs")  # the reader is gone, the training is not
        assert (so_far.headers["x-log-attempt"], so_far.headers["x-log-offset"]) == ("1", "0")
        (job.work_dir / "go").touch()
        with client.stream("GET", "/logs", params={"follow": "true", "attempt": 1, "offset": len(so_far.content)}) as answer:
            assert answer.headers["x-log-offset"] == str(len(so_far.content))
            until(lambda: endings)
            attempts.finish(job.platform, held, endings[0])
            rest = answer.read()
        thread.join(timeout=20)
        assert (so_far.content + rest).decode().splitlines() == [f"step {i} password=***" for i in range(1, 7)]
        assert client.get("/logs").content == so_far.content + rest
        assert client.get("/logs", params={"offset": 10**9}).content == b""
        for wrong in ({"attempt": 2}, {"attempt": 0}, {"attempt": 2, "follow": "true"}):
            assert client.get("/logs", params=wrong).status_code == 404, wrong


def test_no_log_of_another_tenant_is_read(new_job: Callable[..., Job]) -> None:
    job = new_job()
    with pytest.raises(NotFound, match="no fine-tuning job"):
        job_logs.read(job.platform, "somebody-else", job.id)
    with pytest.raises(NotFound, match="no log"):
        job_logs.read(job.platform, job.tenant, job.id)
