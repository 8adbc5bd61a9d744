"""Checks whether a port is free, and which process holds it."""

from __future__ import annotations

import errno
import socket

import psutil


def in_use(host: str, port: int) -> bool:
    """Whether a listener holds `port`; a port in TIME_WAIT is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return True
            raise
    return False


def holder(port: int) -> str:
    """Describe the process that listens on `port`, e.g. ``python (pid 123)``, and its stack's home, if this user may see them."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return "a process of another user"
    for c in connections:
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
            try:
                process = psutil.Process(c.pid)
                named = f"{process.name()} (pid {c.pid})"
                environ = process.environ()
            except psutil.Error:
                continue
            stack = environ.get("FT_HOME") if "FT_STACK_ID" in environ else None
            return f"{named} of the stack in {stack}" if stack else named
    return "a process of another user"


def listens(leader: int, port: int) -> bool:
    """Whether a process of the group that `leader` leads listens on `port`: an answer may come from another program's server."""
    for process in _group(leader):
        try:
            found = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in found):
            return True
    return False


def _group(leader: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(leader)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
