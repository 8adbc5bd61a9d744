"""Implements ``ft up``, ``ft down``, ``ft status`` and ``ft env``; the command line shows the results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.platform.settings import Settings, load
from core.errors import FtError, Unavailable, from_dict
from deploy.local import private_home, stack_services, workloads
from deploy.local.supervisor import lock, stack_report
from deploy.local.supervisor.lock import StackFiles
from deploy.local.supervisor.stack_report import Phase, ServiceReport, ServiceState, StackReport
from deploy.local.supervisor.stack_supervisor import Supervisor
from resources.dagster import forked_services, run_records
from resources.launcher.process_identity import alive

DOWN_TIMEOUT_S = 130.0
"""Longer than a workload's checkpoint (30 s), the end of runs (9 s) and the services' grace periods in sequence (10 to 20 s each)."""

log = logging.getLogger(__name__)
OnReport = Callable[[StackReport], None]


def load_settings() -> Settings:
    """Load the stack's settings. URLs of its own databases, set in a shell that ran ``ft env``, do not count as external."""
    return stack_services.normalised(load())


def supervisor(settings: Settings, on_report: OnReport) -> Supervisor:
    """Create the supervisor of the platform's services, which adopts those that the run server forks."""
    forked_services.adopt_orphans()
    return Supervisor(
        home=settings.home,
        services=stack_services.services(settings),
        env=stack_services.process_env(settings),
        cwd=stack_services.project_root(),
        on_report=on_report,
        limits=stack_services.limits(settings),
        adopts=True,
        extra_endpoints=lambda: {"database": stack_services.shown_database(settings), **settings.where_objects_are()},
        when_idle=lambda: _stop_runs_and_workloads(settings),  # Dagster has ended and cannot start them again
        when_ended=lambda: _stop_model_servers(settings),  # the worker has ended
    )


def _stop_runs_and_workloads(settings: Settings) -> str | None:
    """End runs that their server left behind, then workloads, which the runs watch."""
    run_records.end_all(run_records.runs_dir(settings))
    return workloads.describe_stopped(settings, workloads.stop_all(settings)) or None


def _stop_model_servers(settings: Settings) -> None:
    from resources.inference import local_servers  # cryptography is slow to import

    local_servers.stop_all(settings)


def _prepare(settings: Settings) -> None:
    private_home.check_restored(settings.home)
    closed = private_home.make_private(settings.home)
    if closed:
        log.warning("%s", closed)
    with lock.held(StackFiles(home=settings.home)):  # the files of a stack that runs stay as they are
        stack_services.prepare_home(settings)


def up(settings: Settings, on_report: OnReport) -> StackReport:
    """Run the stack in this process until it is stopped."""
    _prepare(settings)
    return supervisor(settings, on_report).run()


def up_detached(settings: Settings, on_report: OnReport) -> StackReport:
    """Start the stack in a daemon and return when it is ready or has failed."""
    _prepare(settings)
    log_file = StackFiles(home=settings.home).logs / "supervisor.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    env = {**os.environ, "FT_HOME": str(settings.home)}
    with log_file.open("ab") as out:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "deploy.local", "--report-fd", str(write_fd)], env=env, cwd=stack_services.project_root(),
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(write_fd,), start_new_session=True,
        )  # fmt: skip
    os.close(write_fd)
    try:
        return _follow(read_fd, on_report, log=str(log_file))
    except KeyboardInterrupt:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
        raise


def _follow(read_fd: int, on_report: OnReport, *, log: str) -> StackReport:
    """Pass on the daemon's reports until the stack is ready or has ended; returns the last."""
    last: StackReport | None = None
    with os.fdopen(read_fd, encoding="utf-8") as lines:
        for line in lines:
            data = json.loads(line)
            if "refused" in data:
                raise from_dict(data["refused"])
            last = stack_report.from_json(line)
            on_report(last)
            if last.phase in (Phase.READY, Phase.DEGRADED, Phase.FAILED, Phase.STOPPED):
                return last
    raise Unavailable(f"the stack's supervisor died; see its log: {log}", code="supervisor_died")


