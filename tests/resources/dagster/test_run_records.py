"""Forked runs are found and ended by their records, whatever became of the server that forked them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from dagster._serdes import serialize_value

from control_plane.platform import settings as settings_module
from control_plane.platform.settings import Settings
from core.errors import Unavailable
from deploy.local import lifecycle
from deploy.local.supervisor import lock
from deploy.local.supervisor.lock import StackFiles
from deploy.local.supervisor.stack_report import Phase, ServiceReport, ServiceState, StackReport
from resources.atomic_write import write_atomically
from resources.dagster.run_records import (
    address_file,
    announced_socket,
    check_owned,
    living,
    read_record,
    record_path,
    runs_dir,
    socket_path,
)
from resources.dagster.run_server import RunServer
from resources.launcher.process_identity import identity
from resources.launcher.workload_watcher import write_json

RUNS = "open('/proc/{pid}/stat').read().split()[2] != 'Z'"
"""Whether a process has not ended, as Python."""
SLEEP = [sys.executable, "-S", "-E", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a home whose database is elsewhere."""
    made = settings_module.load({"FT_HOME": str(tmp_path), "FT_DATABASE_URL": "postgresql://ft@db.example/ft"})
    runs_dir(made).mkdir()
    return made


@pytest.fixture
def record(settings: Settings) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process and records it as a run."""
    started: list[subprocess.Popen[bytes]] = []

    def go(run_id: str, stack: str = "s", instance_ref: str = "", known: str | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(SLEEP, start_new_session=True)
        started.append(process)
        body = {"pid": process.pid, "identity": known or identity(process.pid), "stack": stack, "instance_ref": instance_ref}
        write_json(record_path(runs_dir(settings), run_id), body)
        return process

    yield go
    for process in started:
        process.kill()
        process.wait()


def until(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not seen in {timeout_s} s"
        time.sleep(0.02)


def test_no_run_survives_a_stack_whose_run_server_could_not_end_them(
    settings: Settings, record: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run, bystander = record("one"), record("two", known="1@another-boot")
    assert lifecycle.supervisor(settings, lambda _report: None).when_idle() is None
    assert run.wait(60) == -signal.SIGTERM
    assert bystander.poll() is None, "its number was used again"


def test_down_ends_the_runs_of_a_stack_that_was_killed(settings: Settings, record: Callable[..., subprocess.Popen[bytes]]) -> None:
    run = record("one")
    lifecycle.down(settings)
    assert run.wait(60) == -signal.SIGTERM


def test_the_next_stack_ends_the_runs_of_one_that_was_killed_and_says_so(
    settings: Settings, record: Callable[..., subprocess.Popen[bytes]]
) -> None:
    files, run = StackFiles(home=settings.home), record("one")
    write_atomically(files.report, StackReport(stack_id="s", phase=Phase.READY, pid=1, identity="1@gone", since=1.0, services=()).to_json())
    assert "ended 1 of its runs" in (lock.clean_stale(files) or "")
    assert run.wait(60) == -signal.SIGTERM


def test_the_runs_of_a_killed_stack_end_while_its_database_still_serves(settings: Settings, tmp_path: Path) -> None:
    database = subprocess.Popen(SLEEP, start_new_session=True)
    ends = f"import os, signal, time; signal.signal(15, lambda *_: os._exit(7 if {RUNS} else 8)); print(flush=True); time.sleep(600)"
    run = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", ends.format(pid=database.pid)], start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert run.stdout is not None and run.stdout.readline()
        body = {"pid": run.pid, "identity": identity(run.pid), "stack": "s", "instance_ref": ""}
        write_json(record_path(runs_dir(settings), "one"), body)
        first = ServiceReport(name="postgres", state=ServiceState.UP, pid=database.pid, identity=identity(database.pid))
        stale = StackReport(stack_id="s", phase=Phase.READY, pid=1, identity="1@gone", since=1.0, services=(first,))
        write_atomically(StackFiles(home=settings.home).report, stale.to_json())
        assert lifecycle.down(settings).leftovers == ("postgres",)
        assert (run.wait(60), database.wait(60)) == (7, -signal.SIGTERM)
    finally:
        for process in (run, database):
            process.kill()
            process.communicate()


def test_the_runs_of_a_server_without_a_stack_are_ended_by_that_server_alone(
    settings: Settings, record: Callable[..., subprocess.Popen[bytes]]
) -> None:
    run = record("one", stack="")
    lifecycle.down(settings)
    assert lifecycle.supervisor(settings, lambda _report: None).when_idle() is None
    assert run.poll() is None
    with socket.socket(socket.AF_UNIX) as listener:
        RunServer(directory=runs_dir(settings), stack="", ending=True).serve(listener)
    assert run.wait(60) == -signal.SIGTERM


def test_a_child_that_writes_no_record_is_ended_and_the_server_goes_on(settings: Settings) -> None:
    server = os.fork()
    if not server:
        code = 1
        try:
            os.register_at_fork(after_in_child=lambda: time.sleep(600))
            asked = RunServer(directory=runs_dir(settings), stack="s", record_timeout_s=0.2)
            try:
                asked._start("one", "no reference", ())
            except TimeoutError:
                (pid,) = asked.children
                code = 0 if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(server, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_run_has_its_record_also_when_its_server_is_killed_as_it_forks(settings: Settings) -> None:
    directory = runs_dir(settings)
    server = os.fork()
    if not server:
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL))
        RunServer(directory=directory, stack="s")._start("one", "no reference: the run fails at once", ())
        os._exit(0)
    _, status = os.waitpid(server, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    until(lambda: read_record(directory, "one"))
    until(lambda: not living(directory))


def test_a_server_reports_runs_that_it_did_not_fork(settings: Settings, record: Callable[..., subprocess.Popen[bytes]]) -> None:
    (settings.home / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(settings.home / "dagster")) as instance:
        run = create_run_for_test(instance, job_name="prepare", status=dg.DagsterRunStatus.STARTED)
        process = record(run.run_id, instance_ref=serialize_value(instance.get_ref()))
        server = RunServer(directory=runs_dir(settings), stack="s")
        server._take_over()
        server._report_dead_orphans()
        assert living(runs_dir(settings)) == {run.run_id: process.pid}
        process.kill()
        process.wait()
        server._report_dead_orphans()
        assert read_record(runs_dir(settings), run.run_id) is None
        (reporter,) = server.children
        os.waitpid(reporter, 0)
        ended = instance.get_run_by_id(run.run_id)
        assert ended is not None
        assert ended.status is dg.DagsterRunStatus.FAILURE


def test_a_server_ends_the_runs_of_another_stack(settings: Settings, record: Callable[..., subprocess.Popen[bytes]]) -> None:
    run = record("one", stack="an earlier one")
    RunServer(directory=runs_dir(settings), stack="s")._take_over()
    assert run.wait(60) == -signal.SIGKILL
    assert read_record(runs_dir(settings), "one") is None


@pytest.fixture
def long_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Of a home whose path is too long for a socket below it."""
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    yield settings_module.load({"FT_HOME": str(tmp_path / ("x" * 100))})
    shutil.rmtree(short)


