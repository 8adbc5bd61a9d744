"""``GET /v1/data_export``: everything of one tenant, listed in a manifest; no secret, nothing of another tenant, in bounded memory."""

from __future__ import annotations

import hashlib
import io
import json
import tracemalloc
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
import sqlalchemy as sa
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from typer.testing import CliRunner

from control_plane.attempts.tables import health_verdicts
from control_plane.billing.tables import storage_samples
from control_plane.datasets import suites
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.notifications.tables import webhook_endpoints
from control_plane.platform.context import Actor, Platform
from control_plane.tenant_data import export
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tracking.tables import integrations
from core import layout
from core.errors import IntegrityError
from ft_client import FtClient
from ft_client.cli.command_tree import build
from ft_client.cli.export_commands import _verified
from resources.object_store import LocalObjectStore
from tests.support.jobs.finished_job import finish
from tests.support.platform.declared_tables import declared_tables
from tests.support.platform.ledger_entries import enter

SECRET, SEALED = "whsec_c2VjcmV0", "gAAAAAsealed"


@pytest.fixture
def filled(platform: Platform, api_url: str, write_chat_rows: Callable[..., Path]) -> Callable[[Tenant], dict[str, str]]:
    """Gives a tenant something of every kind; returns the ids."""

    def fill(tenant: Tenant) -> dict[str, str]:
        with write_chat_rows(salt=tenant.id).open("rb") as stream:
            file = uploaded_files.create(platform, tenant.id, stream, filename="rows.jsonl", purpose="fine-tune")
        body = {"model": "tiny-base", "training_file": file.id, "metadata": {"note": f"plan of {tenant.id}"}}
        job = jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job
        adapter = finish(platform, tenant.id, job.id)
        hook, now = f"we_{uuid.uuid4().hex[:24]}", platform.clock()
        row = {"id": hook, "tenant_id": tenant.id, "name": "n", "url": "https://example.com/hook", "event_types": ["*"], "state": "enabled"}
        with platform.engine.begin() as conn:
            secrets = [{"secret": SECRET, "until": None}]
            conn.execute(sa.insert(webhook_endpoints).values(**row, sealed_url=SEALED, secrets=secrets, created_at=now, updated_at=now))
            wandb = {"tenant_id": tenant.id, "type": "wandb", "sealed_key": SEALED, "hint": "...wxyz"}
            conn.execute(sa.insert(integrations).values(**wandb, created_at=now, updated_at=now))
            enter(conn, tenant.id, job.id, amount_micros=1234, gpu_type="H200", gpu_seconds=9.0)
        key = tenants.create_key(platform, tenant.id, name="admin", scopes=["admin"]).secret
        person = {"email": f"ada@{tenant.id}.example.com", "role": "admin"}
        httpx.post(f"{api_url}/v1/members", json=person, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        return {"file": file.id, "job": job.id, "adapter": adapter, "hook": hook, "key": key, "email": person["email"]}

    return fill


def test_the_archive_holds_everything_of_its_tenant_and_nothing_else(
    platform: Platform, api_url: str, tenant: Tenant, filled: Callable[[Tenant], dict[str, str]], tmp_path: Path
) -> None:
    other = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}", tier="standard")[0]
    mine, theirs = filled(tenant), filled(other)
    with FtClient(base_url=api_url, api_key=mine["key"]) as client:
        sha256 = client.data_export.download(tmp_path / "a.zip")
    assert sha256 == hashlib.sha256((tmp_path / "a.zip").read_bytes()).hexdigest()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(content.pop("manifest.json"))
    listed = {m["path"]: (m["bytes"], m["sha256"]) for m in manifest["members"]}
    assert listed == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in content.items()}
    prefix = layout.tenant_prefix(tenant.id)
    stored = {f"objects/{o.key.removeprefix(f'{prefix}/')}": platform.objects.get_bytes(o.key) for o in platform.objects.list(prefix)}
    assert {name: data for name, data in content.items() if name.startswith("objects/")} == stored and len(stored) > 5
    assert {m["kind"] for m in manifest["members"]} >= {"files", "datasets", "adapters", "jobs", "ledger_entries", "members", "audit_log"}

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in content[f"database/{name}.jsonl"].splitlines()]

    assert mine["file"] in [row["id"] for row in rows("files")]
    assert rows("jobs")[0]["metadata"] == {"note": f"plan of {tenant.id}"} and rows("jobs")[0]["spec"]
    assert [row["id"] for row in rows("adapters")] == [mine["adapter"]]
    assert rows("job_events") and rows("datasets")[0]["report"]["stats"]
    assert [row["amount_micros"] for row in rows("ledger_entries")] == [1234]
    assert mine["email"] in [row["email"] for row in rows("members")]
    assert [row["id"] for row in rows("webhook_endpoints")] == [mine["hook"]]
    assert [row["hint"] for row in rows("integrations")] == ["...wxyz"]
    assert {line["tenant_id"] for line in rows("audit_log")} == {tenant.id}
    everything = b"".join(content.values()).decode(errors="replace")
    for name in ("file", "job", "adapter", "hook", "email"):
        assert theirs[name] not in everything
    assert SECRET not in everything and SEALED not in everything and mine["key"] not in everything
    assert hashlib.sha256(mine["key"].encode()).hexdigest() not in everything