def run_daemon(settings: Settings, report_fd: int) -> int:
    """Run the daemon that :func:`up_detached` starts; it reports to `report_fd` until the stack is ready."""
    pipe = os.fdopen(report_fd, "w", encoding="utf-8")

    def send(text: str) -> None:
        if pipe.closed:
            return
        try:
            print(text, file=pipe, flush=True)
        except BrokenPipeError:  # the waiting process is gone; the stack continues
            close()

    def close() -> None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()

    def on_report(r: StackReport) -> None:
        send(r.to_json())
        if r.message:
            with contextlib.suppress(OSError):  # the disk of the log is full
                print(time.strftime("%Y-%m-%d %H:%M:%S"), r.message, flush=True)
        if r.phase in (Phase.READY, Phase.DEGRADED):
            close()

    try:
        final = supervisor(settings, on_report).run()
    except FtError as e:
        send(json.dumps({"refused": e.to_dict()}))
        return 1
    if final.error:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), final.error, flush=True)
    return 1 if final.phase is Phase.FAILED else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What :func:`down` ended; all fields are empty if nothing ran."""

    pid: int | None = None
    services: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()


def down(settings: Settings) -> Ended:
    """End the running stack, or what a killed one left behind. Does nothing if there is neither."""
    files = StackFiles(home=settings.home)
    running = stack_report.read(files.report)
    if lock.is_held(files) and running is not None:
        stopping = tuple(workloads.running(settings))
        return dataclasses.replace(_end_running(files, running), workloads=stopping)
    if not settings.home.is_dir():
        return Ended()
    with lock.held(files):
        stale = stack_report.read(files.report)
        left = tuple(s.name for s in lock.end_leftovers(files, stale)[0]) if stale else ()
        lock.clean_stale(files)
        run_records.end_all(run_records.runs_dir(settings))  # even if no report names a stack
        _stop_model_servers(settings)
        stopped = tuple(workloads.stop_all(settings))
        if stack_services.stop_database(settings):
            left = left if stack_services.POSTGRES in left else (*left, stack_services.POSTGRES)
    return Ended(leftovers=left, workloads=stopped)


def _end_running(files: StackFiles, running: StackReport) -> Ended:
    if alive(running.pid, running.identity):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while lock.is_held(files):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the stack (pid {running.pid}) did not end within {DOWN_TIMEOUT_S:.0f} s; "
                f"`ft status` shows what is still running, logs are in {files.logs}",
                code="still_running",
            )
        time.sleep(0.1)
    return Ended(pid=running.pid, services=tuple(s.name for s in reversed(running.services) if s.pid is not None))


def status(settings: Settings) -> StackReport:
    """Return the running stack's last report, or one with every service down if none runs."""
    files = StackFiles(home=settings.home)
    last = stack_report.read(files.report)
    if last is not None and lock.is_held(files):
        return last
    message = None
    if last is not None:
        left = lock.leftovers(last)
        message = f"the supervisor (pid {last.pid}) is gone; still running: {stack_report.names(left) or 'nothing'}; `ft down` cleans up"
    services = tuple(
        ServiceReport(name=s.name, state=ServiceState.DOWN, log=str(files.logs / f"{s.name}.log"), one_shot=s.one_shot)
        for s in stack_services.services(settings)
    )
    return StackReport(stack_id="", phase=Phase.STOPPED, pid=0, identity=None, since=0.0, services=services, message=message)


def shell_env(settings: Settings) -> dict[str, str]:
    """Return the variables with which other processes on this machine use the running stack's databases and files."""
    if status(settings).phase not in (Phase.READY, Phase.DEGRADED) and settings.embedded_database:
        raise Unavailable("the stack is not running, so its database URL is unknown; start it with `ft up`", code="stack_down")
    found = stack_services.database_env(settings)
    configured = {
        "FT_DATABASE_URL": settings.database_url or found["FT_DATABASE_URL"],  # keeps its user, who may own the schema: `ft up` reads it
        "FT_DAGSTER_DATABASE_URL": settings.dagster_database_url,
    }
    return {**stack_services.child_env(settings), **found, **configured}
