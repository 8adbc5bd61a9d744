"""The command tree, and what is true of every command: where the API is, JSON or words, and how errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from control_plane.cli.commands import Root
from control_plane.cli.exits import Exit, exit_code, show_error
from control_plane.cli.session import given
from ft_assets.errors import FtError

HELP = """Fine-tune language models: check a dataset, submit a job, watch it, and talk to what it made.

On one machine: `ft up`, then `ft admin tenants create NAME --tier standard`, `ft login`, `ft submit FILE --wait`.
"""
MODULES = {
    "stack": ("up", "down", "status", "env"),
    "demo_data": ("demo-data",),
    "datasets": ("check", "upload", "datasets"),
    "foresight": ("preview", "estimate"),
    "files": ("files",),
    "suites": ("suites",),
    "jobs": ("submit", "jobs", "job", "logs", "metrics", "checkpoints", "cancel", "pause", "resume"),
    "evaluations": ("eval",),
    "sweeps": ("compare", "sweep"),
    "queue": ("queue",),
    "recipes": ("recipes",),
    "adapters": ("models", "promote", "rollback", "adapters"),
    "routes": ("routes",),
    "registry": ("deletions",),
    "exports": ("export", "export-data"),
    "manifests": ("manifest",),
    "chat": ("chat",),
    "login": ("login",),
    "keys": ("whoami", "keys"),
    "members": ("members",),
    "quota": ("quota",),
    "usage": ("usage", "cost", "invoice", "invoices", "budgets"),
    "webhooks": ("webhooks",),
    "audit": ("audit",),
    "admin": ("admin",),
}
"""Commands by the module of ``control_plane.cli`` that is imported when one of them is called; the order of ``ft --help``."""


class Ft(Root):
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {f"control_plane.cli.{module}": names for module, names in MODULES.items()}


def build() -> typer.Typer:
    app = typer.Typer(
        cls=Ft,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ft {version('ft-platform')}")
        raise typer.Exit


def root(
    url: Annotated[str | None, typer.Option("--url", help="Address of the API [env: FT_API_URL].")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key [env: FT_API_KEY].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout; may stand after the command, too.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    del as_json, version  # the command gets the one; the other has ended the call
    given.url, given.api_key = url, api_key


def run() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        build()()
    except FtError as e:
        show_error(e, as_json="--json" in sys.argv)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has gone (`ft jobs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
