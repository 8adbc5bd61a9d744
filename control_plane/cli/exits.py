"""Exit codes, and errors as people and programs see them."""

from __future__ import annotations

import enum
import json
import sys

from control_plane.cli.remedies import in_commands
from ft_assets.errors import FtError


class Exit(enum.IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    CANCELLED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130


UNREACHABLE = frozenset({"unreachable", "stack_down", "database_unreachable"})
"""Codes that say that nothing answered at all; a part of the platform that is out of order is an ordinary failure."""


def exit_code(error: FtError) -> Exit:
    return Exit.UNREACHABLE if error.code in UNREACHABLE else Exit.FAILED


def show_error(error: FtError, *, as_json: bool) -> None:
    """One message with its code on stderr; with ``--json`` the error body on stdout too."""
    if as_json:
        print(json.dumps({"error": error.to_dict()}))
    where = f", {error.param}" if error.param else ""
    print(f"ft: {in_commands(error.message)} [{error.code}{where}]", file=sys.stderr)
