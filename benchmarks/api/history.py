"""A platform with a long history: tenants with keys, jobs of every state, their events, attempts and bills, made in the database itself.

What a row holds is as large as in a real one (a frozen specification of 2 KB, metrics of 200 bytes), and events lie in the order
of time, those of all jobs interleaved: reading one job's is as scattered as it is after a year.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, Engine

from control_plane.datasets.tables import datasets, files
from control_plane.tenants.tables import api_keys, tenants

NUM_FILES = 10
"""Of each tenant."""
SPEC = {"format": 2, "method": "sft", "modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "notes": ["x" * 100] * 16}
STORED = "id LIKE 'ftjob-00000000%'"
"""What is stored here, and not by others before."""
STATES = ("succeeded",) * 80 + ("failed",) * 10 + ("cancelled",) * 10


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What was stored."""

    num_tenants: int
    num_jobs: int
    num_events: int
    model: str

    def tenant(self, number: int) -> str:
        return f"t-{number:04d}"

    def key(self, number: int) -> str:
        return secret(number)

    def job(self, number: int) -> str:
        return f"ftjob-{number:024d}"

    def jobs_of(self, tenant: int) -> range:
        return range(tenant, self.num_jobs, self.num_tenants)


def secret(number: int) -> str:
    return f"ft-sk-benchmark-{number:04d}-" + hashlib.sha256(str(number).encode()).hexdigest()[:24]


def store(engine: Engine, *, num_tenants: int, num_jobs: int, events_per_job: int, model: str, base_digest: str) -> History:
    """Fill a platform, which may hold tenants of these names; five million events take a few minutes."""
    with engine.begin() as conn:
        conn.exec_driver_sql("SET LOCAL statement_timeout = 0; SET LOCAL synchronous_commit = off")
        _tenants(conn, num_tenants)
        _files(conn, num_tenants)
        _jobs(conn, num_jobs, num_tenants, model, base_digest)
    per_pass = 5
    for first in range(0, events_per_job, per_pass):
        with engine.begin() as conn:
            conn.exec_driver_sql("SET LOCAL statement_timeout = 0; SET LOCAL synchronous_commit = off")
            conn.exec_driver_sql("SET LOCAL session_replication_role = replica")  # without a look-up of each event's job
            _events(conn, num_jobs, first, min(first + per_pass, events_per_job))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.exec_driver_sql("SET statement_timeout = 0")
        conn.exec_driver_sql("VACUUM (ANALYZE)")
        conn.exec_driver_sql("CHECKPOINT")
    return History(num_tenants=num_tenants, num_jobs=num_jobs, num_events=num_jobs * events_per_job, model=model)


def _tenants(conn: Connection, num: int) -> None:
    now = {"created_at": datetime.now(UTC)}
    limits = {"max_jobs_in_flight": 10**6, "hard_gpu_hours": 1e9, "soft_gpu_hours": 1e9, "requests_per_minute": 10**6}
    rows = [{"id": f"t-{i:04d}", "name": f"Tenant {i}", "tier": "premium", **now, **limits} for i in range(num)]
    conn.execute(insert(tenants).on_conflict_do_nothing(), rows)
    common = {"name": "benchmark", "hint": "ft-sk-...", "scopes": ["admin"], **now}
    keys = [
        {"id": f"key_{i:024d}", "tenant_id": f"t-{i:04d}", "sha256": hashlib.sha256(secret(i).encode()).hexdigest(), **common}
        for i in range(num)
    ]
    conn.execute(sa.insert(api_keys), keys)


def _files(conn: Connection, num_tenants: int) -> None:
    common = {"report": {"valid": True}, "created_at": datetime.now(UTC)}
    made = [
        {
            "tenant_id": f"t-{i:04d}", "id": f"ds_{i:024d}", "name": "history", "version": 1, "format": "chat", "content_sha256": "0" * 64,
            "row_count": 10_000, "uri": "file:///nowhere", **common,
        }
        for i in range(num_tenants)
    ]  # fmt: skip
    conn.execute(sa.insert(datasets), made)
    rows = [
        {
            "id": file_id(i, n), "tenant_id": f"t-{i:04d}", "filename": f"support-{n}.jsonl", "purpose": "fine-tune", "bytes": 10**7,
            "sha256": "0" * 64, "object_key": f"tenants/t-{i:04d}/files/{n}", "status": "processed", "dataset_id": f"ds_{i:024d}", **common,
        }
        for i in range(num_tenants)
        for n in range(NUM_FILES)
    ]  # fmt: skip
    conn.execute(sa.insert(files), rows)


