"""Rollout: the desired state of adapters, and the inference servers that follow it.

The desired state is a row of ``deployments``, written in the transaction that changes an adapter's stage. A promotion loads its adapter at
once (:func:`load`); everything else, and what a promotion could not do, is done by :func:`reconcile`: for a server that restarted or
drifted, or that must unload an adapter once its requests are drained.

An unreachable server is tried again in every pass, a temporarily failed load after a while; a server that refuses an adapter permanently is
left alone until the adapter is promoted again. A server that stops answering during a pass is left to the next one, and one with much to do
continues there: no other server waits for it longer than one call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import Adapter, adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.platform.records import many
from control_plane.serving import accepted_bases, node_files, observations, own_servers
from control_plane.serving.node_files import directory, materialise
from control_plane.serving.observations import Key
from control_plane.serving.tables import ReplicaAdapter, deployments, replica_adapters
from core.errors import FtError, Unavailable
from engine.adapters import (
    FULL_MODEL,
    LOAD_FAILED,
    LOADED,
    NOT_ACCEPTED,
    UNLOADED,
    WITHDRAWN,
    AdapterRecord,
    DesiredAdapter,
    RolloutAction,
    plan_rollout,
    rollout_wait_s,
)

__all__ = ["LOADED", "LOAD_FAILED", "UNLOADED", "directory", "materialise"]
log = logging.getLogger(__name__)
ONE_ROUND = 0x66745F666C656574
"""Key of the advisory lock ("ft_fleet"): one pass at a time over all processes."""
OTHER_BASE = "base_digest_mismatch"
"""Prefix of a refusal that ends when the server serves other bytes, or the adapter is accepted on them."""
FOR_NOW = "served_elsewhere"
"""Code of a refusal that the next pass fixes."""
ROUND_S = 10.0
"""After this time, a server's next action is left to the next pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconciled:
    replica: str
    action: RolloutAction
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetState:
    """The servers and when they were asked: later records are newer than their answers."""

    at: datetime
    replicas: Sequence[Replica]

    def pool(self, base_model: str) -> list[Replica]:
        return [r for r in self.replicas if r.ready and r.base == base_model]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    adapters: Sequence[Adapter]
    """Those that have a deployment."""
    seen: Mapping[Key, ReplicaAdapter]
    accepted_on_others: frozenset[tuple[str, str]]
    """Adapters and other bases that they are accepted on."""

    def accepts(self, adapter: AdapterRecord, digest: str | None) -> bool:
        return digest in (None, adapter.base_digest) or (adapter.id, digest) in self.accepted_on_others


class _NotTheServer(Unavailable):
    """An action failed for now through no fault of the server; its other actions continue."""


def ask(platform: Platform) -> FleetState:
    """Return the state of each server of a base model; empty without a fleet."""
    at = platform.clock()
    return FleetState(at=at, replicas=own_servers.replicas(platform) if platform.fleet else [])


def reconcile(platform: Platform) -> list[Reconciled]:
    """Run one pass: bring every server to the desired state as far as possible; returns what was done and what failed.

    Safe to repeat; does nothing while another process runs a pass.
    """
    platform = platform.whole
    if platform.fleet is None:
        return []
    with _alone(platform) as alone:
        if not alone:
            return []
        own, at = own_servers.known(platform), platform.clock()
        answers = FleetState(at=at, replicas=own_servers.replicas(platform, own))
        # asked before the desired state is read, so that an adapter promoted in between never counts as an orphan
        observations.forget_others(platform, [r.url for r in answers.replicas])
        return _round(platform, answers)


def is_needed(platform: Platform) -> bool:
    """Whether an adapter is to be served or is on a server, as far as the database knows."""
    with platform.whole.engine.connect() as conn:
        return bool(
            conn.scalar(sa.select(sa.or_(sa.exists().where(_open_deployments()), sa.exists().where(replica_adapters.c.observed == LOADED))))
        )


