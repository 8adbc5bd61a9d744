"""Exit codes, and errors for people and programs."""

from __future__ import annotations

import enum
import sys

from core.errors import FtError
from ft_client.cli.output import print_json
from ft_client.cli.remedies import in_commands


class Exit(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    CANCELLED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


UNREACHABLE = frozenset({"unreachable", "stack_down", "database_unreachable"})
"""Codes of "nothing answers"; a broken part of the platform is an ordinary failure."""


def exit_code(error: FtError) -> Exit:
    return Exit.UNREACHABLE if error.code in UNREACHABLE else Exit.FAILED


def show_error(error: FtError, *, as_json: bool) -> None:
    """Write the message with its code to stderr; with ``--json`` also the error body to stdout."""
    if as_json:
        print_json({"error": error.to_dict()})
    where = f", {error.param}" if error.param else ""
    print(f"ft: {in_commands(error.message)} [{error.code}{where}]", file=sys.stderr)
