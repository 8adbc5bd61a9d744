"""The command tree, and what all commands share: the API's address, JSON or text output, and error handling."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar

import typer

from control_plane.cli.commands import Root
from control_plane.cli.exits import Exit, exit_code, show_error
from control_plane.cli.session import given
from core.errors import FtError

HELP = """Fine-tune language models: check a dataset, submit a job, watch it, and talk to the result.

On one machine: `ft up`, then `ft admin tenants create NAME --tier standard`, `ft login`, `ft submit FILE --wait`.
"""
MODULES = {
    "tenant.data.demo_data_commands": ("demo-data",),
    "tenant.data.dataset_commands": ("check", "upload", "datasets"),
    "tenant.jobs.estimate_commands": ("preview", "estimate"),
    "tenant.data.file_commands": ("files",),
    "tenant.data.suite_commands": ("contamination", "suites"),
    "tenant.data.scored_suite_commands": ("scored-suites",),
    "tenant.jobs.job_commands": ("submit", "jobs", "job", "logs", "metrics", "checkpoints", "cancel", "pause", "resume"),
    "tenant.jobs.evaluation_commands": ("eval",),
    "tenant.jobs.sweep_commands": ("compare", "sweep"),
    "tenant.jobs.queue_commands": ("queue",),
    "tenant.jobs.recipe_commands": ("recipes",),
    "tenant.models.adapter_commands": ("promote", "rollback", "models", "adapters"),
    "tenant.models.route_commands": ("routes",),
    "tenant.models.registry_commands": ("deletions",),
    "tenant.models.export_commands": ("export", "export-data"),
    "tenant.models.manifest_commands": ("manifest",),
    "tenant.models.chat_commands": ("chat",),
    "tenant.account.login_commands": ("login",),
    "tenant.account.key_commands": ("whoami", "keys"),
    "tenant.account.member_commands": ("members",),
    "tenant.account.quota_commands": ("quota",),
    "tenant.account.usage_commands": ("usage", "cost", "invoice", "invoices", "budgets"),
    "tenant.account.webhook_commands": ("webhooks",),
    "tenant.account.wandb_commands": ("wandb",),
    "tenant.account.audit_commands": ("audit",),
    "admin.admin_commands": ("admin",),
}
"""Commands by the module of ``control_plane.cli`` that is imported when one of them is called, in the order of ``ft --help``.

The commands of the local stack come first; their module lies beside the stack."""


class Ft(Root):
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "deploy.local.stack_commands": ("up", "down", "status", "env"),
        **{f"control_plane.cli.{module}": names for module, names in MODULES.items()},
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
