"""Rollout: the actions that bring each inference server to the desired state, and the combined state of the servers.

Rules, for one server:

1. Desired and not served: load. One that was refused permanently is left alone until it is promoted again; one that failed temporarily
   until its time comes.
2. Desired and served from another directory than the desired one: unload and load; a name must mean one directory. If the unload fails, the
   load is left to a later round.
3. Desired, served, and not yet observed to answer: probe. Requests are routed there only after that.
4. Served but desired unloaded: unload, after the requests in flight have had time to end.
5. Desired and served on bytes of the base that it is not (any more) accepted on: unload at once.
6. Served under an ``ft:`` name that is not desired (left by an older state): unload. Other names are not ours.
7. Loads come before the unloads of rules 4 and 6, so that a swap never leaves a moment without an answer; then by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LOADED, UNLOADED, LOAD_FAILED = "loaded", "unloaded", "failed"
WITHDRAWN = "no longer desired"
NOT_ACCEPTED = "not accepted on the bytes that this server serves"
LONGEST_WAIT_S = 60.0
"""Longest pause between two attempts to load, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredAdapter:
    """One row of the desired state for one server."""

    name: str
    loaded: bool
    directory: str
    """Directory of its files on the server's node, present or future."""
    proven: bool = False
    """The server was observed to answer with it."""
    accepted: bool = True
    """It may be served on the bytes of this server's base."""
    refused: bool = False
    """The server refused it permanently."""
    not_before: float = 0.0
    """Unix seconds before which nothing is done: a failed load waits for its next attempt, an unload for requests in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutAction:
    kind: Literal["load", "probe", "unload"]
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenOnServer:
    """State of one adapter on one server."""

    url: str
    ready: bool
    observed: str
    detail: str | None


def plan_rollout(desired: Sequence[DesiredAdapter], served: Mapping[str, str], *, now: float) -> list[RolloutAction]:
    """Returns the actions that lead one server from `served` (directory by name) to `desired`; none if they agree."""
    loads: list[RolloutAction] = []
    unloads: list[RolloutAction] = []
    for want in sorted(desired, key=lambda d: d.name):
        where = served.get(want.name)
        if want.loaded:
            loads += _towards(want, where, now)
        elif where is not None and now >= want.not_before:
            unloads.append(RolloutAction(kind="unload", name=want.name, reason=WITHDRAWN))
    known = {want.name for want in desired}
    orphans = sorted(name for name in served if name not in known and name.startswith("ft:"))
    return [*loads, *unloads, *(RolloutAction(kind="unload", name=name, reason="unknown") for name in orphans)]


def _towards(want: DesiredAdapter, where: str | None, now: float) -> list[RolloutAction]:
    if now < want.not_before:
        return []
    if where is not None and not want.accepted:
        return [RolloutAction(kind="unload", name=want.name, reason=NOT_ACCEPTED)]
    if want.refused:
        return []
    if where is None:
        return [RolloutAction(kind="load", name=want.name, reason="not served")]
    if where != want.directory:
        return [
            RolloutAction(kind="unload", name=want.name, reason=f"served from {where}"),
            RolloutAction(kind="load", name=want.name, reason="served from another directory"),
        ]
    return [] if want.proven else [RolloutAction(kind="probe", name=want.name, reason="not seen to answer yet")]


def rollout_wait_s(failures: int) -> float:
    """Returns the seconds from the last of so many consecutive failed attempts to the next one: 1, 2, 4, ..., 60."""
    return min(LONGEST_WAIT_S, 2.0 ** min(failures - 1, 10)) if failures > 0 else 0.0


def pool_state(pool: Sequence[SeenOnServer], *, loaded: bool) -> tuple[str, str | None]:
    """Returns the state of an adapter on the servers of one base, and why it differs from what is desired (`loaded`); None if it does not.

    Desired loaded, it counts as ``loaded`` once every server that is ready serves it, and as ``failed`` when none does and one refused it
    permanently. Desired unloaded, it counts as ``unloaded`` once no server that is ready has it.
    """
    ready = [s for s in pool if s.ready]
    have = [s for s in ready if s.observed == LOADED]
    if not loaded:
        reasons = "; ".join(f"{s.url}: {s.detail}" for s in have if s.detail)
        return (LOADED, reasons or "requests under way are drained first") if have else (UNLOADED, None)
    others = "; ".join(_reason(s) for s in pool if s not in have)
    detail = None if len(have) == len(pool) and pool else f"on {len(have)} of {len(pool)} inference servers; {others}".rstrip("; ")
    if ready and len(have) == len(ready):
        return LOADED, detail
    return (LOAD_FAILED if not have and any(s.observed == LOAD_FAILED for s in ready) else UNLOADED), detail


def _reason(seen: SeenOnServer) -> str:
    detail = seen.detail or "not loaded yet"
    return detail if seen.url in detail else f"{seen.url}: {detail}"
