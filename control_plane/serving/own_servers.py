"""Servers that the platform starts itself: one for each whole model in production, and pools of base models.

A whole model goes through the same rows and passes as an adapter. Its server is a replica whose base is the model itself: a ready one has
the model, and one that starts has nothing yet. Once the model is withdrawn and its requests are drained, the server is stopped.

:func:`keep` starts and stops them, apart from the rollout: what runs them may take minutes to answer. It records what it found
(``model_servers``), which is all that the rollout knows of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.adapters.tables import Adapter, adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ModelServer, Replica
from control_plane.platform.records import many
from control_plane.serving import node_files, observations
from control_plane.serving.tables import deployments, model_servers, replica_adapters
from core.errors import FtError
from engine.adapters import FULL_MODEL, LOAD_FAILED, LOADED, OWN_SERVER, UNLOADED

log = logging.getLogger(__name__)
WHOLE = sa.select(adapters.c.id).where(adapters.c.type == FULL_MODEL)


def urls(platform: Platform) -> list[str]:
    """Return the URLs of all servers of base models: the configured ones, and those of the pools that the platform runs."""
    pools = platform.servers.pool_urls() if platform.servers is not None else ()
    return list(dict.fromkeys([*platform.settings.inference_urls, *pools]))


def is_needed(platform: Platform) -> bool:
    """Whether a whole model has a server or is to have one, as far as the database knows."""
    with platform.engine.connect() as conn:
        return bool(conn.scalar(sa.select(sa.or_(sa.exists().where(_running()), sa.exists(sa.select(model_servers.c.adapter_id))))))


def keep(platform: Platform) -> None:
    """Have the servers of whole models run as desired, and record each from before it starts until it is gone.

    If nothing can be asked of what runs them, they stay recorded as they were last seen, because requests may still reach them.
    """
    assert platform.servers is not None
    models = _announce(platform)
    try:
        found = platform.servers.keep(models)
    except FtError as error:
        log.warning("the servers of whole models cannot be kept: %s", error.message)
        with platform.engine.begin() as conn:
            unreached = sa.update(model_servers).where(model_servers.c.url == "")
            conn.execute(unreached.values(problem=observations.shown(error.message), updated_at=platform.clock()))
        return
    _record(platform, found)


def abandon(platform: Platform) -> None:
    """Record that whole models are not served: this platform starts no servers any more, and cannot see those that it started before."""
    with platform.engine.begin() as conn:
        if left := conn.execute(sa.delete(model_servers)).rowcount:
            log.warning("%d servers of whole models are not kept any more; delete those that still run", left)
        conn.execute(sa.delete(replica_adapters).where(replica_adapters.c.adapter_id.in_(WHOLE)))
        wanted = deployments.c.desired == LOADED
        state = {"observed": sa.case((wanted, LOAD_FAILED), else_=UNLOADED), "detail": sa.case((wanted, OWN_SERVER.detail))}
        conn.execute(sa.update(deployments).where(deployments.c.adapter_id.in_(WHOLE)).values(**state, updated_at=platform.clock()))


def known(platform: Platform) -> list[tuple[Adapter, ModelServer]]:
    """Return the recorded servers with their models."""
    with platform.engine.connect() as conn:
        rows = conn.execute(sa.select(model_servers.c.adapter_id, model_servers.c.url, model_servers.c.problem)).all()
        models = many(conn, observations.select_adapters().where(adapters.c.id.in_([row.adapter_id for row in rows])), Adapter)
    found = {row.adapter_id: ModelServer(url=row.url, problem=row.problem) for row in rows}
    return [(model, found[model.id]) for model in models]


def replicas(platform: Platform, own: Sequence[tuple[Adapter, ModelServer]] = ()) -> list[Replica]:
    """Ask every server of a base model, and those of `own`."""
    assert platform.fleet is not None
    pools = platform.servers.pool_urls() if platform.servers is not None else ()
    mine = [server.url for _, server in own if server.url]
    answers = {answer.url: answer for answer in platform.fleet.replicas([*pools, *mine])}
    shared = [answer for url, answer in answers.items() if url not in mine]
    return [*shared, *(_own(platform, answers.get(server.url), model, server) for model, server in own)]


def _own(platform: Platform, answer: Replica | None, model: Adapter, server: ModelServer) -> Replica:
    """Describe a model's server, as :mod:`engine.adapters.rollout_plan` expects it of a server that has loaded an adapter."""
    if answer is None:
        return Replica(url=model.id, ready=False, base=model.name, error=server.problem)
    if answer.ready and answer.base != model.name:  # another server has its address
        return Replica(url=model.id, ready=False, base=model.name, error=server.problem or f"{answer.url} serves {answer.base}")
    has_it = {model.name: str(node_files.directory(platform, model))} if answer.ready else {}
    error = None if answer.ready else server.problem or answer.error
    return replace(answer, base=model.name, base_digest=model.base_digest, adapters=has_it, error=error)


def _announce(platform: Platform) -> Sequence[Adapter]:
    """Return the whole models whose servers are to run, each of them recorded: a deletion of its files sees that, or withdrew it before."""
    query = sa.select(deployments.c.adapter_id).where(_running()).order_by(deployments.c.adapter_id).with_for_update(read=True)
    with platform.engine.begin() as conn:
        if not (ids := conn.scalars(query).all()):
            return []
        new = [{"adapter_id": id_, "url": "", "updated_at": platform.clock()} for id_ in ids]
        conn.execute(insert(model_servers).values(new).on_conflict_do_nothing())
        return many(conn, observations.select_adapters().where(adapters.c.id.in_(ids)).order_by(adapters.c.id), Adapter)


def _running() -> sa.ColumnElement[bool]:
    """Return SQL for deployments of whole models that are desired and not refused, or not drained yet."""
    held = sa.select(replica_adapters.c.adapter_id).where(replica_adapters.c.observed == LOADED)
    wanted = sa.and_(deployments.c.desired == LOADED, deployments.c.observed != LOAD_FAILED)
    return sa.and_(deployments.c.adapter_id.in_(WHOLE), sa.or_(wanted, deployments.c.adapter_id.in_(held)))


def _record(platform: Platform, found: Mapping[str, ModelServer]) -> None:
    """Record the servers, and why those cannot be started that are not tried again until their models are promoted again."""
    now, running = platform.clock(), {id_: server for id_, server in found.items() if not server.refused}
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(model_servers).where(model_servers.c.adapter_id.not_in(list(running))))
        ids = conn.scalars(sa.select(adapters.c.id).where(adapters.c.id.in_(list(running)))).all()
        for id_ in ids:
            row = {"url": running[id_].url, "problem": observations.shown(running[id_].problem), "updated_at": now}
            statement = insert(model_servers).values(adapter_id=id_, **row)
            changed = sa.or_(
                *(model_servers.c[name].is_distinct_from(statement.excluded[name]) for name in ("url", "problem"))
            )  # fmt: skip
            conn.execute(statement.on_conflict_do_update(index_elements=["adapter_id"], set_=row, where=changed))
        for id_ in found.keys() - running.keys():
            why = observations.shown(found[id_].problem)
            log.warning("%s has no server: %s", id_, why)
            this = sa.update(deployments).where(deployments.c.adapter_id == id_, deployments.c.desired == LOADED)
            conn.execute(this.values(observed=LOAD_FAILED, detail=why, updated_at=now))
