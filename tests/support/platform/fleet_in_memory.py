"""A platform whose inference servers are in memory: each can be away, slow, silent or wrong."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.evaluations.tables import evaluations
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ModelServer, Replica
from control_plane.serving import observations, own_servers, rollout
from control_plane.serving.node_files import directory
from control_plane.serving.rollout import reconcile
from core.errors import Conflict, Unavailable
from engine.adapters.record import AdapterRecord
from tests.support.jobs.finished_job import rewrite
from tests.support.jobs.registered_adapter import BASE_DIGEST, add_adapter
from tests.support.platform.database_roles import as_owner

ONE, TWO = "http://one", "http://two"


@dataclass
class Server:
    base: str = "tiny-base"
    digest: str | None = BASE_DIGEST
    up: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    refuse: Exception | None = None
    stuck: bool = False
    """It unloads nothing."""
    silent: bool = False
    error: str | None = None
    """It answers with this."""
    own: bool = False
    """The platform starts it, and asks it by its URL."""
    on_load: Callable[[], object] = lambda: None


class Servers:
    """A fleet in memory."""

    def __init__(self, *urls: str) -> None:
        self.at = {url: Server() for url in urls}

    def replicas(self, also: Sequence[str] = ()) -> list[Replica]:
        return [self._described(url, s) for url, s in self.at.items() if not s.own or url in also]

    def _described(self, url: str, s: Server) -> Replica:
        if not s.up or s.silent:
            return Replica(url=url, ready=False, base=s.base, error=f"{url} did not answer", silent=s.silent)
        if s.error:
            return Replica(url=url, ready=False, base=s.base, error=s.error)
        return Replica(url=url, ready=True, base=s.base, base_digest=s.digest, adapters=dict(s.adapters))

    def load(self, url: str, name: str, directory: Path) -> None:
        s = self._told(url, "load", name)
        s.on_load()
        if s.refuse:
            raise s.refuse
        if s.adapters.get(name) not in (None, str(directory)):
            raise Conflict(f"{url} serves {name} from elsewhere", code="served_elsewhere")
        s.adapters[name] = str(directory)

    def unload(self, url: str, name: str) -> None:
        if self._told(url, "unload", name).stuck:
            raise Unavailable(f"{url} did not answer")
        self.at[url].adapters.pop(name, None)

    def probe(self, url: str, name: str) -> float:
        s = self._told(url, "probe", name)
        assert name in (s.base if s.own else s.adapters)
        if s.own and s.refuse:
            raise s.refuse
        return 0.0

    def _told(self, url: str, what: str, name: str) -> Server:
        if not self.at[url].up:
            raise Unavailable(f"{url} did not answer")
        self.at[url].told.append(f"{what} {name.rsplit(':', 1)[1]}")
        return self.at[url]


@dataclass
class OwnServers:
    """What starts servers of whole models: at once, unless it is told otherwise."""

    servers: Servers
    kept: list[list[str]] = field(default_factory=list)
    problem: str | None = None
    refused: bool = False
    away: bool = False
    ends: bool = True
    """Servers end at once."""
    address: str | None = None
    """URL that all servers are said to have."""

    def keep(self, models: Sequence[AdapterRecord]) -> dict[str, ModelServer]:
        if self.away:
            raise Unavailable("the cluster does not answer")
        self.kept.append([model.id for model in models])
        if self.refused:
            return {model.id: ModelServer(problem=self.problem, refused=True) for model in models}
        wanted = {f"http://{model.id}": model for model in models}
        ending = [url for url, server in self.servers.at.items() if server.own and url not in wanted]
        for url in ending if self.ends else ():
            del self.servers.at[url]
        left = {url.removeprefix("http://"): ModelServer(problem="ending") for url in ending if url in self.servers.at}
        for url, model in wanted.items():
            if url not in self.servers.at:
                self.started(model.id, model.name).up = self.problem is None
        return left | {model.id: ModelServer(url=self.address or url, problem=self.problem) for url, model in wanted.items()}

    def started(self, id_: str, name: str) -> Server:
        return self.servers.at.setdefault(f"http://{id_}", Server(base=name, digest=None, own=True))

    def pool_urls(self) -> tuple[str, ...]:
        return ()


@dataclass
class Clock:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        self.now += timedelta(milliseconds=1)
        return self.now


@dataclass
class Place:
    platform: Platform
    servers: Servers
    clock: Clock
    tenant: str

    def adapter(self, number: str, *, lineage: str = "bot") -> str:
        """A registered adapter whose files are on the node; its id."""
        made = add_adapter(self.platform, self.tenant, name=f"ft:tiny-base:{self.tenant}:{lineage}:{number}", stage="draft", loaded=False)
        weights = f"weights of {number}".encode()
        listed = {"weights": {"sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)}}
        manifest = json.dumps({"base_digest": BASE_DIGEST, "files": listed}).encode()
        with as_owner(self.platform).begin() as conn:
            rewrite(conn, adapters_table.c.id == made, manifest_sha256=hashlib.sha256(manifest).hexdigest())
        record = adapters.get_adapter(self.platform, self.tenant, made)
        where = directory(self.platform, record)
        where.mkdir(parents=True)
        for name, content in (("manifest.json", manifest), ("weights", weights)):
            (where / name).write_bytes(content)
            self.platform.objects.put_bytes(f"{record.object_prefix}/{name}", content)
        return made

    def whole_model(self, number: str, *, lineage: str = "bot") -> str:
        """A registered whole model; its id."""
        made = self.adapter(number, lineage=lineage)
        with as_owner(self.platform).begin() as conn:
            rewrite(conn, adapters_table.c.id == made, type="full_model", rank=None, alpha=None, modules=[])
        return made

    def directory(self, adapter_id: str) -> Path:
        return directory(self.platform, adapters.get_adapter(self.platform, self.tenant, adapter_id))

    def in_production(self, *adapter_ids: str) -> None:
        """Promoted one after the other."""
        with self.platform.engine.begin() as conn:
            for n, made in enumerate(adapter_ids):
                at = self.clock() + timedelta(seconds=n)
                conn.execute(sa.text("UPDATE adapters SET stage = 'staging' WHERE id = :id"), {"id": made})
                conn.execute(sa.text("UPDATE adapters SET stage = 'production', promoted_at = :at WHERE id = :id"), {"at": at, "id": made})
        self.clock.now += timedelta(seconds=len(adapter_ids))

    def verdict(self, adapter_id: str, outcome: str, digest: str) -> None:
        record, now = adapters.get_adapter(self.platform, self.tenant, adapter_id), self.clock()
        of = {"tenant_id": self.tenant, "job_id": record.job_id, "adapter_id": adapter_id, "base_model": "tiny-base", "base_digest": digest}
        done = {"state": "succeeded", "outcome": outcome, "created_at": now, "finished_at": now, "kind": "base_update"}
        with self.platform.engine.begin() as conn:
            conn.execute(sa.insert(evaluations).values(id=f"ev-{uuid.uuid4().hex}", **of, **done))

    def desire(self, adapter_id: str, desired: str = "loaded") -> None:
        record = adapters.get_adapter(self.platform, self.tenant, adapter_id)
        with self.platform.engine.begin() as conn:
            rollout.desire(conn, record, desired, self.clock())

    def state(self, adapter_id: str) -> tuple[str, str | None]:
        found = adapters.get_adapter(self.platform, self.tenant, adapter_id)
        return found.observed, found.detail

    def seen(self, adapter_id: str) -> dict[str, str]:
        with self.platform.engine.connect() as conn:
            return {url: row.observed for (url, _), row in observations.read(conn, [adapter_id]).items()}

    def round(self) -> list[str]:
        """The worker's next passes; what the rollout did."""
        self.clock.now += timedelta(milliseconds=10)
        if self.platform.servers is not None:
            own_servers.keep(self.platform)
        return [f"{r.replica} {r.action.kind}" + (f": {r.error}" if r.error else "") for r in reconcile(self.platform)]
