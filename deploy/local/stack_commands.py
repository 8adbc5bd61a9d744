"""``ft up``, ``down``, ``status``, ``env``: the embedded stack on this machine."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from control_plane.cli.exits import Exit
from control_plane.cli.output import Json, ago, print_json, say, table


def register(app: typer.Typer) -> None:
    panel = "This machine"
    app.command(rich_help_panel=panel)(up)
    app.command(rich_help_panel=panel)(down)
    app.command(rich_help_panel=panel)(status)
    app.command(rich_help_panel=panel)(env)


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once everything is healthy; `ft down` stops it.")] = False,
    as_json: Json = False,
) -> None:
    """Start PostgreSQL, Dagster, the API and the inference server, and supervise them."""
    from deploy.local import lifecycle as commands
    from deploy.local.stack_view import StackView
    from deploy.local.supervisor.stack_report import Phase, StackReport

    settings = commands.load_settings()
    was_ready = False

    with StackView() as view:

        def show(report: StackReport) -> None:
            nonlocal was_ready
            view(report)
            if report.phase is Phase.READY and not was_ready:
                was_ready = True
                if as_json:
                    print_json(json.loads(settings.endpoints_file.read_text()))
                if not detach:
                    say("Ctrl-C ends everything")

        final = commands.up_detached(settings, show) if detach else commands.up(settings, show)
    if final.error:
        say(f"ft: {final.error}\n  everything that was started has been ended")
        raise typer.Exit(Exit.FAILED)
    if final.phase is Phase.DEGRADED:
        raise typer.Exit(Exit.FAILED)
    if detach:
        say("it runs on in the background; `ft status` shows it, `ft down` ends it")
    elif not was_ready:
        raise typer.Exit(Exit.INTERRUPTED)


def down(as_json: Json = False) -> None:
    """Stop the running stack; running training saves a checkpoint first. Does nothing if no stack runs."""
    from deploy.local import lifecycle as commands
    from deploy.local import workloads

    settings = commands.load_settings()
    ended = commands.down(settings)
    if as_json:
        print_json({"pid": ended.pid, "services": ended.services, "leftovers": ended.leftovers, "workloads": ended.workloads})
    if ended.services:
        say(f"ended the stack of pid {ended.pid}: {', '.join(ended.services)}")
    if ended.leftovers:
        say(f"ended what a killed stack had left running: {', '.join(ended.leftovers)}")
    if ended.workloads:
        say(workloads.describe_stopped(settings, ended.workloads))
    if not (ended.services or ended.leftovers or ended.workloads):
        say(f"nothing runs in {settings.home}")


def status(as_json: Json = False) -> None:
    """Show each service with state, pid, address and log. Exit code 4 if the stack is not ready."""
    from deploy.local import lifecycle as commands
    from deploy.local.supervisor.stack_report import Phase

    report = commands.status(commands.load_settings())
    if as_json:
        print_json(commands.as_dict(report))
    else:
        rows = [
            (s.name, str(s.state), str(s.pid or ""), ago(s.since), s.url or "", s.log)
            for s in report.services
        ]  # fmt: skip
        table(("SERVICE", "STATE", "PID", "SINCE", "URL", "LOG"), rows)
    if report.message and report.phase is Phase.STOPPED:
        say(report.message)
    if report.phase is not Phase.READY:
        say(f"the stack is {report.phase}" + ("; start it with `ft up`" if report.phase is Phase.STOPPED else ""))
        raise typer.Exit(Exit.UNREACHABLE)


def env(as_json: Json = False) -> None:
    """Print export lines, so that `eval "$(ft env)"; dagster asset materialize ...` works on the running stack."""
    from deploy.local import lifecycle as commands

    variables = commands.shell_env(commands.load_settings())
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
