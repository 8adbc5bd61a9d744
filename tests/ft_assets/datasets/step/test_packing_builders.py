"""One of many jobs builds a pack, wherever they run; the others wait, say for whom, and adopt it. A killed builder holds nobody up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform import settings as settings_module
from control_plane.platform.build_lock import lock_number, one_anywhere, one_on_this_machine
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core import layout
from core.base_models import Catalogue
from core.durable_files import KEPT_UNUSED_S
from engine.data.blocks.pass_progress import PassProgress
from ft_assets.datasets import step
from resources.database.engine import make_engine, make_logins
from resources.object_store import LocalObjectStore
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.background_worker import working

REPOSITORY = Path(__file__).parents[4]
NUM_ROWS = 3000
PACK = """
import json, sys, time
from pathlib import Path
from ft_assets.datasets import step as packing
from tests.ft_assets.datasets.step.test_packing_builders import platform_on

url, objects, home, model, tenant, job, go = sys.argv[1:]
platform = platform_on(url, Path(objects), Path(home), Path(model))
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.002)
seen, said = [], []
packed = packing.pack(platform, tenant, job, progress=lambda p: seen.append(p.stage), say=said.append)
print(json.dumps({"reused": packed.reused, "fingerprint": packed.manifest.fingerprint, "seen": seen, "said": said}))
"""
HOLD = """
import sys, time
from resources.database.engine import make_engine, make_logins
from control_plane.platform.build_lock import one_anywhere

with one_anywhere(make_engine(sys.argv[1]), "t", "pk_held", who="ftjob-holder"):
    print("held", flush=True)
    time.sleep(60)
