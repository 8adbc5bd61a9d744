"""Rollout: what to load and unload so that the fleet serves what is desired.

Rules:

1. Desired but not served (by every replica): load. One that was refused for good is left alone until it is promoted again.
2. Served from another directory than the desired one: unload and load; a name must mean one directory.
3. Served but desired unloaded: unload.
4. Served under an ``ft:`` name that nobody desires (left by an older state): unload. Other names are not ours.
5. Loads come before the unloads of rules 3 and 4, so that a swap never leaves a moment without an answer; then by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """One row of the desired state."""

    name: str
    loaded: bool
    directory: str
    """Where its files are (or will be) on the serving nodes."""
    refused: bool = False
    """A server refused it for good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    kind: Literal["load", "unload"]
    name: str
    reason: str


def reconcile(desired: Sequence[Desired], served: Mapping[str, str]) -> list[Action]:
    """Actions that lead from `served` (directory by name) to `desired`; none if they agree."""
    loads: list[Action] = []
    unloads: list[Action] = []
    for want in sorted(desired, key=lambda d: d.name):
        where = served.get(want.name)
        if want.loaded and where is None and not want.refused:
            loads.append(Action(kind="load", name=want.name, reason="not served"))
        elif want.loaded and where is not None and where != want.directory:
            loads += [
                Action(kind="unload", name=want.name, reason=f"served from {where}"),
                Action(kind="load", name=want.name, reason="served from another directory"),
            ]
        elif not want.loaded and where is not None:
            unloads.append(Action(kind="unload", name=want.name, reason="no longer desired"))
    known = {want.name for want in desired}
    orphans = sorted(name for name in served if name not in known and name.startswith("ft:"))
    return [*loads, *unloads, *(Action(kind="unload", name=name, reason="unknown") for name in orphans)]
