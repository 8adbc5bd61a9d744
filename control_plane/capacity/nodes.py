"""Nodes of the pools. Draining a node places nothing new on it; what runs there continues to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.capacity import configured_pools
from control_plane.capacity.pools import Node, Pool
from control_plane.capacity.tables import node_drains
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from ft_assets.errors import InvalidRequest, NotFound
from ft_assets.storable_text import check_storable

MAX_REASON_CHARS = 1000
"""As long as the reason for suspending a tenant may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """A node with its present use."""

    name: str
    pool: str
    gpu_type: str
    fabric: str
    num_gpus: int
    used_gpus: int
    """GPUs of jobs whose nodes are known."""
    num_jobs: int
    drained_at: datetime | None
    drained_by: str | None
    reason: str | None

    @property
    def state(self) -> str:
        """``ready``; ``draining`` while jobs still run there; ``drained``: it can be removed."""
        if self.drained_at is None:
            return "ready"
        return "draining" if self.num_jobs else "drained"


def list_nodes(platform: Platform) -> list[NodeView]:
    """Return every node, by pool, in the order of the configuration."""
    with platform.engine.connect() as conn:
        drains = _drains(conn)
        held = _held(conn)
    found = [(pool, node) for pool in configured_pools.planned(platform) for node in pool.nodes]
    return [_view(pool, node, drains.get(node.name), held.get(node.name, [])) for pool, node in found]


def drain(platform: Platform, name: str, *, reason: str, by: str) -> NodeView:
    """Place nothing new on node `name` from the next cycle on; draining it again changes the reason."""
    _existing(platform, name)
    check_storable(reason, "reason")
    if not 1 <= len(reason) <= MAX_REASON_CHARS:
        raise InvalidRequest(f"reason has {len(reason)} characters; 1 to {MAX_REASON_CHARS} are allowed", param="reason")
    made = insert(node_drains).values(node=name, reason=reason, drained_by=by, drained_at=platform.clock())
    changed = made.on_conflict_do_update(index_elements=["node"], set_={"reason": reason})
    with platform.engine.begin() as conn:
        conn.execute(changed)
    return get(platform, name)


def undrain(platform: Platform, name: str) -> NodeView:
    """Place jobs on node `name` again; does nothing if it is not drained."""
    with platform.engine.begin() as conn:
        gone = conn.execute(sa.delete(node_drains).where(node_drains.c.node == name)).rowcount
    if not gone:
        _existing(platform, name)
    return get(platform, name)


def get(platform: Platform, name: str) -> NodeView:
    """Return one node; ``NotFound`` if no pool has it."""
    pool, node = _existing(platform, name)
    with platform.engine.connect() as conn:
        return _view(pool, node, _drains(conn).get(name), _held(conn).get(name, []))


def held_gpus(conn: sa.Connection) -> dict[str, int]:
    """Return GPUs that jobs hold, by node."""
    return {node: sum(gpus) for node, gpus in _held(conn).items()}


def _existing(platform: Platform, name: str) -> tuple[Pool, Node]:
    for pool in configured_pools.planned(platform):
        for node in pool.nodes:
            if node.name == name:
                return pool, node
    raise NotFound(f"no pool has a node {name[:80]!r}; `ft admin nodes list` lists them", code="node_not_found", param="node")


def _drains(conn: sa.Connection) -> Mapping[str, sa.RowMapping]:
    return {row["node"]: row for row in conn.execute(sa.select(node_drains)).mappings()}


def _held(conn: sa.Connection) -> Mapping[str, list[int]]:
    """Return each job's GPUs, by node."""
    query = sa.select(reservations.c.placement).where(reservations.c.released_at.is_(None))
    found: defaultdict[str, list[int]] = defaultdict(list)
    for placement in conn.execute(query).scalars():
        for node, gpus in placement or []:
            found[node].append(gpus)
    return found


def _view(pool: Pool, node: Node, drained: Mapping[Any, Any] | None, held: list[int]) -> NodeView:
    reported = {} if drained is None else {name: drained[name] for name in ("drained_at", "drained_by", "reason")}
    return NodeView(
        name=node.name, pool=pool.name, gpu_type=pool.gpu_type, fabric=node.fabric, num_gpus=node.num_gpus, used_gpus=sum(held),
        num_jobs=len(held), **{"drained_at": None, "drained_by": None, "reason": None} | reported,
    )  # fmt: skip