"""


def platform_on(url: str, objects: Path, home: Path, model: Path) -> Platform:
    """A machine of its own (`home`) on the shared database and object store."""
    given = {"FT_HOME": str(home), "FT_DATABASE_URL": url, "FT_INFERENCE_URLS": "http://127.0.0.1:9"}
    return Platform(
        logins=make_logins(url),
        objects=LocalObjectStore(objects),
        models=Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(model), "license": "Apache-2.0"}, model)}),
        fleet=None,
        settings=settings_module.load(given),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture
def machine(new_database: Callable[[], str], model: Path, tmp_path: Path) -> Iterator[Callable[[str], Platform]]:
    """Makes platforms that share a database and an object store: one for each name of a machine."""
    url, made = new_database(), []

    def make(name: str) -> Platform:
        made.append(platform_on(url, tmp_path / "objects", tmp_path / name, model))
        return made[-1]

    yield make
    for platform in made:
        platform.logins.dispose()


def two_jobs(platform: Platform, path: Path) -> tuple[str, list[str]]:
    """A tenant with two jobs on the same file, each pinned to the dataset."""
    tenant, _ = tenants.create(platform, "packer", tier="standard")
    with path.open("rb") as stream:
        file = uploaded_files.create(platform, tenant.id, stream, filename="rows.jsonl", purpose="fine-tune")
    made = []
    for seed in (1, 2):
        request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id, "seed": seed})
        made.append(str(jobs.submit(platform, tenant.id, request).job.id))
        with working(platform):
            step.pin_dataset(platform, tenant.id, made[-1])
    return tenant.id, made


def tokenized(seen: list[Any]) -> bool:
    return "tokenizing" in [s.stage if isinstance(s, PassProgress) else s for s in seen]


@pytest.mark.parametrize(
    "homes",
    [
        pytest.param(("a", "b"), id="two machines", marks=pytest.mark.slow),
        pytest.param(("a", "a"), id="one machine", marks=pytest.mark.slow),
    ],
)
def test_of_two_jobs_that_start_at_once_one_tokenizes(
    machine: Callable[[str], Platform], model: Path, write_chat_rows: Callable[..., Path], tmp_path: Path, homes: tuple[str, str]
) -> None:
    first = machine("a")
    tenant, both = two_jobs(first, write_chat_rows(NUM_ROWS))
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    url = first.engine.url.render_as_string(hide_password=False)
    shared = [url, str(tmp_path / "objects")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PACK, *shared, str(tmp_path / home), str(model), tenant, job, str(tmp_path / "go")],
            env=env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for home, job in zip(homes, both, strict=True)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    ended = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(e["reused"] for e in ended) == [False, True]
    assert sorted(tokenized(e["seen"]) for e in ended) == [False, True]
    assert ended[0]["fingerprint"] == ended[1]["fingerprint"]
    builder = both[0] if not ended[0]["reused"] else both[1]
    waiter = next(e for e in ended if e["reused"])
    said = waiter["said"]  # nothing, if it came too late to wait; no name, if it came before the holder had written one
    assert not said or builder in said[0] or "another process" in said[0], "the one that waited did not say for whom"


def test_a_second_job_tokenizes_nothing_whatever_became_of_the_files(
    machine: Callable[[str], Platform], write_chat_rows: Callable[..., Path]
) -> None:
    here = machine("a")
    tenant, (one, two) = two_jobs(here, write_chat_rows(150))
    seen: list[PassProgress] = []
    first = step.pack(here, tenant, one, progress=seen.append)
    assert not first.reused and tokenized(seen)
    seen.clear()
    assert step.pack(here, tenant, two, progress=seen.append).reused and not seen

    elsewhere = machine("b")  # its cache is empty
    again = step.pack(elsewhere, tenant, two, progress=seen.append)
    assert again.reused and again.manifest == first.manifest and not seen

    directory = elsewhere.settings.work_dir / "packs" / tenant / first.manifest.fingerprint
    shard = directory / first.manifest.shards[0]["name"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert step.pack(elsewhere, tenant, two, progress=seen.append).reused and not seen
    assert shard.read_bytes() == whole, "fetched again"

    key = f"{layout.pack_prefix(tenant, first.manifest.fingerprint)}/{shard.name}"
    here.objects.put_bytes(key, b"torn")
    third = step.pack(machine("c"), tenant, two, progress=seen.append)
    assert not third.reused and tokenized(seen)
    assert third.manifest == first.manifest
    assert here.objects.get_bytes(key) == whole, "the store has it whole again"


@pytest.mark.slow
def test_a_builder_removes_the_packs_that_its_machine_has_not_used_for_a_day(
    machine: Callable[[str], Platform], write_chat_rows: Callable[..., Path]
) -> None:
    here = machine("a")
    tenant, (one, _) = two_jobs(here, write_chat_rows(150))
    packs = here.settings.work_dir / "packs"
    long_ago = time.time() - KEPT_UNUSED_S - 60
    for name, used_at in ((f"{tenant}/pk_old", long_ago), ("gone-tenant/pk_old", long_ago), (f"{tenant}/pk_used", time.time())):
        (packs / name).mkdir(parents=True)
        os.utime(packs / name, (used_at, used_at))
    built = step.pack(here, tenant, one).manifest.fingerprint
    assert sorted(str(path.relative_to(packs)) for path in packs.glob("*/pk_*")) == sorted([f"{tenant}/{built}", f"{tenant}/pk_used"])


def test_a_lock_is_held_against_other_processes_and_goes_with_a_killed_holder(new_database: Callable[[], str]) -> None:
    url = new_database()
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, url], env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    engine = make_engine(url)
    said: list[str] = []
    got = threading.Event()

    def wait_for_it() -> None:
        with one_anywhere(engine, "t", "pk_held", who="ftjob-waiter", say=said.append):
            got.set()

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    with one_anywhere(engine, "t", "pk_other", who="ftjob-other", say=said.append):
        pass  # another key is free
    assert not got.wait(1.0)
    assert len(said) == 1 and "ftjob-holder" in said[0]
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert got.wait(60.0)
    waiter.join()
    assert "waited" in said[-1]
    with engine.connect() as conn:
        assert conn.execute(sa.text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")).scalar() == 0
        names = conn.execute(sa.text("SELECT application_name FROM pg_stat_activity")).scalars().all()
    assert not [n for n in names if "ftjob" in (n or "")]
    engine.dispose()


def test_keys_are_told_apart_by_their_parts() -> None:
    assert lock_number("a", "bc") != lock_number("ab", "c")
    assert -(2**63) <= lock_number("tenant", "pk_1") < 2**63
    assert lock_number("tenant", "pk_1") == lock_number("tenant", "pk_1")


def test_on_one_machine_the_lock_is_a_file_that_names_its_holder(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with one_on_this_machine(tmp_path / "pack", who="two", say=said.append):
            order.append("two")

    waiter = threading.Thread(target=second)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_on_this_machine(tmp_path / "pack", who="one"))
        waiter.start()
        time.sleep(0.3)
        order.append("one")
    waiter.join(timeout=60)
    assert order == ["one", "two"]
    assert said[0].startswith(f"waiting for pack: one (process {os.getpid()}) builds it")