def test_the_archive_holds_no_row_that_is_the_operators(
    platform: Platform, tenant: Tenant, filled: Callable[[Tenant], dict[str, str]]
) -> None:
    mine = filled(tenant)
    question = json.dumps({"question": "Which of the seven bridges of the old town is the longest one?"}).encode()
    for owner in (None, tenant.id):
        suites.add(platform, owner, io.BytesIO(question), name=f"of-{owner}", filename="q.jsonl", field="question")
    said = {"job_id": mine["job"], "attempt": 1, "level": "warn", "message": "m", "data": {}, "raised_at": platform.clock()}
    with platform.engine.begin() as conn:
        for audience in ("tenant", "operator"):
            row = {"id": uuid.uuid4().hex, "code": f"for_{audience}", "audience": audience, **said}
            conn.execute(sa.insert(health_verdicts).values(**row))
    scoped = platform.in_scope_of(tenant.id, Actor(kind="key", id="key_test"))
    try:
        with zipfile.ZipFile(io.BytesIO(b"".join(export.archive(scoped, tenant.id)))) as archive:
            found = {
                name: [json.loads(line)[column] for line in archive.read(f"database/{name}.jsonl").splitlines()]
                for name, column in (("eval_suites", "name"), ("health_verdicts", "code"))
            }
    finally:
        suites.remove(platform, None, "of-None")
    assert found == {"eval_suites": [f"of-{tenant.id}"], "health_verdicts": ["for_tenant"]}


def test_an_object_that_is_deleted_meanwhile_is_left_out_and_the_others_follow(platform: Platform, tenant: Tenant) -> None:
    class Meanwhile(LocalObjectStore):
        def open(self, key: str) -> BinaryIO:
            if key.endswith("/b"):
                self.delete(key)
            return super().open(key)

    store = Meanwhile(platform.settings.home / "objects")
    for name in "abc":
        store.put_bytes(f"{layout.tenant_prefix(tenant.id)}/exports/x/{name}", name.encode())
    scoped = replace(platform.in_scope_of(tenant.id, Actor(kind="key", id="key_test")), objects=store)
    with zipfile.ZipFile(io.BytesIO(b"".join(export.archive(scoped, tenant.id)))) as archive:
        sent = {name: archive.read(name) for name in archive.namelist() if name.startswith("objects/")}
        listed = [m["path"] for m in json.loads(archive.read("manifest.json"))["members"]]
    assert sent == {"objects/exports/x/a": b"a", "objects/exports/x/c": b"c"}
    assert [path for path in listed if path.startswith("objects/")] == list(sent)


def test_every_table_is_exported_or_left_out_for_a_reason() -> None:
    assert not set(export.EXPORTED) & set(export.LEFT_OUT)
    metadata = declared_tables()
    assert set(metadata.tables) == set(export.EXPORTED) | set(export.LEFT_OUT)
    for name, without in export.EXPORTED.items():
        assert set(without) <= set(metadata.tables[name].c.keys())


def test_memory_is_bounded_and_pages_leave_no_row_out(platform: Platform, tenant: Tenant) -> None:
    big, num_rows = 64 << 20, 2 * export.ROWS + 7
    platform.objects.put_bytes(f"{layout.tenant_prefix(tenant.id)}/exports/x/big.tar", b"\0" * big)
    days = [date(2020, 1, 1) + timedelta(days=n) for n in range(num_rows)]
    with platform.engine.begin() as conn:
        conn.execute(
            sa.insert(storage_samples),
            [{"tenant_id": tenant.id, "day": day, "bytes": {}, "created_at": platform.clock()} for day in days],
        )
    scoped = platform.in_scope_of(tenant.id, Actor(kind="key", id="key_test"))
    tracemalloc.start()
    sent = sum(len(piece) for piece in export.archive(scoped, tenant.id))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent > big and peak < 24 << 20, f"{peak} bytes for {sent}"
    lines = b"".join(export._rows(scoped, "storage_samples", ())).splitlines()
    assert [json.loads(line)["day"] for line in lines] == [day.isoformat() for day in days]


def test_the_command_verifies_what_it_downloaded(
    api_url: str, tenant: Tenant, filled: Callable[[Tenant], dict[str, str]], tmp_path: Path
) -> None:
    mine, target = filled(tenant), tmp_path / "mine.zip"
    done = CliRunner().invoke(build(), ["export-data", "-o", str(target), "--json"], env={"FT_API_URL": api_url, "FT_API_KEY": mine["key"]})
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["members"] == len(zipfile.ZipFile(target).namelist()) - 1 > 20
    with zipfile.ZipFile(target) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    jobs_file = content["database/jobs.jsonl"]
    for change, named in (
        ({"database/jobs.jsonl": jobs_file + b"{}\n"}, r"database/jobs\.jsonl"),
        ({"objects/more": b"x"}, "objects/more is only in"),
    ):
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in {**content, **change}.items():
                archive.writestr(name, data)
        with pytest.raises(IntegrityError, match=named):
            _verified(target)


def test_the_command_keeps_no_archive_that_differs_from_its_manifest(serve: Callable[[ASGIApp], str], tmp_path: Path) -> None:
    target, content = tmp_path / "mine.zip", io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"members": [{"path": "a", "sha256": "0" * 64, "bytes": 1}]}))
        archive.writestr("a", "x")
    url = serve(Starlette(routes=[Route("/{path:path}", lambda request: Response(content.getvalue()))]))
    for _ in range(2):
        done = CliRunner().invoke(build(), ["export-data", "-o", str(target)], env={"FT_API_URL": url, "FT_API_KEY": "ft-sk-x"})
        assert isinstance(done.exception, IntegrityError) or "run the command again" in done.output, done.output
        assert list(tmp_path.iterdir()) == []