def _open_deployments() -> sa.ColumnElement[bool]:
    return sa.or_(deployments.c.desired == LOADED, deployments.c.observed != UNLOADED)


def load(platform: Platform, record: AdapterRecord, answers: FleetState | None = None) -> str | None:
    """Load and probe one adapter on every server of its base at once, and record the results; returns what is missing.

    A whole model's server takes minutes to start, so its state is left to :func:`reconcile`.
    """
    platform = platform.whole
    if platform.fleet is None:
        return None
    if record.type != FULL_MODEL:
        _round(platform, answers or ask(platform), only=record.id)
    with platform.engine.connect() as conn:
        observed, detail = conn.execute(
            sa.select(deployments.c.observed, deployments.c.detail).where(deployments.c.adapter_id == record.id)
        ).one()
    return None if observed == LOADED else detail


@contextmanager
def _alone(platform: Platform) -> Iterator[bool]:
    """Hold the lock of a pass, which is released if the process dies; False if another process holds it."""
    with platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        got = bool(conn.scalar(sa.select(sa.func.pg_try_advisory_lock(ONE_ROUND))))
        try:
            yield got
        finally:
            if got:
                conn.execute(sa.select(sa.func.pg_advisory_unlock(ONE_ROUND)))


def _round(platform: Platform, answers: FleetState, *, only: str | None = None) -> list[Reconciled]:
    """Plan and carry out actions on all servers in parallel; with `only`, just what one adapter lacks."""
    node_files.write(platform, answers.replicas)  # before loads, for a server that restarts; before unloads, so that they last
    snapshot = _snapshot(platform, answers, only)
    plans = [(r, _plan(platform, answers, r, snapshot, only)) for r in answers.replicas]
    for replica in answers.replicas:
        _correct(platform, answers, replica, snapshot)
    work = [(replica, actions) for replica, actions in plans if actions]
    with ThreadPoolExecutor(max(1, len(work)), thread_name_prefix="fleet") as pool:  # starts threads as they are needed
        found = list(pool.map(lambda w: _carry_out_all(platform, w[0], w[1], snapshot), work))
    observations.settle(platform, answers.replicas, [adapter.id for adapter in snapshot.adapters])
    return [done for each in found for done in each]


def _snapshot(platform: Platform, answers: FleetState, only: str | None) -> _Snapshot:
    """Return the desired state and the last observed one; leaves out adapters that are neither desired nor loaded."""
    held = sa.select(replica_adapters.c.adapter_id).where(replica_adapters.c.observed == LOADED)
    open_ = sa.or_(_open_deployments(), deployments.c.adapter_id.in_(held))
    with platform.engine.connect() as conn:
        return _Snapshot(
            adapters=many(conn, observations.select_adapters().where(adapters.c.id == only if only else open_), Adapter),
            seen=observations.read(conn, [only] if only else None),
            accepted_on_others=accepted_bases.accepted_on_other_bases(
                platform.models, conn, {(r.base, r.base_digest) for r in answers.replicas if r.base and r.base_digest}
            ),
        )


def _plan(platform: Platform, answers: FleetState, replica: Replica, snapshot: _Snapshot, only: str | None) -> list[RolloutAction]:
    if not replica.ready:
        return []
    here = [adapter for adapter in snapshot.adapters if adapter.served_base == replica.base]
    desired = [_desired(platform, answers, replica, adapter, snapshot) for adapter in here]
    served = dict(replica.adapters)
    for want in desired:  # records made after the server was asked are newer than its answer
        if want.proven:
            served[want.name] = want.directory
    if only:
        served = {want.name: served[want.name] for want in desired if want.name in served}
    return plan_rollout(desired, served, now=answers.at.timestamp())