def file_id(tenant: int, number: int) -> str:
    return f"file-{tenant:012d}{number:012d}"


def _jobs(conn: Connection, num_jobs: int, num_tenants: int, model: str, digest: str) -> None:
    states = "ARRAY[" + ",".join(f"'{s}'" for s in STATES) + "]"
    given = {"n": num_jobs, "t": num_tenants, "model": model, "digest": digest, "spec": json.dumps(SPEC)}
    conn.execute(
        sa.text(f"""
        INSERT INTO jobs (id, tenant_id, state, tier, model, base_digest, method, training_file, seed, request, request_sha256,
            hyperparameters, metadata, dataset_id, pack_fingerprint, spec, spec_sha256, num_gpus, attempt, step, total_steps, loss,
            trained_tokens, created_at, queued_at, started_at, first_step_at, finished_at)
        SELECT 'ftjob-' || lpad(i::text, 24, '0'), 't-' || lpad((i % :t)::text, 4, '0'), ({states})[1 + (i * 7) % 100], 'premium', :model,
            :digest, 'sft', 'file-' || lpad((i % :t)::text, 12, '0') || lpad((i / :t % {NUM_FILES})::text, 12, '0'), i,
            jsonb_build_object('model', CAST(:model AS text), 'training_file', 'x', 'suffix', 'bench'), md5(i::text) || md5((-i)::text),
            '{{"n_epochs": 3, "batch_size": "auto"}}', jsonb_build_object('team', 'team-' || i % 7, 'run', i::text),
            'ds_' || lpad((i % :t)::text, 24, '0'), md5(i::text), CAST(:spec AS jsonb), md5(i::text) || md5(i::text), 1, 1, 500, 500, 0.7,
            1000000, w, w, w + interval '1 minute', w + interval '2 minutes', w + interval '1 hour'
        FROM (SELECT i, now() - (:n - i) * interval '5 minutes' AS w FROM generate_series(0, :n - 1) i) s"""),
        given,
    )
    conn.execute(
        sa.text(f"""
        INSERT INTO attempts (job_id, attempt, workload, outcome, exit_code, from_step, last_step, started_at, ended_at, completed_at)
        SELECT id, 1, id || '-a1', CASE state WHEN 'succeeded' THEN 'succeeded' ELSE 'diverged' END, 0, 0, 500, started_at, finished_at,
            finished_at
        FROM jobs WHERE {STORED}""")
    )
    conn.execute(
        sa.text(f"""
        INSERT INTO reservations (job_id, attempt, pool, num_gpus, granted_at, released_at)
        SELECT id, 1, 'local', 1, started_at, finished_at FROM jobs WHERE {STORED}""")
    )
    conn.execute(
        sa.text(f"""
        INSERT INTO ledger_entries (id, tenant_id, kind, job_id, attempt, gpu_type, pricing, gpu_seconds, amount_micros, list_micros,
            detail, occurred_at, created_at)
        SELECT id || '/a1/usage', tenant_id, 'usage', id, 1, 'local', 'on_demand', 3480, 967000, 967000, '{{}}', finished_at, finished_at
        FROM jobs WHERE {STORED}""")
    )
    conn.execute(
        sa.text(f"""
        INSERT INTO ledger_postings (entry_id, account, tenant_id, amount_micros)
        SELECT id, 'receivable/' || tenant_id, tenant_id, amount_micros FROM ledger_entries WHERE {STORED} UNION ALL
        SELECT id, 'revenue/gpu', tenant_id, -amount_micros FROM ledger_entries WHERE {STORED}""")
    )


def _events(conn: Connection, num_jobs: int, first: int, end: int) -> None:
    conn.execute(
        sa.text("""
        INSERT INTO job_events (id, job_id, level, type, code, message, data, created_at)
        SELECT 'ftevent-' || lpad(i::text, 20, '0') || lpad(e::text, 12, '0'), 'ftjob-' || lpad(i::text, 24, '0'),
            'info', 'metrics', 'metrics', 'Step ' || e || '/500: training loss=0.7000',
            jsonb_build_object('step', e, 'total_steps', 500, 'train_loss', 0.7, 'learning_rate', 0.0002, 'grad_norm', 1.25, 'epoch', 1.5,
                'tokens_per_s', 10240.5, 'num_tokens', 20480, 'train_mean_token_accuracy', 0.81),
            now() - (:n - i) * interval '5 minutes' + e * interval '1 minute'
        FROM generate_series(CAST(:first AS int), CAST(:end AS int) - 1) e, generate_series(0, :n - 1) i"""),
        {"n": num_jobs, "first": first, "end": end},
    )
