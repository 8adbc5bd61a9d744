"""The home is its owner's alone: checked as another user where the tests run as root, by modes where they do not."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2
import pytest

from core.errors import InvalidRequest
from deploy.local.private_home import make_private
from resources.database import embedded
from resources.object_store import LocalObjectStore

NOBODY = 65534


@pytest.fixture
def home() -> Iterator[Path]:
    """Below /tmp, which other users may read; the process's umask is put back."""
    before = os.umask(0o022)
    directory = Path(tempfile.mkdtemp(prefix="ft-home-"))
    yield directory / "home"
    os.umask(before)
    shutil.rmtree(directory)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_home_is_created_for_its_owner_alone_and_so_is_all_in_it(home: Path) -> None:
    assert make_private(home) is None
    LocalObjectStore(home / "objects").put_bytes("tenants/a/x", b"secret")
    (home / "logs").mkdir()
    subprocess.run([sys.executable, "-c", "open('child.log', 'w').write('x')"], cwd=home / "logs", check=True)
    found = {p: mode(p) for p in (home, *home.rglob("*"))}
    assert len(found) >= 5
    assert not {p: oct(m) for p, m in found.items() if m & 0o077}


def test_an_open_home_is_closed_with_a_word_and_keeps_its_content(home: Path) -> None:
    (home / "logs").mkdir(parents=True)
    (home / "endpoints.json").write_text("{}")
    home.parent.chmod(0o755)
    home.chmod(0o755)
    said = make_private(home)
    assert said is not None
    assert "was open to other users (mode 755, 3 entries)" in said
    assert [mode(home), mode(home / "logs"), mode(home / "endpoints.json")] == [0o700, 0o700, 0o600]
    assert make_private(home) is None, "said once"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_home_of_another_user_is_refused_with_the_way_out(home: Path) -> None:
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    with pytest.raises(InvalidRequest, match=rf"belongs to user {NOBODY}.*chown -R 0 {home}") as refused:
        make_private(home)
    assert refused.value.code == "home_not_private"


def as_another_user(work: Callable[[], object]) -> str:
    """What `work` returns in a process of another user, as text; forked, because that user may not read this Python."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(said, str(work()).encode()[:4096])
        finally:
            os._exit(0)
    os.close(said)
    with os.fdopen(heard) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


def readable(paths: list[Path]) -> list[Path]:
    found = []
    for path in paths:
        try:
            path.read_bytes() if path.is_file() else list(path.iterdir())
        except PermissionError:
            continue
        found.append(path)
    return found


def refusal(directory: Path) -> str:
    try:
        psycopg2.connect(host=str(directory), user="postgres", dbname="postgres")
    except psycopg2.OperationalError as error:
        return str(error)
    return "connected"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_with_a_running_database_another_user_reads_nothing_and_connects_to_nothing(home: Path) -> None:
    home.parent.chmod(0o755)
    make_private(home)
    LocalObjectStore(home / "objects").put_bytes("tenants/a/x", b"secret")
    server = embedded.start(home / "postgres")
    try:
        above = mode(home.parent)
        paths = [home, *home.rglob("*")]
        assert any(p.name == "x" for p in paths)
        assert any(p.name == "PG_VERSION" for p in paths)
        assert as_another_user(lambda: readable(paths)) == "[]"
        assert "Permission denied" in as_another_user(lambda: refusal(home / "postgres"))
        assert mode(home) & 0o067 == 0, oct(mode(home))
        assert above == 0o755
        assert stat.S_IMODE((home / "postgres" / embedded.SOCKET_NAME).stat().st_mode) == 0o700
        psycopg2.connect(host=str(home / "postgres"), user="postgres", dbname="postgres").close()
        assert make_private(home) is None, "what the database needs is not reported as open"
    finally:
        embedded.stop(server)
    server = embedded.start(home / "postgres")
    assert mode(home) & 0o067 == 0, "also after a second start"
    embedded.stop(server)