def _desired(platform: Platform, answers: FleetState, replica: Replica, adapter: Adapter, snapshot: _Snapshot) -> DesiredAdapter:
    seen, where = snapshot.seen.get((replica.url, adapter.id)), str(directory(platform, adapter, replica.base_digest))
    listed = replica.adapters.get(adapter.name) == where
    return DesiredAdapter(
        name=adapter.name,
        loaded=adapter.desired == LOADED,
        directory=where,
        proven=seen is not None and seen.observed == LOADED and (listed or seen.updated_at >= answers.at),
        accepted=snapshot.accepts(adapter, replica.base_digest),
        refused=seen is not None and seen.observed == LOAD_FAILED and not str(seen.detail).startswith(OTHER_BASE),
        not_before=_not_before(platform, adapter, seen),
    )


def _not_before(platform: Platform, adapter: Adapter, seen: ReplicaAdapter | None) -> float:
    if adapter.desired == UNLOADED:
        return adapter.desired_at.timestamp() + platform.settings.drain_s if adapter.desired_at else 0.0
    return seen.updated_at.timestamp() + rollout_wait_s(seen.failures) if seen and seen.failures else 0.0


def _correct(platform: Platform, answers: FleetState, replica: Replica, snapshot: _Snapshot) -> None:
    """Withdraw the observed state of a server that lost the adapter, has it from elsewhere, or should no longer answer with it, so that
    no request is sent there. A server that is silent for a moment keeps its state: if it is down, requests skip it."""
    if replica.silent:
        return
    for adapter in snapshot.adapters:
        seen = snapshot.seen.get((replica.url, adapter.id))
        if seen is None or seen.observed != LOADED:
            continue
        if replica.adapters.get(adapter.name) != str(directory(platform, adapter, replica.base_digest)):
            detail = replica.error or f"{replica.url} has lost it"
        elif adapter.desired == LOADED and not snapshot.accepts(adapter, replica.base_digest):
            detail = f"{replica.url}: {NOT_ACCEPTED}"
        else:
            continue
        observations.write(platform, replica.url, adapter.id, UNLOADED, detail, before=answers.at)


def _carry_out_all(platform: Platform, replica: Replica, actions: Sequence[RolloutAction], snapshot: _Snapshot) -> list[Reconciled]:
    """Carry out one server's actions as far as it answers and the time limit allows; the next pass plans the rest again."""
    known = {adapter.name: adapter for adapter in snapshot.adapters}
    until, done, still_there = time.monotonic() + ROUND_S, list[Reconciled](), set[str]()
    for action in actions:
        if action.name in still_there:
            continue
        if time.monotonic() >= until:
            break
        error = _carry_out(platform, replica, action, known.get(action.name), snapshot)
        log.info("%s %s on %s (%s): %s", action.kind, action.name, replica.url, action.reason, error.message if error else "done")
        done.append(Reconciled(replica=replica.url, action=action, error=error.message if error else None))
        if isinstance(error, Unavailable) and not isinstance(error, _NotTheServer):
            break
        if error and action.kind == "unload":
            still_there.add(action.name)
    return done


def _carry_out(platform: Platform, replica: Replica, action: RolloutAction, adapter: Adapter | None, snapshot: _Snapshot) -> FtError | None:
    """Run one action and record the result; errors become the result, so that other actions continue."""
    try:
        error = _tried(platform, replica, action, adapter, snapshot)
        if adapter is not None:
            seen = snapshot.seen.get((replica.url, adapter.id))
            _record(platform, replica, action, adapter.id, seen.failures if seen else 0, error)
    except Exception as e:
        log.exception("%s %s on %s cannot be recorded", action.kind, action.name, replica.url)
        return _NotTheServer(f"{type(e).__name__}: {e}")
    return error


