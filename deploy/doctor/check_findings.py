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
from core.errors import FtError

LIMIT_S = 10.0
"""Time limit of a check: twice that of one request to Dagster's webserver on a busy machine (`deploy.local.readiness`)."""
SKEW_WARNING_S, SKEW_PROBLEM_S = 1.0, 30.0
"""Clock differences. A ``Date`` header has whole seconds, and half a minute of the life of a token or a signed URL is lost."""
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
        for each in check(site):
            found.append(each)  # now: a later failure or the time limit takes nothing away
    except FtError as error:
        found.append(problem(error.message, f"look up {error.code} in docs/errors.md"))
    except Exception as error:  # whatever goes wrong in one check is a finding of it
        found.append(problem(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", "see the log of the service"))


def date_header(date: str) -> tuple[float, float]:
    """Return the earliest and the latest time that a ``Date`` header means: it leaves out fractions of a second."""
    at = parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()
    return at, at + 1.0


def clock(of: str, earliest: float, latest: float, *, asked: float, answered: float) -> Finding:
    """Compare another clock with this host's, when it asked for the time and had it; the time between counts as no difference."""
    behind, ahead = earliest - answered, asked - latest
    skew, which = max(behind, ahead), "behind" if behind > ahead else "ahead of"
    if skew < SKEW_WARNING_S:
        return ok(f"this host's clock agrees with that of {of} within {SKEW_WARNING_S:g} s")
    limits = f"warning at {SKEW_WARNING_S:g} s, problem at {SKEW_PROBLEM_S:g} s"
    text = f"this host's clock is {skew:.1f} s {which} that of {of} ({limits}): tokens and signed URLs may be refused"
    fix = f"on the host that is wrong: {SYNCHRONIZE}"
    return problem(text, fix) if skew >= SKEW_PROBLEM_S else warning(text, fix)
