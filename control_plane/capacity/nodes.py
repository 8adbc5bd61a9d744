"""Nodes of the pools. Draining a node places nothing new on it; what runs there continues to its end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.capacity.configured_pools import planned
from control_plane.capacity.tables import Drain, node_drains, node_health
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, many
from control_plane.queue.tables import reservations
from core.errors import InvalidRequest, NotFound
from core.storable_text import check_storable
from engine.scheduler import Node, Pool

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
        drains = {drain.node: drain for drain in many(conn, sa.select(*columns(node_drains, Drain)), Drain)}
        held = _held(conn)
    return [_view(pool, node, drains.get(node.name), held[node.name]) for pool in planned(platform) for node in pool.nodes]


def get(platform: Platform, name: str) -> NodeView:
    """Return one node; ``NotFound`` if no pool has it."""
    for node in list_nodes(platform):
        if node.name == name:
            return node
    raise NotFound(f"no pool has a node {name[:80]!r}; `ft admin nodes list` lists them", code="node_not_found", param="node")


def drain(platform: Platform, name: str, *, reason: str, by: str) -> NodeView:
    """Place nothing new on node `name` from the next cycle on; draining it again changes the reason."""
    get(platform, name)
    check_storable(reason, "reason")
    if not 1 <= len(reason) <= MAX_REASON_CHARS:
        raise InvalidRequest(f"reason has {len(reason)} characters; 1 to {MAX_REASON_CHARS} are allowed", param="reason")
    made = insert(node_drains).values(node=name, reason=reason, drained_by=by, drained_at=platform.clock())
    with platform.engine.begin() as conn:
        conn.execute(made.on_conflict_do_update(index_elements=["node"], set_={"reason": reason}))
    return get(platform, name)


def undrain(platform: Platform, name: str) -> NodeView:
    """Place jobs on node `name` again, whatever failed on it before; does nothing if it is not drained."""
    now = {"undrained_at": platform.clock()}
    with platform.engine.begin() as conn:
        if conn.execute(sa.delete(node_drains).where(node_drains.c.node == name)).rowcount:
            forgiven = insert(node_health).values(node=name, **now)
            conn.execute(forgiven.on_conflict_do_update(index_elements=["node"], set_=now))
    return get(platform, name)


def held_gpus(conn: sa.Connection) -> dict[str, int]:
    """Return GPUs that jobs hold, by node."""
    return {node: sum(gpus) for node, gpus in _held(conn).items()}


def _held(conn: sa.Connection) -> defaultdict[str, list[int]]:
    """Return each job's GPUs, by node."""
    query = sa.select(reservations.c.placement).where(reservations.c.released_at.is_(None))
    found: defaultdict[str, list[int]] = defaultdict(list)
    for placement in conn.execute(query).scalars():
        for node, gpus in placement or []:
            found[node].append(gpus)
    return found


def _view(pool: Pool, node: Node, drained: Drain | None, held: list[int]) -> NodeView:
    return NodeView(
        name=node.name, pool=pool.name, gpu_type=pool.gpu_type, fabric=node.fabric, num_gpus=node.num_gpus, used_gpus=sum(held),
        num_jobs=len(held), drained_at=drained.drained_at if drained else None,
        drained_by=drained.drained_by if drained else None, reason=drained.reason if drained else None,
    )  # fmt: skip
