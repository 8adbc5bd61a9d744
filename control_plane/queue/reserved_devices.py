"""Devices of reservations: which GPUs of its nodes an attempt trains on, and which are held on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.capacity import active_pools, gpu_devices
from control_plane.platform.context import Platform
from control_plane.queue import scheduler
from control_plane.queue.tables import reservations

HELD = sa.select(reservations.c.placement, reservations.c.devices).where(reservations.c.released_at.is_(None))


def assign(conn: Connection, starts: Sequence[scheduler.Start]) -> list[list[list[int]]]:
    """Device numbers for each of `starts`, node by node as in its placement; never one that another reservation holds."""
    held = defaultdict[str, set[int]](set)
    for placement, numbers in conn.execute(HELD):
        for (node, _), of_node in zip(placement, numbers, strict=False):
            held[node].update(of_node)
    return [gpu_devices.assign(start.placement, held) for start in starts]


def on_this_machine(platform: Platform, placement: Iterable[Sequence[object]], numbers: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """`numbers`, device numbers by node, as one row of numbers: a machine that stands for several nodes has the GPUs of all of them."""
    first: dict[str, int] = {}
    total = 0
    for pool in active_pools.planned(platform):
        for node in pool.nodes:
            first[node.name], total = total, total + node.num_gpus
    return tuple(first.get(str(node), 0) + n for (node, _), of_node in zip(placement, numbers, strict=False) for n in of_node)


def held(platform: Platform) -> tuple[int, ...]:
    """Numbers of the GPUs that reservations hold on this machine."""
    with platform.whole.engine.connect() as conn:
        rows = conn.execute(HELD).all()
    return tuple(n for placement, numbers in rows for n in on_this_machine(platform, placement, numbers))
