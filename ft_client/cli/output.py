"""Output of commands: tables and sentences for people, JSON for programs; exit codes, and errors for both."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import FtError
from ft_client.cli.remedies import in_commands

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Json = Annotated[bool, typer.Option("--json", help="Write JSON, and nothing else, to stdout.")]


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


def console(*, stderr: bool = False) -> Console:
    """A rich console; highlighting is off, so that ids and numbers read the same everywhere."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


@contextmanager
def live_bars(*columns: str) -> Iterator[Progress | None]:
    """Progress bars on a terminal until the block ends; None elsewhere. A column is a template, or the name of one of rich's."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress

    made = [progress.TextColumn(c) if "{" in c else getattr(progress, c)() for c in columns]
    named = progress.TextColumn("{task.description:<12}")
    with progress.Progress(named, progress.BarColumn(bar_width=30), *made, console=console(stderr=True)) as bars:
        yield bars


def say(text: str) -> None:
    """Write a sentence to stderr, because stdout is for results. Routes of the API are shown as commands."""
    print(in_commands(text), file=sys.stderr)


def print_json(document: Any) -> None:
    print(json.dumps(document, default=str), flush=True)


def print_manifests(text: str, *, as_json: bool) -> None:
    """Write Kubernetes objects as YAML, or as a JSON list, which kubectl takes too."""
    if not as_json:
        print(text, end="")
        return
    import yaml

    objects = [one for one in yaml.safe_load_all(text) if one]
    print_json({"apiVersion": "v1", "kind": "List", "items": objects})


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a plain table without lines, one row per line and as wide as necessary, so that grep and awk work."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            print("\t".join(row))
        return
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*[escape(cell) for cell in row])
    console().print(made)


def escape(text: str) -> str:
    """Escape rich's markup in `text`: names and messages come from tenants."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)


def fields(pairs: Mapping[str, Any]) -> None:
    """Write ``name: value`` lines; None and empty values are left out, numbers rounded, API routes shown as commands."""
    shown = {k: v for k, v in pairs.items() if v not in (None, "", [], {})}
    width = max((len(k) for k in shown), default=0)
    for name, value in shown.items():
        print(f"{name + ':':<{width + 1}} {in_commands(number(value) if isinstance(value, float) else str(value))}")


def number(value: float) -> str:
    """Format with four significant digits: ``0.1235``, ``2e-05``, ``12,346``; ``--json`` has all of them."""
    return f"{value:,.0f}" if 9_999.5 <= abs(value) < 1e15 else f"{value:.4g}"


def ago(unix_s: float | None) -> str:
    """``3 min ago``; empty for None."""
    if unix_s is None:
        return ""
    s = max(0.0, time.time() - unix_s)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if s >= size:
            return f"{s / size:.0f} {unit} ago"
    return f"{s:.0f} s ago"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def counted(number: int, what: str) -> str:
    """Format ``1 GPU``, ``2 GPUs``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
