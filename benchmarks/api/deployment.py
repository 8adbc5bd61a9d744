"""A control plane on this machine, each part a process: a database, the API, and as many workers and schedulers as asked for.

Several replicas of the API stand behind HAProxy (Debian's package `haproxy`), which is set as an ingress is: replicas in turn, connections
kept open to them, readiness by the chart's probe. A request that reached no replica goes to another one; one that a replica may have
received is sent again only if it is safe to repeat.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import sqlalchemy as sa

from benchmarks.idle import cpu_s
from benchmarks.serving.place import Process
from resources.database import embedded, migrate
from resources.database.engine import make_engine
from tests.support.servers.inference_server import free_port

PRE_STOP_S = 5.0
"""Between the moment at which the proxy sends a replica nothing more, and SIGTERM: the chart's ``preStop``."""
SERVED_BY = "x-served-by"
"""Header of an answer that names the replica, set by the proxy."""
START_S = 120.0

PROXY = """\
global
    nbthread 1
    stats socket {admin} mode 600 level admin
defaults
    mode http
    timeout connect 2s
    timeout client 75s
    timeout server 60s
    retries 3
    option redispatch 1
    retry-on conn-failure empty-response
    http-reuse always
frontend api
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    balance roundrobin
    option httpchk GET /healthz
    default-server check inter 5s fall 2 rise 1
    http-request disable-l7-retry if METH_POST
    http-response set-header {served_by} %s
{servers}
"""


@dataclass(kw_only=True)
class Deployment:
    """What runs, and where it answers."""

    database_url: str
    url: str
    """Of the API: the proxy's if there are several replicas."""
    database: Path
    replicas: Sequence[Process]
    others: dict[str, Sequence[Process]]
    """Workers, schedulers and the proxy, by kind."""
    admin: Path
    """The proxy's socket for commands."""

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by kind of process, and of this process as ``callers``; they begin anew with a restarted replica."""
        kinds = {"api": self.replicas, **self.others}
        used = {kind: sum(cpu_s(p.pid) for p in processes) for kind, processes in kinds.items() if processes}
        return {**used, "postgresql": postgresql_cpu_s(self.database), "callers": cpu_s(os.getpid())}

    def restart(self, number: int, *, announced: bool) -> float:
        """Restart a replica; returns the seconds from SIGTERM until it is ready.

        If `announced`, the proxy sends it nothing more before SIGTERM, as in Kubernetes; otherwise the proxy finds out by itself.
        """
        if announced:
            self._tell(f"set server replicas/r{number} state drain")
            time.sleep(PRE_STOP_S)
        began, replica = time.monotonic(), self.replicas[number]
        replica.stop()
        replica.start()
        replica.wait()
        if announced:
            self._tell(f"set server replicas/r{number} state ready")
        took_s = time.monotonic() - began
        self._await_up(number)
        return took_s

    def _await_up(self, number: int) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            rows = [line.split(",") for line in self._tell("show stat").splitlines()]
            if any(row[:2] == ["replicas", f"r{number}"] and row[17].startswith("UP") for row in rows):
                return
            time.sleep(0.2)
        raise TimeoutError(f"the proxy did not find replica {number} ready in {START_S:g} s")

    def _tell(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.admin))
            sock.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


def postgresql_cpu_s(database: Path) -> float:
    """CPU seconds of the server in `database`, its running backends, and those that ended."""
    postmaster = psutil.Process(int((database / "postmaster.pid").read_text().split()[0]))
    return sum(cpu_s(process.pid) for process in (postmaster, *postmaster.children()))


@contextmanager
def platform(home: Path, *, replicas: int = 1, **env: str) -> Iterator[Deployment]:
    """A database and the API on it, with further variables. Workers and schedulers are started when it has something to work on."""
    with ExitStack() as stack:
        directory = home / "data"
        stack.callback(embedded.stop, embedded.start(directory, databases=("ft",)))
        url = embedded.socket_url(directory, "ft")
        engine = make_engine(url)
        migrate.upgrade(engine)
        engine.dispose()
        env = {
            "FT_HOME": str(home / "home"), "FT_DATABASE_URL": url, "FT_INFERENCE_URLS": "http://127.0.0.1:9", "FT_MLFLOW_URI": "off",
            "FT_LOG_LEVEL": "WARNING", **env,
        }  # fmt: skip
        apis = [_api(env) for _ in range(replicas)]
        others: dict[str, Sequence[Process]] = {}
        deployment = Deployment(
            database_url=url, url=apis[0].url, database=directory, replicas=apis, others=others, admin=home / "proxy.socket"
        )
        for process in apis:
            stack.callback(process.stop)
            process.start()
        for process in apis:
            process.wait()
        if replicas > 1:
            others["proxy"] = [proxy := _proxy(home, deployment)]
            stack.callback(proxy.stop)
            proxy.start()
            proxy.wait()
            deployment.url = proxy.url
        yield deployment


def _api(env: Mapping[str, str]) -> Process:
    port = free_port()
    return Process(
        command=(sys.executable, "-m", "control_plane.api"), url=f"http://127.0.0.1:{port}", probe="/readyz",
        env={**env, "FT_API_PORT": str(port)},
    )  # fmt: skip


def _proxy(home: Path, deployment: Deployment) -> Process:
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise SystemExit("several replicas need HAProxy, which is not installed: apt-get install haproxy, or measure with --replicas 1")
    port = free_port()
    servers = "\n".join(f"    server r{n} {api.url.removeprefix('http://')}" for n, api in enumerate(deployment.replicas))
    config = home / "haproxy.cfg"
    config.write_text(PROXY.format(admin=deployment.admin, port=port, served_by=SERVED_BY, servers=servers))
    return Process(command=(program, "-db", "-f", str(config)), url=f"http://127.0.0.1:{port}", probe="/readyz")


@contextmanager
def background(deployment: Deployment, *, workers: int, schedulers: int) -> Iterator[None]:
    """Workers, and schedulers without Dagster (:mod:`benchmarks.api.scheduler`), on a deployment's database."""
    env = deployment.replicas[0].env
    modules = {"workers": ("control_plane.worker", workers), "schedulers": ("benchmarks.api.scheduler", schedulers)}
    started = {
        kind: [Process(command=(sys.executable, "-m", module), url="", probe="", env={**env, "FT_INFERENCE_URLS": ""}) for _ in range(num)]
        for kind, (module, num) in modules.items()
    }
    with ExitStack() as stack:
        for process in (p for processes in started.values() for p in processes):
            stack.callback(process.stop)
            process.start()
        _await_work(deployment, workers=workers, schedulers=schedulers)
        deployment.others.update(started)
        yield
        for kind in started:
            del deployment.others[kind]


def _await_work(deployment: Deployment, *, workers: int, schedulers: int) -> None:
    """Wait until every process works: the workers are listed, and the schedulers ran a cycle each."""
    engine = make_engine(deployment.database_url)
    deadline = time.monotonic() + START_S
    query = sa.text("SELECT (SELECT count(*) FROM tasks.procrastinate_workers), (SELECT rounds FROM scheduler_state WHERE id = 1)")
    try:
        while time.monotonic() < deadline:
            with engine.connect() as conn:
                listed, rounds = conn.execute(query).one()
            if listed >= workers and rounds >= schedulers:
                return
            time.sleep(0.2)
    finally:
        engine.dispose()
    raise TimeoutError(f"{listed} of {workers} workers and {rounds} scheduling cycles after {START_S:g} s")
