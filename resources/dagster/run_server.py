"""Forks runs and services from a process that has imported everything: they start in a tenth of a second and share its memory.

``python -m resources.dagster.run_server`` listens at ``<FT_HOME>/runs/server.sock`` for :class:`.run_launcher.ForkingRunLauncher`.
Each run is a child in its own session: it survives a killed server, and the next server finds it by its record
(:mod:`resources.dagster.run_records`). On SIGTERM the server ends its runs first; the stack ends runs of a server that could not.

The server has one thread and no database connection, so children inherit neither. When a run dies without reporting its end, also one
that an earlier server forked, a child reports it to Dagster at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

from dagster import DagsterInstance, deserialize_value

from control_plane.platform.settings import load
from core.processes.forked_process import Forked, Order, become
from resources.atomic_write import write_atomically
from resources.dagster import forked_services
from resources.dagster.private_api import ModuleCodePointer, ReconstructableRepository, capture_interrupts, execute_run
from resources.dagster.run_records import (
    READY,
    address_file,
    check_owned,
    end_all,
    lives,
    read_record,
    record_path,
    runs_dir,
    send,
    socket_path,
)
from resources.launcher.process_identity import identity
from resources.launcher.workload_watcher import write_json

PRELOADED = "ft_assets.definitions"
"""Code location in ``workspace.yaml``; runs of other code locations are not forked."""
LATE_IMPORTS = ("resources.dagster.pooled_storage", "resources.dagster.run_launcher", "sensors.run_coordinator")
"""Modules that ``dagster.yaml`` names for a run's instance, so the code location does not import them."""
REAP_EVERY_S = 0.25
"""Seconds between checks for ended children while no request arrives."""
REQUEST_TIMEOUT_S = 5.0
RECORD_TIMEOUT_S = 5.0
"""Time for a child to write its record, which takes milliseconds; the server waits for it."""

log = logging.getLogger("resources.dagster.run_server")


@dataclass(kw_only=True)
class RunServer:
    """Forks a child for each run, and reaps it."""

    directory: Path
    stack: str
    """``FT_STACK_ID``. Runs of an earlier stack are ended: they lost their database with it."""
    children: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Run id and serialized instance reference by pid; the run id is empty for a child that reports a death."""
    ending: bool = False
    record_timeout_s: float = RECORD_TIMEOUT_S

    def serve(self, listener: socket.socket) -> None:
        """Serve until SIGTERM, then end the runs."""
        listener.settimeout(REAP_EVERY_S)
        self._take_over()
        while not self.ending:
            (self.directory / READY).touch()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self._reap()
                self._report_dead_orphans()
                continue
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_S)
                self._answer(listener, connection)
            self._reap()
        end_all(self.directory, of=lambda stack: stack == self.stack, meanwhile=self._reap)

    def _answer(self, listener: socket.socket, connection: socket.socket) -> None:
        output: list[int] = []
        try:
            request = json.loads(_line(connection, output))
            answer: dict[str, int | str] = {"pid": self._start_requested(request, output, listener, connection) if request else 0}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("request failed: %s: %s", type(error).__name__, error)
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in output:
                os.close(fd)
        with contextlib.suppress(OSError):  # the client is gone
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _start_requested(self, request: dict[str, Any], output: list[int], *sockets: socket.socket) -> int:
        if "service" not in request:
            return self._start(request["run_id"], request["instance_ref"], sockets)
        if select.select([sockets[-1]], [], [], 0)[0]:
            raise ValueError("the supervisor has not waited, and starts the service again")
        return forked_services.fork(Order(**request["service"]), output[0])

    def _start(self, run_id: str, instance_ref: str, sockets: tuple[socket.socket, ...]) -> int:
        known = read_record(self.directory, run_id)
        if known is not None and lives(known):
            return int(known["pid"])
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as recorded:

            def work() -> int:
                pid = os.getpid()
                body = {"pid": pid, "identity": identity(pid), "stack": self.stack, "instance_ref": instance_ref}
                write_json(record_path(self.directory, run_id), body)
                recorded.close()
                os.close(write_fd)
                return _run(run_id, instance_ref)

            try:
                pid = _fork(sockets, work)
                self.children[pid] = (run_id, instance_ref)
            finally:
                os.close(write_fd)
            ready, _, _ = select.select([recorded], [], [], self.record_timeout_s)  # end of file: record written, or child dead
            if not ready:
                os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"run {run_id} (pid {pid}) wrote no record within {self.record_timeout_s:.0f} s and was killed")
        return pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run_id, instance_ref = self.children.pop(pid, ("", ""))
            if not run_id:
                continue
            code = os.waitstatus_to_exitcode(status)
            record_path(self.directory, run_id).unlink(missing_ok=True)
            if code != 0 and not self.ending:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                reporter = _fork((), lambda i=run_id, r=instance_ref, p=pid, h=how: _report_dead(i, r, p, h))
                self.children[reporter] = ("", "")

    def _take_over(self) -> None:
        """Keep this stack's runs of an earlier server, and kill other stacks' runs."""
        for path in self.directory.glob("*.json"):
            known = read_record(self.directory, path.stem)
            if known is not None and known.get("stack") == self.stack:
                continue
            if known is not None and lives(known):
                send(known["pid"], signal.SIGKILL)
            path.unlink(missing_ok=True)

    def _report_dead_orphans(self) -> None:
        """Report dead runs that an earlier server forked, whose end ``waitpid`` does not return."""
        own = {run_id for run_id, _ in self.children.values()}
        for path in self.directory.glob("*.json"):
            run_id = path.stem
            known = None if run_id in own else read_record(self.directory, run_id)
            if known is None or lives(known):
                continue
            path.unlink(missing_ok=True)
            reporter = _fork((), lambda i=run_id, k=known: _report_dead(i, k["instance_ref"], k["pid"], "unknown exit status"))
            self.children[reporter] = ("", "")


def _line(connection: socket.socket, descriptors: list[int]) -> bytes:
    """Return a line; file descriptors that come with it are added to `descriptors`."""
    received = b""
    while not received.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(connection, 65536, 1)
        descriptors += found
        if not part:
            raise ValueError("the connection closed in the middle of the request")
        received += part
    return received


def _fork(sockets: tuple[socket.socket, ...], work: Any) -> int:
    """Fork a child in its own session that runs `work` and exits, whatever happens. Returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for held in sockets:
            held.close()
        code = work()
    except BaseException:
        log.exception("forked process failed")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _instance(ref: str) -> DagsterInstance:
    return DagsterInstance.from_ref(cast(Any, deserialize_value(ref)))


