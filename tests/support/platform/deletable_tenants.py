"""Tenants with files, jobs and adapters on a platform whose store may be away, for what is deleted of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters.tables import adapters as table
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Replica
from control_plane.tenant_data import deletion, erasure
from control_plane.tenant_data import deletion_requests as data_deletion
from control_plane.tenant_data.tables import deletion_requests
from control_plane.tenants import service as tenants
from core import layout
from core.errors import Unavailable
from resources.object_store import LocalObjectStore
from tests.support.jobs.finished_job import finish

SECRET = "What is 7 plus 7?"
"""Part of a row that the tenant uploaded."""


WORK = f"""
import sys, pathlib
from control_plane.sandbox import scratch
with scratch.directory(pathlib.Path(sys.argv[1]), sys.argv[2] or None) as path:
    (path / "upload").write_text({SECRET!r})
    print(path, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def working(work_dir: Path, tenant: str | None) -> Iterator[Path]:
    """The directory for work in progress in which a process has a tenant's upload; the process is killed at the end."""
    command = [sys.executable, "-c", WORK, str(work_dir), tenant or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def killed_while_working(work_dir: Path, tenant: str | None) -> Path:
    with working(work_dir, tenant) as path:
        return path


@dataclass(kw_only=True)
class Clock:
    now: datetime

    def __call__(self) -> datetime:
        return self.now


class Weak(LocalObjectStore):
    """A store that goes away after so many deletions."""

    left: int | None = None

    def delete(self, key: str) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Unavailable("the store is away")
            self.left -= 1
        super().delete(key)


@dataclass(kw_only=True)
class Servers:
    """A fleet of one server, as far as a deletion looks at it."""

    adapters: dict[str, str]
    ready: bool = True
    asked: int = 0

    def replicas(self, also: Sequence[str] = ()) -> list[Replica]:
        self.asked += 1
        return [Replica(url="http://a", ready=self.ready, adapters=self.adapters if self.ready else {})]

    def load(self, url: str, name: str, directory: Path) -> None:
        self.adapters[name] = str(directory)

    def unload(self, url: str, name: str) -> None:
        self.adapters.pop(name, None)

    def probe(self, url: str, name: str) -> float:
        return 0.0


@dataclass(kw_only=True)
class World:
    platform: Platform
    clock: Clock
    store: Weak
    write: Callable[..., Path]

    def tenant(self) -> str:
        return tenants.create(self.platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")[0].id

    def trained(self, tenant: str, **fields: Any) -> str:
        """An adapter in production, from a file of the tenant, with an evaluation and what nodes keep of it."""
        with self.write(salt=tenant).open("rb") as stream:
            file = uploaded_files.create(self.platform, tenant, stream, filename="payroll of acme.jsonl", purpose="fine-tune")
        body = {"model": "tiny-base", "training_file": file.id, "metadata": {"note": "secret plan"}, **fields}
        job = jobs.submit(self.platform, tenant, JobRequest.from_body(body)).job
        id_ = finish(self.platform, tenant, job.id)
        report = {"suites": {"holdout": {"digest": hashlib.sha256(job.id.encode()).hexdigest()}}, "samples": [SECRET]}
        self.store.put_bytes(f"{layout.eval_prefix(tenant, job.id)}/report.json", json.dumps(report).encode())
        for directory in (f"adapters/{id_}", f"jobs/{job.id}", f"datasets/{tenant}/x"):
            (self.platform.settings.work_dir / directory).mkdir(parents=True, exist_ok=True)
            (self.platform.settings.work_dir / directory / "part").write_text(SECRET)
        return id_

    def deprecated(self, tenant: str) -> str:
        id_ = self.trained(tenant)
        promotions.deprecate(self.platform, tenant, id_)
        return id_

    def keys(self, prefix: str) -> list[str]:
        return [info.key for info in self.store.list(prefix)]

    def row(self, id_: str) -> Any:
        with self.platform.engine.connect() as conn:
            return conn.execute(sa.select(table).where(table.c.id == id_)).one()

    def delete_data(self, tenant: str) -> str:
        asked = data_deletion.request_tenant(self.platform, tenant, confirm=tenant, reason="contract ended", requested_by="key_1")
        self.clock.now += 2 * erasure.QUIET
        return asked.id

    def carried_out(self, deletion_id: str) -> bool:
        """Two rounds: one that deletes everything, and one that looks again later."""
        assert not deletion.carry_out(self.platform, deletion_id)
        assert "a second look follows" in str(deletion.get(self.platform, self.of(deletion_id), deletion_id).waiting_for)
        self.clock.now += erasure.TenantData.SETTLES
        return deletion.carry_out(self.platform, deletion_id)

    def of(self, deletion_id: str) -> str:
        with self.platform.engine.connect() as conn:
            return str(conn.execute(sa.select(deletion_requests.c.tenant_id).where(deletion_requests.c.id == deletion_id)).scalar_one())


def texts_of_database(platform: Platform) -> str:
    """Every value of every row of every table."""
    with platform.engine.connect() as conn:
        names = sa.inspect(conn).get_table_names()
        return "\n".join(text for name in names for text in conn.execute(sa.text(f'SELECT to_jsonb(t)::text FROM "{name}" t')).scalars())
