"""The GPU pools of this installation: those of the operator's file, or the embedded one, less the nodes that are drained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from control_plane.billing import prices
from control_plane.capacity import gpu_devices, pools_file
from control_plane.capacity.pools import Pool, local_pool
from control_plane.capacity.tables import node_drains
from control_plane.platform.context import Platform
from control_plane.platform.settings import Settings
from ft_assets.errors import InvalidRequest, Unavailable
from ft_assets.training.memory import GPUS


def configured(settings: Settings, at: datetime) -> list[Pool]:
    """The pools as they are written down; ``InvalidRequest`` (``invalid_pools``) says which entry of the file is wrong.

    `at` is when their GPUs need a price: the file is read once a process, and price lists are only ever added to.
    """
    try:
        if settings.pools_file is None:
            found: Sequence[Pool] = [local_pool(settings.local_gpus, premium=settings.premium_gpus)]
        else:
            found = _read(settings.pools_file, tuple(sorted(prices.load(settings.prices_file).at(at).gpus)))
    except ValueError as e:
        raise InvalidRequest(str(e), code="invalid_pools") from e
    return [_as_wide_as_this_machine(pool) if pool.gpu_type == "local" else pool for pool in found]


def _as_wide_as_this_machine(pool: Pool) -> Pool:
    """`pool` for jobs of at most as many ranks as this machine has GPUs: more slots than GPUs share them, the ranks of one job cannot."""
    num_gpus = len(gpu_devices.visible())
    return replace(pool, max_gpus_per_job=min(num_gpus, pool.max_gpus_per_job)) if num_gpus else pool


@cache
def _read(path: Path, priced: tuple[str, ...]) -> tuple[Pool, ...]:
    """A type of GPU is known if its memory and its price are."""
    return pools_file.load(path, gpu_types=[name for name in GPUS if name in priced])


def planned(platform: Platform) -> list[Pool]:
    """The pools with all their nodes: what submissions, plans and prices are about, whatever is drained today."""
    return configured(platform.settings, platform.clock())


def pools(platform: Platform, conn: sa.Connection | None = None) -> list[Pool]:
    """The pools as they are now: nothing is placed on a drained node. `conn`: the transaction to read in, if there is one."""
    if conn is None:
        with platform.whole.engine.connect() as own:
            return pools(platform, own)
    drained = set(conn.execute(sa.select(node_drains.c.node)).scalars())
    return [_without(pool, drained) for pool in planned(platform)]


def named(platform: Platform, name: str) -> Pool:
    """The pool that a reservation names."""
    for pool in planned(platform):
        if pool.name == name:
            return pool
    raise Unavailable(
        f"a job holds GPUs of pool {name}, which the file of FT_POOLS ({platform.settings.pools_file}) does not have any more; put it back "
        "and drain its nodes (ft admin nodes drain) until its jobs have ended",
        code="unknown_pool",
    )


def _without(pool: Pool, drained: set[str]) -> Pool:
    if drained.isdisjoint(n.name for n in pool.nodes):
        return pool
    return replace(pool, nodes=tuple(replace(n, ready=n.ready and n.name not in drained) for n in pool.nodes))
