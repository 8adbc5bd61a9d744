"""Everything a tenant has, as one ZIP archive that is built while it is sent: nothing is stored, and memory stays bounded.

``objects/`` has every stored object but the output of the platform's own steps, ``database/`` a file of JSON lines per table, and
``manifest.json``, the last member, lists path, kind, bytes and sha256 of all others. An archive without it is incomplete. Rows are read
page by page, each in its own transaction: concurrent changes may appear in one file and not in another.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from control_plane.attempts.tables import health_verdicts
from control_plane.datasets.tables import eval_suites
from control_plane.jobs.service import shown_to_tenant
from control_plane.platform.context import Platform
from control_plane.platform.tables import metadata
from control_plane.platform.transfer import CHUNK_BYTES, Outgoing
from control_plane.tenants import audit_log as audit
from core import layout
from core.errors import NotFound

ROWS = 1000
"""Rows per page: about 1 MB of job events."""
MANIFEST = "manifest.json"
FORMAT = 1
EXPORTED: Mapping[str, Sequence[str]] = {
    "tenants": (), "members": (), "api_keys": ("sha256",), "checkpoint_permissions": (),
    "webhook_endpoints": ("secrets", "sealed_url"), "deliveries": (), "integrations": ("sealed_key",), "wandb_runs": ("summary",),
    "files": ("progress",), "uploads": (), "datasets": (), "eval_suites": (), "scored_suites": (),
    "jobs": ("ahead", "promise", "barred_until", "trace_parent"), "job_events": (), "attempts": ("workload", "nodes"), "checkpoints": (),
    "health_verdicts": (), "sweeps": (), "sweep_trials": (),
    "evaluations": (), "adapters": (), "exports": ("claim",), "model_routes": (),
    "budgets": (), "budget_alerts": (), "quota_notices": (), "ledger_entries": (), "ledger_postings": (), "meter_events": (),
    "refund_cases": ("decided_by", "note"), "invoices": (), "invoice_entries": (), "storage_samples": (),
    "deletions": (), "deletion_requests": (),
}  # fmt: skip
"""Exported tables and their columns, without secrets and internals."""
LEFT_OUT: Mapping[str, str] = {
    "audit_log": "written to audit_log.jsonl as GET /v1/audit_log shows it",
    "outbox": "repeats job events and adapters for webhooks; deliveries lists what was sent",
    **dict.fromkeys(("idempotency_keys", "upload_parts", "loose_objects", "deletion_objects", "rate_limits"), "work in progress"),
    "console_sessions": "hashes of secrets that expire within hours",
    **dict.fromkeys(("eval_scores", "unbilled_attempts", "quota_holds"), "derived: reports, meter events and jobs hold the same"),
    **dict.fromkeys(
        ("agents", "agent_tokens", "held_devices", "reservations", "run_launches", "deployments", "replica_adapters", "model_servers"),
        "the platform's nodes and servers",
    ),
    **dict.fromkeys(
        (
            "operator_keys",
            "node_drains",
            "node_health",
            "maintenance",
            "scheduler_state",
            "mirrors",
            "adapter_stage_moves",
            "recipes",
            "signing_keys",
        ),
        "not about a tenant",
    ),
}
"""Tables that are not exported, and why."""
ROWS_SHOWN: Mapping[str, sa.ColumnElement[bool]] = {
    "job_events": shown_to_tenant(),
    "health_verdicts": health_verdicts.c.audience == "tenant",
    "eval_suites": eval_suites.c.tenant_id.is_not(None),
}
"""Rows of a table; row security limits every table to the tenant's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Archive:
    sent: Outgoing
    file: zipfile.ZipFile
    listed: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, path: str, kind: str, chunks: Iterator[bytes], *, compressed: bool) -> Iterator[bytes]:
        """Write a member and yield the output so far."""
        digest, size = hashlib.sha256(), 0
        info = zipfile.ZipInfo(path)
        info.compress_type = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        with self.file.open(info, "w", force_zip64=True) as out:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
                yield self.sent.take()
        self.listed.append({"path": path, "kind": kind, "bytes": size, "sha256": digest.hexdigest()})
        yield self.sent.take()


def archive(platform: Platform, tenant: str) -> Generator[bytes]:
    """Yield the archive of `tenant`; `platform` is in the tenant's scope."""
    yield from filter(None, _archive(platform, tenant))


def _archive(platform: Platform, tenant: str) -> Iterator[bytes]:
    sent = Outgoing()
    with zipfile.ZipFile(sent, "w", allowZip64=True) as file:
        made = _Archive(sent=sent, file=file)
        for name, without in EXPORTED.items():
            yield from made.add(f"database/{name}.jsonl", name, _rows(platform, name, without), compressed=True)
        lines = (_line(audit.document(line)) for line in audit.every(platform, tenant, audit.Wanted()))
        yield from made.add("database/audit_log.jsonl", "audit_log", lines, compressed=True)
        prefix = layout.tenant_prefix(tenant)
        for info in platform.objects.list(prefix):
            path = info.key.removeprefix(f"{prefix}/")
            if path.startswith(f"{layout.STEP_LOGS}/"):
                continue
            try:
                stream = platform.objects.open(info.key)
            except NotFound:  # deleted meanwhile
                continue
            with stream:
                chunks = iter(lambda stream=stream: stream.read(CHUNK_BYTES), b"")  # type: ignore[misc]
                yield from made.add(f"objects/{path}", path.partition("/")[0], chunks, compressed=False)
        manifest = {"format": FORMAT, "tenant": tenant, "exported_at": platform.clock().isoformat(), "members": made.listed}
        file.writestr(MANIFEST, json.dumps(manifest, indent=1), zipfile.ZIP_DEFLATED)
    yield sent.take()


def _rows(platform: Platform, name: str, without: Sequence[str]) -> Iterator[bytes]:
    """Yield rows of a table as JSON lines, in key order."""
    table: sa.Table = metadata.tables[name]
    keys = list(table.primary_key)
    columns = [column for column in table.c if column.name not in without]
    query = sa.select(*columns, *(key for key in keys if key.name in without)).order_by(*keys).limit(ROWS)
    if name in ROWS_SHOWN:
        query = query.where(ROWS_SHOWN[name])
    page = query
    while True:
        with platform.engine.connect() as conn:
            rows = conn.execute(page).mappings().all()
        if rows:
            yield b"".join(_line(_shown(name, {column.name: row[column] for column in columns})) for row in rows)
        if len(rows) < ROWS:
            return
        last = tuple(rows[-1][key] for key in keys)
        page = query.where(sa.tuple_(*keys) > sa.tuple_(*last, types=[key.type for key in keys]))


def _shown(name: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**row, "detail": audit.without_names(row["detail"])} if name == "ledger_entries" else row


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, default=_text, ensure_ascii=False).encode() + b"\n"


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)