def _run(run_id: str, instance_ref: str) -> int:
    """Execute a run like ``dagster api execute_run``, without the imports."""
    with capture_interrupts(), _instance(instance_ref) as instance:
        return int(execute_run(run_id, instance, lambda _event: None, set_exit_code_on_failure=False))


def _report_dead(run_id: str, instance_ref: str, pid: int, how: str) -> int:
    with _instance(instance_ref) as instance:
        run = instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            instance.report_run_failed(run, message=f"the run's process (pid {pid}) ended with {how}")
    return 0


def preload() -> None:
    """Import the code location and the modules that runs import later, and build its repository, which Dagster caches."""
    for name in (*LATE_IMPORTS, *forked_services.MODULES):
        importlib.import_module(name)
    repository = ReconstructableRepository(ModuleCodePointer(PRELOADED, "defs", str(Path.cwd())))
    repository.get_reconstructable_job("prepare").get_definition()
    gc.collect()
    gc.freeze()  # a child's collector does not write to shared pages


def main() -> int:
    settings = load()
    directory, address = runs_dir(settings), socket_path(settings)
    directory.mkdir(parents=True, exist_ok=True)
    address.parent.mkdir(mode=0o700, exist_ok=True)
    check_owned(settings, address)
    server = RunServer(directory=directory, stack=os.environ.get("FT_STACK_ID", ""))

    def end(_signum: int, _frame: FrameType | None) -> None:
        server.ending = True

    preload()
    if threading.active_count() != 1:
        log.warning("an import started a thread, whose locks may be held in every run: %s", threading.enumerate())
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        listener.bind(str(address))
        os.umask(before)
        listener.listen(64)
        write_atomically(address_file(settings), f"{address}\n")
        log.info("pid %d forks runs and services; listening on %s", os.getpid(), address)
        server.serve(listener)
    address.unlink(missing_ok=True)
    return 0


def _main_or_service() -> int:
    try:
        return main()
    except Forked as forked:
        service = forked
    become(service.order, service.output)
    return 0


if __name__ == "__main__":
    sys.exit(_main_or_service())
