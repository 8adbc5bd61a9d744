"""The command tree; commands import what they need when they run, so that ``ft --help`` is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from control_plane.cli import (
    adapters,
    admin,
    audit,
    chat,
    datasets,
    demo_data,
    evaluations,
    exports,
    files,
    foresight,
    jobs,
    keys,
    login,
    manifests,
    members,
    queue,
    quota,
    recipes,
    registry,
    routes,
    stack,
    suites,
    sweeps,
    usage,
    webhooks,
)
from control_plane.cli.exits import Exit, exit_code, show_error
from control_plane.cli.session import given
from ft_assets.errors import FtError

HELP = """Fine-tune language models: check a dataset, submit a job, watch it, and talk to what it made.

On one machine: `ft up`, then `ft admin tenants create NAME --tier standard`, `ft login`, `ft submit FILE --wait`.
"""


def build() -> typer.Typer:
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for module in (
        stack,
        login,
        datasets,
        demo_data,
        files,
        foresight,
        suites,
        jobs,
        evaluations,
        sweeps,
        queue,
        quota,
        usage,
        recipes,
        adapters,
        routes,
        registry,
        exports,
        manifests,
        chat,
        keys,
        members,
        webhooks,
        audit,
        admin,
    ):
        module.register(app)
    return app


def root(
    url: Annotated[str | None, typer.Option("--url", help="Address of the API [env: FT_API_URL].")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key [env: FT_API_KEY].")] = None,
) -> None:
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
