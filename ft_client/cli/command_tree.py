"""The command tree, and what all commands share: the API's address, JSON or text output, and error handling."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from core.errors import FtError
from ft_client.cli.commands import Root
from ft_client.cli.exits import Exit, exit_code, show_error
from ft_client.cli.session import given

HELP = """Fine-tune language models: check a dataset, submit a job, watch it, and talk to the result.

On one machine: `ft up`, then `ft admin tenants create NAME --tier standard`, `ft login`, `ft submit FILE --wait`.
"""
MODULES = {
    "data.demo_data_commands": ("demo-data",),
    "data_commands": ("check", "upload", "datasets"),
    "jobs.estimate_commands": ("preview", "estimate"),
    "data.file_commands": ("files",),
    "data.suite_commands": ("contamination", "suites"),
    "data.scored_suite_commands": ("scored-suites",),
    "job_commands": ("submit", "jobs", "job", "logs", "metrics", "checkpoints", "cancel", "pause", "resume"),
    "evaluation_commands": ("eval",),
    "submission_commands": ("compare", "sweep"),
    "jobs.queue_commands": ("queue",),
    "jobs.recipe_commands": ("recipes",),
    "model_commands": ("promote", "rollback", "models", "adapters"),
    "models.route_commands": ("routes",),
    "models.registry_commands": ("deletions",),
    "export_commands": ("export", "export-data"),
    "models.manifest_commands": ("manifest",),
    "models.chat_commands": ("chat",),
    "account.login_commands": ("login",),
    "account_commands": ("whoami", "keys"),
    "account.member_commands": ("members",),
    "account.quota_commands": ("quota",),
    "billing_commands": ("usage", "cost", "invoice", "invoices", "budgets"),
    "account.webhook_commands": ("webhooks",),
    "account.wandb_commands": ("wandb",),
    "account.audit_commands": ("audit",),
}
"""Commands by the module of ``ft_client.cli`` that is imported when one of them is called, in the order of ``ft --help``.

The commands of the local stack come first and those of operators last; their modules lie beside what they use."""


class Ft(Root):
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "deploy.local.stack_commands": ("up", "down", "status", "env"),
        **{f"ft_client.cli.{module}": names for module, names in MODULES.items()},
        "control_plane.cli.admin_commands": ("admin",),
    }


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
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout; also allowed after the command.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    del as_json, version  # the command gets the first; the second has ended the call
    given.url, given.api_key = url, api_key


def run() -> None:
    """Run this process's command line and exit with its code."""
    try:
        build()()
    except FtError as e:
        show_error(e, as_json="--json" in sys.argv)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has closed it (`ft jobs | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.OK)
