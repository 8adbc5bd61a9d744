"""``ft up``, ``down``, ``status``, ``env``: the embedded stack on this machine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Annotated

import typer

from ft_client.cli.commands import add_commands, listing, show, since
from ft_client.cli.output import Exit, Json, print_json, say


def register(app: typer.Typer) -> None:
    add_commands(app, "This machine", {"up": up, "down": down, "status": status, "env": env})


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once everything is healthy; `ft down` stops it.")] = False,
    as_json: Json = False,
) -> None:
    """Start PostgreSQL, Dagster, the API and the inference server, and supervise them.

    With --json, writes the addresses once everything is healthy; if that fails, the state as `ft status` does.
    """
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
    if as_json and not was_ready:
        print_json(dataclasses.asdict(final))
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
        print_json(dataclasses.asdict(ended))
    if ended.services:
        say(f"ended the stack of pid {ended.pid}: {', '.join(ended.services)}")
    if ended.leftovers:
        say(f"ended what a killed stack had left running: {', '.join(ended.leftovers)}")
    if ended.workloads:
        say(workloads.describe_stopped(settings, ended.workloads))
    if not (ended.services or ended.leftovers or ended.workloads):
        say(f"nothing runs in {settings.home}")


SERVICES = listing({
    "SERVICE": "name", "STATE": "state", "PID": "pid", "SINCE": since("since"), "URL": "url", "LOG": "log",
})  # fmt: skip


def status(as_json: Json = False) -> None:
    """Show each service with state, pid, address and log. Exit code 4 if the stack is not ready."""
    from deploy.local import lifecycle as commands
    from deploy.local.supervisor.stack_report import Phase

    report = commands.status(commands.load_settings())
    show(dataclasses.asdict(report), lambda found: SERVICES(found["services"]), as_json=as_json)
    if report.message and report.phase is Phase.STOPPED:
        say(report.message)
    if report.phase is not Phase.READY:
        say(f"the stack is {report.phase}" + ("; start it with `ft up`" if report.phase is Phase.STOPPED else ""))
        raise typer.Exit(Exit.UNREACHABLE)


def env(as_json: Json = False) -> None:
    """Print export lines, so that `eval "$(ft env)"; dagster asset materialize ...` works on the running stack."""
    from deploy.local import lifecycle as commands

    def exports(variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")

    show(commands.shell_env(commands.load_settings()), exports, as_json=as_json)
