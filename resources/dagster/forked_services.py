"""Services of the stack, forked from the run server: it has imported their modules, whose memory they then share.

A forked service is a child of the stack's supervisor, which adopts orphans (prctl(2), ``PR_SET_CHILD_SUBREAPER``): the server forks a
process that forks the service and ends. It is what ``python -m MODULE`` would be, in a session of its own, with the environment, the
directory and the output that the supervisor gives.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
from dataclasses import asdict

from control_plane.platform.settings import Settings
from core.errors import Unavailable
from core.processes.forked_process import Forked, Order
from resources.dagster.run_records import announced_socket, check_owned

MODULES = (
    "dagster._daemon.cli", "dagster._cli.api", "dagster_webserver.app", "control_plane.api.main", "control_plane.api.app",
    "control_plane.worker.process", "deploy.local.dagster_web.access_control", "sensors.queue_listener", "grpc_health.v1.health",
)  # fmt: skip
"""What the services import."""
ANSWER_TIMEOUT_S = 5.0
"""A fork takes milliseconds."""
PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, which has to wait for them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def request(settings: Settings, order: Order, output: int) -> int | None:
    """Have the run server fork a service that writes to file descriptor `output`; returns its pid, None if no server listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        address = announced_socket(settings)
        try:
            check_owned(settings, address)
            connection.connect(str(address))
        except (OSError, Unavailable):
            return None
        text = json.dumps({"service": asdict(order)}).encode() + b"\n"
        sent = connection.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [output]))])
        connection.sendall(text[sent:])
        with connection.makefile("rb") as stream:
            answer = json.loads(stream.readline() or b"{}")
    if "pid" not in answer:
        raise Unavailable(f"the run server could not fork the service: {answer.get('error', 'it closed the connection')}")
    return int(answer["pid"])


def fork(order: Order, output: int) -> int:
    """Fork the service twice and return its pid. Raises :class:`Forked` in the service, which leads a session of its own."""
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(write_fd, f"{pid}\n".encode())
            os._exit(0)
        os.close(read_fd)
        os.close(write_fd)
        os.setsid()
        raise Forked(order, os.dup(output))
    os.close(write_fd)
    with os.fdopen(read_fd) as told:
        pid = int(told.readline())
    os.waitpid(between, 0)  # by now the service is a child of the supervisor
    return pid
