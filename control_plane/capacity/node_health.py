"""Takes sick nodes out of service: those whose GPUs report hardware errors, and those on which different jobs fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.attempts.tables import agents, attempts
from control_plane.capacity.configured_pools import planned
from control_plane.capacity.rules import new_errors, suspects
from control_plane.capacity.tables import PLATFORM, node_drains, node_health
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations

WINDOW = timedelta(days=1)
"""How long a failure counts against a node."""
FAILURES = ("node_lost", "stalled", "internal", "disk_full", "evaluation_stalled", "evaluation_failed")
"""Outcomes of attempts that a sick node may have caused."""
NODES = sa.func.coalesce(attempts.c.nodes, sa.func.jsonb_path_query_array(reservations.c.placement, "$[*][0]"))
"""Machines of an attempt, in order: those that run it, or else those of its reservation."""

log = logging.getLogger(__name__)


def record(platform: Platform, readings: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Store what the GPUs of each node report, as values by ``GPU/metric``, and take nodes with new errors out of service; returns those.

    A node that is undrained stays in service until an error is new.
    """
    known = {node.name for pool in planned(platform) for node in pool.nodes}
    for stranger in sorted(readings.keys() - known):
        _log_unknown(stranger)
    ours, now, sick = sorted(readings.keys() & known), platform.clock(), []
    if not ours:
        return []
    with platform.engine.begin() as conn:
        before = dict(conn.execute(sa.select(node_health.c.node, node_health.c.errors)).all())
        stored = [{"node": n, "errors": {**before.get(n, {}), **readings[n]}, "read_at": now} for n in ours]
        read = insert(node_health).values(stored)
        conn.execute(
            read.on_conflict_do_update(index_elements=["node"], set_={"errors": read.excluded.errors, "read_at": read.excluded.read_at})
        )
        for node in ours:
            if errors := new_errors(before.get(node, {}), readings[node]):
                _take_out(conn, node, "; ".join(errors), now)
                sick.append(node)
    return sick


def take_out_failing(platform: Platform) -> list[str]:
    """Take nodes on which different jobs failed out of service, at most half of a pool's nodes: beyond that, the nodes are not the cause.
    Returns those that were."""
    taken, now = [], platform.clock()
    with platform.engine.begin() as conn:
        drained = set(conn.execute(sa.select(node_drains.c.node)).scalars())
        failing = suspects(_failures(conn, now))
        for pool in planned(platform):
            names = {node.name for node in pool.nodes}
            for node in sorted(names & failing.keys() - drained):
                why = f"{len(failing[node])} jobs failed on it within a day: {', '.join(failing[node])}"
                if len(names & drained) >= len(names) // 2:
                    _log_kept(node, pool.name, why)
                    continue
                _take_out(conn, node, why, now)
                drained.add(node)
                taken.append(node)
    return taken


def _failures(conn: Connection, now: datetime) -> list[tuple[str, str]]:
    """Return job and node of each failure since the node was last undrained.

    Of a gang, only nodes whose agent did not report, or reported an end that did not follow from another node's.
    """
    placed = sa.func.jsonb_array_elements_text(NODES).table_valued("node", with_ordinality="number").render_derived(name="placed")
    a, r, g = attempts.c, reservations.c, agents.c
    query = (
        sa.select(a.job_id, placed.c.node)
        .select_from(attempts)
        .join(reservations, (r.job_id == a.job_id) & (r.attempt == a.attempt))
        .join(placed, sa.true())
        .outerjoin(agents, (g.job_id == a.job_id) & (g.attempt == a.attempt) & (g.node == placed.c.number - 1))
        .outerjoin(node_health, node_health.c.node == placed.c.node)
        .where(
            r.released_at > now - WINDOW, a.outcome.in_(FAILURES), a.ended_at > sa.func.greatest(now - WINDOW, node_health.c.undrained_at)
        )
        .where(sa.func.coalesce(g.exit["follows"].as_boolean(), sa.false()).is_(False))
    )
    return [(job, node) for job, node in conn.execute(query)]


def _take_out(conn: Connection, node: str, reason: str, now: datetime) -> None:
    """Drain the node and have its jobs leave at once; one that is drained gets the reason in addition."""
    drained = insert(node_drains).values(node=node, reason=reason, drained_by=PLATFORM, drained_at=now, stop_at=now)
    changes = {"reason": node_drains.c.reason + "; " + drained.excluded.reason, "stop_at": now}
    conn.execute(drained.on_conflict_do_update(index_elements=["node"], set_=changes))
    log.error("node %s is out of service: %s", node, reason)


@cache
def _log_unknown(node: str) -> None:
    log.warning("metrics of node %s are ignored: no pool has a node of that name", node)


@cache
def _log_kept(node: str, pool: str, why: str) -> None:
    log.warning("node %s stays in service, because at most half of pool %s is drained: %s", node, pool, why)
