"""A scratch platform with a durable PostgreSQL, and queued jobs made in it by the thousand, as preparation leaves them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.platform.context import Platform
from control_plane.platform.settings import load as load_settings
from control_plane.tenants.tables import tenants
from core.base_models import Catalogue
from resources.database import embedded, migrate
from resources.database.engine import make_engine, make_logins
from resources.object_store import LocalObjectStore

SPEC = {"format": 2, "method": "sft", "adapter": "lora", "notes": ["x" * 100] * 16}
"""As large as a frozen one: 2 KB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """What a queue's row says of a job beside what all have."""

    id: str
    tenant: str
    tier: str
    num_gpus: int
    expected_s: float
    queued_at: datetime
    job_class: str = "lora"


@contextmanager
def scratch_database() -> Iterator[str]:
    """URL of an empty control plane's database on a server of its own: durable, as it ships."""
    home = Path(tempfile.mkdtemp(prefix="ft-scheduler-"))
    home.chmod(0o755)
    directory = home / "data"
    server = embedded.start(directory, databases=("ft",))
    try:
        url = embedded.socket_url(directory, "ft")
        engine = make_engine(url)
        migrate.upgrade(engine)
        engine.dispose()
        yield url
    finally:
        embedded.stop(server)
        shutil.rmtree(home, ignore_errors=True)


def platform_on(url: str) -> Platform:
    """A platform that schedules and serves nothing."""
    home = Path(tempfile.gettempdir())
    settings = load_settings({"FT_HOME": str(home / "ft-scheduler-home"), "FT_DATABASE_URL": url, "FT_MLFLOW_URI": "off"})
    return Platform(logins=make_logins(url), objects=LocalObjectStore(home / "ft-scheduler-objects"), models=Catalogue({}), fleet=None,
                    settings=settings)  # fmt: skip


def add_tenants(conn: Connection, names: Sequence[str]) -> None:
    """Tenants without limits, each with one file that its jobs are said to train on."""
    limits = {"max_jobs_in_flight": 10**6, "hard_gpu_hours": 1e9, "soft_gpu_hours": 1e9, "requests_per_minute": 10**6}
    rows = [{"id": name, "name": name, "tier": "premium", "created_at": sa.func.now(), **limits} for name in names]
    for row in rows:
        conn.execute(sa.insert(tenants).values(row))
    conn.execute(
        sa.text("""
        INSERT INTO files (id, tenant_id, filename, purpose, bytes, sha256, object_key, status, created_at)
        SELECT 'file-' || id, id, 'rows.jsonl', 'fine-tune', 10000000, repeat('0', 64), 'tenants/' || id || '/files/x', 'processed', now()
        FROM tenants WHERE id = ANY(:names)"""),
        {"names": list(names)},
    )


ADD_JOBS = sa.text("""
    INSERT INTO jobs (id, tenant_id, state, tier, model, base_digest, method, training_file, seed, request, request_sha256, hyperparameters,
        dataset_id, pack_fingerprint, spec, spec_sha256, num_gpus, job_class, modelled_s, expected_s, total_steps, created_at, queued_at,
        waiting_since)
    SELECT q.id, q.tenant, 'queued', q.tier, 'demo', 'sha256:0', 'sft', 'file-' || q.tenant, 1,
        jsonb_build_object('model', 'demo', 'training_file', 'file-' || q.tenant), md5(q.id), '{"n_epochs": 3}', 'ds_0', 'pk_0',
        CAST(:spec AS jsonb), md5(q.id), q.num_gpus, q.job_class, q.expected_s, q.expected_s, 100, q.queued_at, q.queued_at, q.queued_at
    FROM jsonb_to_recordset(CAST(:jobs AS jsonb))
        AS q(id text, tenant text, tier text, num_gpus int, expected_s float, queued_at timestamptz, job_class text)""")


def add_jobs(conn: Connection, jobs: Sequence[QueuedJob]) -> None:
    """Queued jobs, in one statement."""
    rows = [
        {
            "id": job.id, "tenant": job.tenant, "tier": job.tier, "num_gpus": job.num_gpus, "expected_s": job.expected_s,
            "queued_at": job.queued_at.isoformat(), "job_class": job.job_class,
        }
        for job in jobs
    ]  # fmt: skip
    conn.execute(ADD_JOBS, {"spec": json.dumps(SPEC), "jobs": json.dumps(rows)})


def server_cpu_s(conn: Connection) -> float:
    """CPU seconds of the server's processes, those that still run and those that it waited for."""
    backend = psutil.Process(conn.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())
    server = backend.parent()
    assert server is not None
    total = sum(server.cpu_times()[:4])
    for child in server.children():
        total += sum(child.cpu_times()[:2])
    return float(total)