def test_a_socket_outside_the_home_is_in_a_directory_of_this_user_alone(long_home: Settings) -> None:
    directory = socket_path(long_home).parent
    with pytest.raises(Unavailable, match="does not exist"):
        check_owned(long_home, directory / "a.sock")
    directory.mkdir(mode=0o700)
    check_owned(long_home, directory / "a.sock")
    directory.chmod(0o770)
    with pytest.raises(Unavailable, match="mode 770"):
        check_owned(long_home, directory / "a.sock")
    directory.rmdir()
    directory.symlink_to("/tmp")
    with pytest.raises(Unavailable, match="not private"):
        check_owned(long_home, directory / "a.sock")


def test_a_runtime_directory_that_does_not_exist_is_not_used(long_home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/not-there")
    assert socket_path(long_home).parent == Path(f"/tmp/ft-runs-{os.getuid()}")


def test_who_asks_for_a_run_finds_the_socket_that_the_server_chose(long_home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = socket_path(long_home)
    runs_dir(long_home).mkdir(parents=True)
    address_file(long_home).write_text(f"{chosen}\n")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert announced_socket(long_home) == chosen != socket_path(long_home)
    address_file(long_home).unlink()
    address_file(long_home).symlink_to("/etc/hostname")
    assert announced_socket(long_home) == socket_path(long_home), "what somebody else may have written is not read"


def test_somebody_elses_directory_is_refused(long_home: Settings) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    directory = socket_path(long_home).parent
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, 12345)
    with pytest.raises(Unavailable, match="owner 12345"):
        check_owned(long_home, directory / "a.sock")
