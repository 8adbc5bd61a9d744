"""Servers that the platform starts itself: one for each whole model in production, and pools of base models.

A whole model goes through the same rows and passes as an adapter. Its server is a replica whose base is the model itself: a ready one has
the model, and one that starts has nothing yet. Once the model is withdrawn and its requests are drained, the server is stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from control_plane.adapters.tables import Adapter, adapters
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ModelServer, Replica
from control_plane.platform.records import many
from control_plane.serving import node_files, observations
from control_plane.serving.tables import deployments, replica_adapters
from ft_assets.adapters.record import FULL
from ft_assets.adapters.rollout_plan import FAILED, LOADED
from ft_assets.errors import FtError

log = logging.getLogger(__name__)


def urls(platform: Platform) -> list[str]:
    """Return the URLs of all servers of base models: the configured ones, and those of the pools that the platform runs."""
    pools = platform.servers.pool_urls() if platform.servers is not None else ()
    return list(dict.fromkeys([*platform.settings.inference_urls, *pools]))


def keep(platform: Platform) -> dict[str, tuple[Adapter, ModelServer]]:
    """Have the servers of whole models run as desired; returns them by URL, with their models.

    Those that cannot be asked for are the last known ones, because requests may still reach them.
    """
    if platform.servers is None:
        return {}
    models = {model.id: model for model in _running(platform)}
    try:
        found = platform.servers.keep(list(models.values()))
    except FtError as error:
        log.warning("the servers of whole models cannot be kept: %s", error.message)
        found = _last_seen(platform, models)
    for id_, server in found.items():
        if server.refused:
            _refuse(platform, id_, server)
    return {server.url or id_: (models[id_], server) for id_, server in found.items() if not server.refused}


def replicas(platform: Platform, own: Mapping[str, tuple[Adapter, ModelServer]]) -> list[Replica]:
    """Ask every server, the platform's own included."""
    assert platform.fleet is not None
    pools = platform.servers.pool_urls() if platform.servers is not None else ()
    answers = platform.fleet.replicas([*pools, *(url for url, (_, server) in own.items() if server.url)])
    found = [_own(platform, r, *own[r.url]) if r.url in own else r for r in answers]
    missing = (Replica(url=id_, ready=False, base=m.name, error=s.problem) for id_, (m, s) in own.items() if not s.url)
    return [*found, *missing]


def _own(platform: Platform, answer: Replica, model: Adapter, server: ModelServer) -> Replica:
    """Describe a model's server, as :mod:`ft_assets.adapters.rollout_plan` expects it of a server that has loaded an adapter."""
    has_it = answer.ready and answer.base == model.name
    error = server.problem or answer.error or f"{answer.url} serves {answer.base}"
    return replace(
        answer,
        ready=has_it,
        base=model.name,
        base_digest=model.base_digest,
        adapters={model.name: str(node_files.directory(platform, model))} if has_it else {},
        error=None if has_it else error,
    )


def _running(platform: Platform) -> Sequence[Adapter]:
    """Return the whole models whose servers are to run: desired and not refused, or not drained yet."""
    held = sa.select(replica_adapters.c.adapter_id).where(replica_adapters.c.observed == LOADED)
    wanted = sa.and_(deployments.c.desired == LOADED, deployments.c.observed != FAILED)
    query = observations.select_adapters().where(adapters.c.type == FULL, sa.or_(wanted, deployments.c.adapter_id.in_(held)))
    with platform.engine.connect() as conn:
        return many(conn, query.order_by(adapters.c.id), Adapter)


def _last_seen(platform: Platform, models: Mapping[str, Adapter]) -> dict[str, ModelServer]:
    with platform.engine.connect() as conn:
        return {id_: ModelServer(url=url) for url, id_ in observations.read(conn, list(models))}


def _refuse(platform: Platform, model_id: str, server: ModelServer) -> None:
    """Record why a server cannot be started; it is not tried again until the model is promoted again."""
    log.warning("%s has no server: %s", model_id, server.problem)
    wanted = deployments.c.adapter_id == model_id, deployments.c.desired == LOADED
    with platform.engine.begin() as conn:
        conn.execute(sa.update(deployments).where(*wanted).values(observed=FAILED, detail=server.problem, updated_at=platform.clock()))
