"""``ft admin doctor``: what is wrong with the installation, and what to do about it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from ft_client.cli import record_views
from ft_client.cli.jobs.queue_commands import counted

if TYPE_CHECKING:
    from deploy.doctor.check_findings import Finding, Site


def register(admin: typer.Typer) -> None:
    admin.command("doctor")(doctor)


@contextmanager
def _site() -> Iterator[Site]:
    from deploy.doctor.check_findings import Site
    from deploy.local.lifecycle import load_settings
    from deploy.local.private_home import UMASK
    from resources.database.engine import control_plane_url, shared_logins

    settings = load_settings()
    with ExitStack() as at_the_end:
        at_the_end.callback(os.umask, os.umask(UMASK))
        at_the_end.callback(shared_logins(control_plane_url(settings)).dispose)
        yield Site(settings=settings)


def _lines(found: Mapping[str, Any]) -> str:
    for each in found["findings"]:
        print(f"{each['status']:<8} {each['check']}: {each['found']}" + (f". Fix: {each['fix']}" if each["fix"] else ""))
    return f"{counted(found['problems'], 'problem')}, {counted(found['warnings'], 'warning')}"


@record_views.command(_site, _lines, fails=lambda found: found["problems"] > 0)
def doctor(site: Site) -> Any:
    """Check database, object store, Dagster, inference servers and the cluster, with a fix for each problem. Exit code 1 on a problem."""
    rows = [{"check": name, **asdict(each)} for name, each in findings(site)]
    counts = Counter(row["status"] for row in rows)
    return {"findings": rows, "problems": counts["problem"], "warnings": counts["warning"]}


def findings(site: Site) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of all checks, with the check's name."""
    from deploy.doctor import cluster_checks, service_checks
    from deploy.doctor.check_findings import problem, run
    from deploy.doctor.fixes import restart

    if site.settings.embedded_database and not site.settings.home.is_dir():  # checks would write to it
        yield "home", problem(f"{site.settings.home} does not exist; set FT_HOME if the platform is elsewhere", restart(""))
        return
    for name, found in run({**service_checks.CHECKS, **cluster_checks.CHECKS}, site).items():
        yield from ((name, each) for each in found)
