"""Specification of a service: how to start it, when it is ready, and how to end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.local.supervisor.child_process import Fork


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """One answer of a probe."""

    ready: bool
    detail: str = ""
    """What the service is waiting for, for the progress line."""
    broken: bool = False
    """This start will never be ready: it is replaced, with `detail` as the reason."""


Probe = Callable[[float], Readiness]
"""Takes the Unix time of the service's start, so that what an earlier run left behind does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits at which the supervisor acts, from settings of the same names (``FT_START_TIMEOUT_S`` etc.)."""

    start_timeout_s: float = 180.0
    """Seconds to become ready before a start is replaced by another one, which gets twice the time."""
    start_attempts: int = 3
    """Failed starts of a service that was never ready before the stack gives up on it: ends if the service is required, else goes on."""
    hung_after_s: float = 20.0
    """Seconds without an answer to a health probe before a service is replaced."""
    max_restart_pause_s: float = 60.0
    """Longest pause between two starts of a service: pauses double from 1 s up to this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    name: str
    argv: tuple[str, ...]
    probe: Probe | None = None
    """Readiness. None: ready when it has exited with 0 (a one-shot step, such as the migrations)."""
    liveness: Probe | None = None
    """Asked for as long as the service is up, and independent of other services. None: `probe`."""
    after: tuple[str, ...] = ()
    """Services that must be ready before this one starts, and that end only after it has ended."""
    env: Callable[[], Mapping[str, str]] = dict
    """Added to the supervisor's environment; evaluated at the start, when the services of `after` are ready."""
    url: Callable[[], str] | None = None
    """Where people and clients reach it; evaluated when it is ready."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Checked to be free before anything starts."""
    port_variable: str = ""
    """Environment variable that moves `port`: part of the message when the port is taken."""
    stop_signal: signal.Signals = signal.SIGTERM
    """Sent to the leader alone, which ends its own children."""
    grace_s: float = 10.0
    """Seconds after `stop_signal` before the whole process group is killed."""
    full_grace: bool = False
    """Keeps its grace when a second Ctrl-C cuts the others' short (a database must close its files)."""
    required: bool = True
    """The platform is of no use without it: a first start that fails ends the stack, with the reason. The others keep being tried."""
    expendable: bool = False
    """The others do without it: the stack counts as ready while this one is not, and never ends for it."""
    forked_by: str = ""
    """Name of the service that forks this one, if it serves: it is waited for, unless it has failed. Empty: a fresh interpreter."""
    fork: Fork = lambda *_: None
    """Has `forked_by` fork this service."""
    last: bool = False
    """Ends after all others and after ``when_idle``, which needs it: a database, and whom workloads report their end to."""

    @property
    def one_shot(self) -> bool:
        return self.probe is None
