"""Findings of checks, each with its remedy, and how checks run: all at once, each within a time limit, none able to stop another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Literal

from control_plane.platform.settings import Settings
from ft_assets.errors import FtError

LIMIT_S = 10.0
"""Time limit of a check: twice that of one request to Dagster's webserver on a busy machine (`deploy.local.readiness`)."""
SKEW_WARNING_S, SKEW_PROBLEM_S = 1.0, 30.0
"""Clock differences. A ``Date`` header has whole seconds, and half a minute of a token's or a signed URL's life is lost or refused."""
SYNCHRONIZE = "timedatectl set-ntp true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The installation that is checked, from this process."""

    settings: Settings
    clock: Callable[[], float] = time.time
    """This host's time, in Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    status: Literal["ok", "warning", "problem", "skipped"]
    found: str
    """What was found, with its limit."""
    fix: str = ""
    """Next step: a command where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A time that another machine gave, and when this host asked for it and had it."""

    earliest: float
    latest: float
    asked: float
    answered: float


Check = Callable[[Site], Iterator[Finding]]


def ok(found: str) -> Finding:
    return Finding(status="ok", found=found)


def warning(found: str, fix: str) -> Finding:
    return Finding(status="warning", found=found, fix=fix)


def problem(found: str, fix: str) -> Finding:
    return Finding(status="problem", found=found, fix=fix)


def skipped(found: str) -> Finding:
    return Finding(status="skipped", found=found)


def run(checks: Mapping[str, Check], site: Site, *, limit_s: float = LIMIT_S) -> dict[str, list[Finding]]:
    """Run all checks and return their findings in order; what a check found before it failed or ran out of time stays."""
    found: dict[str, list[Finding]] = {name: [] for name in checks}
    threads = {
        name: threading.Thread(target=_collect, args=(check, site, found[name]), name=f"doctor-{name}", daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            late = problem(f"no answer within {limit_s:g} s", "check the network between this host and the service, then run it again")
            found[name] = [*found[name], late]
    return found


def _collect(check: Check, site: Site, found: list[Finding]) -> None:
    try:
        found.extend(check(site))
    except FtError as error:
        found.append(problem(error.message, f"look up {error.code} in docs/errors.md"))
    except Exception as error:  # whatever goes wrong in one check is a finding of it
        found.append(problem(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", "see the log of the service"))


def date_header(date: str, *, asked: float, answered: float) -> Timed:
    """Return the time of a ``Date`` header, which leaves out fractions of a second."""
    at = parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()
    return Timed(earliest=at, latest=at + 1.0, asked=asked, answered=answered)


def clock(of: str, timed: Timed) -> Finding:
    """Compare this host's clock with another's; the time that the answer took counts as no difference."""
    behind, ahead = timed.earliest - timed.answered, timed.asked - timed.latest
    skew = max(0.0, behind, ahead)
    limits = f"warning at {SKEW_WARNING_S:g} s, problem at {SKEW_PROBLEM_S:g} s"
    if skew < SKEW_WARNING_S:
        return ok(f"this host's clock agrees with that of {of} within {SKEW_WARNING_S:g} s")
    text = (
        f"this host's clock is {skew:.1f} s {'behind' if behind > 0 else 'ahead of'} that of {of} ({limits}); tokens and signed URLs suffer"
    )
    fix = f"on the host that is wrong: {SYNCHRONIZE}"
    return problem(text, fix) if skew >= SKEW_PROBLEM_S else warning(text, fix)


def on_kubernetes() -> bool:
    from resources import launcher

    return launcher.on_kubernetes()


def restart(service: str) -> str:
    """Return the command that starts a service of the platform or shows why it does not run."""
    if on_kubernetes():
        return f"kubectl logs --namespace {_namespace()} deploy/ft-platform-{service}"
    return "ft status || ft up"


def upgrade() -> str:
    """Return the command that runs this version's migrations."""
    if on_kubernetes():
        return f"helm upgrade ft-platform deploy/helm/ft-platform --namespace {_namespace()} --reuse-values"
    return "ft down && ft up"


def elsewhere() -> str:
    """Return the command that runs the checks with the chart's account for them."""
    return f"helm test ft-platform --namespace {_namespace()}; kubectl logs --namespace {_namespace()} ft-platform-test"


def _namespace() -> str:
    from resources.launcher.kubernetes_cluster import own_namespace

    return own_namespace()
