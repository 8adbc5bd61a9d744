"""Finds out whether a port is free, and who holds it if not."""

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
    """``python (pid 123)``, as far as this user may see."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return "a process of another user"
    for c in connections:
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
            try:
                return f"{psutil.Process(c.pid).name()} (pid {c.pid})"
            except psutil.Error:
                continue
    return "a process of another user"