def _tried(platform: Platform, replica: Replica, action: RolloutAction, adapter: Adapter | None, snapshot: _Snapshot) -> FtError | None:
    try:
        if adapter is not None and action.kind != "unload":
            _load(platform, replica, adapter, accepted=snapshot.accepts(adapter, replica.base_digest))
        elif adapter is not None and action.reason == WITHDRAWN:
            _unload_withdrawn(platform, replica, adapter)
        else:
            _fleet(platform).unload(replica.url, action.name)
    except FtError as e:
        return e
    except Exception as e:
        log.exception("%s %s on %s", action.kind, action.name, replica.url)
        return _NotTheServer(f"{type(e).__name__}: {e}")
    return None


def _record(platform: Platform, replica: Replica, action: RolloutAction, adapter_id: str, failures: int, error: FtError | None) -> None:
    observed, detail, again = UNLOADED, error.message if error else None, failures + 1
    if action.kind == "unload":
        if error is None:
            return  # a load follows, or it was written with it
        if action.reason == WITHDRAWN:
            observed, again = LOADED, 0
    elif error is None:
        observed, again = LOADED, 0
    elif error.code == OTHER_BASE:
        observed = LOAD_FAILED
    elif not isinstance(error, Unavailable) and error.code != FOR_NOW:
        observed, detail, again = LOAD_FAILED, f"{error.code}: {error.message}", 0
    observations.write(platform, replica.url, adapter_id, observed, detail, failures=again)


def _load(platform: Platform, replica: Replica, record: AdapterRecord, *, accepted: bool) -> None:
    if not accepted:
        raise FtError(
            f"{OTHER_BASE}: {replica.url} serves {record.base_model} with digest {str(replica.base_digest)[:19]}, "
            f"on which {record.id} (trained on {record.base_digest[:19]}) is not accepted; evaluate it there",
            code=OTHER_BASE,
        )
    if record.type != FULL_MODEL:  # whose server was started with it
        _fleet(platform).load(replica.url, record.name, _placed(platform, replica, record))
    _fleet(platform).probe(replica.url, record.name)


def _placed(platform: Platform, replica: Replica, record: AdapterRecord) -> Path:
    try:
        return materialise(platform, record, replica.base_digest)
    except Unavailable as e:
        raise _NotTheServer(e.message) from e
    except OSError as e:
        raise _NotTheServer(f"this node cannot keep the files of {record.id}: {e}; see to its disk") from e


def _unload_withdrawn(platform: Platform, replica: Replica, record: AdapterRecord) -> None:
    """Unload unless the adapter was promoted again; a promotion that arrives now waits, and loads it afterwards."""
    query = sa.select(deployments.c.desired).where(deployments.c.adapter_id == record.id).with_for_update()
    with platform.engine.begin() as conn:
        if conn.scalar(query) == LOADED:
            return
        if record.type != FULL_MODEL:  # whose server is stopped once it is drained
            _fleet(platform).unload(replica.url, record.name)
        gone = replica_adapters.c.replica == replica.url, replica_adapters.c.adapter_id == record.id
        conn.execute(sa.update(replica_adapters).where(*gone).values(observed=UNLOADED, detail=None, updated_at=platform.clock()))


def _fleet(platform: Platform) -> Any:
    assert platform.fleet is not None, "who has no fleet was turned away before"
    return platform.fleet


def desire(conn: Connection, record: AdapterRecord, desired: str, now: datetime) -> None:
    """Write the desired state and clear an earlier failure, so that it is tried again."""
    fresh = {"desired": desired, "detail": None, "updated_at": now}
    statement = insert(deployments).values(adapter_id=record.id, name=record.name, observed=UNLOADED, desired_at=now, **fresh)
    kept = sa.case((deployments.c.observed == LOAD_FAILED, UNLOADED), else_=deployments.c.observed)
    since = sa.case((deployments.c.desired == desired, deployments.c.desired_at), else_=now)
    conn.execute(statement.on_conflict_do_update(index_elements=["adapter_id"], set_={**fresh, "observed": kept, "desired_at": since}))
    if desired == LOADED:
        observations.forgive(conn, record.id)
