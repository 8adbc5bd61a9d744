"""Lineage, approvals and deletions over HTTP, with the client that the command line uses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from control_plane.adapters.tables import adapters
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenant_data import deletion
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, Forbidden, InvalidRequest, NotFound
from ft_client import FtClient
from ft_client.cli.command_tree import build
from tests.support.jobs.finished_job import finish


@pytest.fixture
def made(
    platform: Platform, tenant: Tenant, api_url: str, api_key: str, write_chat_rows: Callable[..., Path]
) -> Iterator[tuple[FtClient, str, str, str]]:
    """A client; an uploaded file's sha256; an adapter's id and model name."""
    with FtClient(base_url=api_url, api_key=api_key) as client:
        path = write_chat_rows()
        file = client.files.create(path)
        job = jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": file["id"]})).job
        id_ = finish(platform, tenant.id, job.id, stage="staging")
        with platform.engine.connect() as conn:
            name = conn.execute(sa.select(adapters.c.name).where(adapters.c.id == id_)).scalar_one()
        yield client, hashlib.sha256(path.read_bytes()).hexdigest(), id_, name


def test_one_call_leads_from_an_answers_model_to_the_uploaded_bytes(
    made: tuple[FtClient, str, str, str], api_url: str, api_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, sha256, id_, name = made
    found = client.models.lineage(name, verify=True)
    assert (found["kind"], found["holds"], found["adapters"][0]["uploads"][0]["sha256"]) == ("adapter", True, sha256)
    assert isinstance(found["adapters"][0]["adapter"]["created_at"], int)
    by_id = client.models.lineage(id_)
    assert by_id["adapters"][0]["adapter"]["name"] == name and by_id["holds"] is None
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_API_KEY", api_key)
    shown = CliRunner().invoke(build(), ["adapters", "lineage", name, "--verify"])
    assert shown.exit_code == 0, shown.output
    assert sha256 in shown.output.replace("\n", "") and "BROKEN" not in shown.output
    assert shown.output.splitlines()[-1].startswith("VERIFIED: ")
    with pytest.raises(NotFound):
        client.models.lineage("ft:tiny-base:nobody::x")


def test_another_key_approves_and_a_key_that_only_reads_does_not(
    platform: Platform, tenant: Tenant, api_url: str, made: tuple[FtClient, str, str, str]
) -> None:
    client, _, id_, name = made
    with pytest.raises(Conflict, match="needs no approval"):
        client.adapters.approve(id_)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(adapters).where(adapters.c.id == id_).values(approval="pending"))
    assert [a["id"] for a in client.adapters.list(approval="pending").all()] == [id_]
    reader = tenants.create_key(platform, tenant.id, name="r", scopes=["read"])
    with FtClient(base_url=api_url, api_key=reader.secret) as other, pytest.raises(Forbidden):
        other.adapters.approve(id_)
    second = tenants.create_key(platform, tenant.id, name="reviewer", scopes=["write"])
    with FtClient(base_url=api_url, api_key=second.secret) as other:
        assert other.adapters.reject(name, note="rude")["approval"] == "rejected"
        done = other.adapters.approve(name, note="better")
    assert (done["approval"], done["approved_by"], done["approval_note"]) == ("approved", second.id, "better")
    assert isinstance(done["approved_at"], int)
    assert client.adapters.retrieve(id_)["stage"] == "staging"


def test_a_tenants_data_goes_on_its_admins_word_and_the_proof_can_be_fetched(
    platform: Platform, tenant: Tenant, api_url: str, made: tuple[FtClient, str, str, str], tmp_path: Path, api_key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    client, sha256, id_, _ = made
    writer = tenants.create_key(platform, tenant.id, name="w", scopes=["write"])
    with FtClient(base_url=api_url, api_key=writer.secret) as other, pytest.raises(Forbidden):
        other.deletions.request_everything(confirm=tenant.id, reason="r")
    with pytest.raises(InvalidRequest, match="not the tenant's id"):
        client.deletions.request_everything(confirm="yes", reason="r")
    asked = client.deletions.request_everything(confirm=tenant.id, reason="contract ended")
    assert (asked["status"], asked["proof"], asked["subject_kind"]) == ("in_progress", None, "tenant")
    later = [platform.clock() + n * timedelta(minutes=10) for n in (1, 2)]
    done = [deletion.carry_out_all(replace(platform, clock=lambda at=at: at)) for at in later]  # type: ignore[misc]
    assert done == [[], [asked["id"]]], "the second look is that of the next round"
    proven = client.deletions.retrieve(asked["id"])
    assert proven["status"] == "done"
    assert sha256 in {o["sha256"] for o in proven["proof"]["objects"]}
    assert [d["id"] for d in client.deletions.list().all()] == [asked["id"]]
    assert client.adapters.retrieve(id_)["stage"] == "archived"
    assert client.models.lineage(id_)["adapters"][0]["deletion"]["id"] == asked["id"]
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_API_KEY", api_key)
    written = CliRunner().invoke(build(), ["deletions", asked["id"], "-o", str(tmp_path / "proof.json"), "--json"])
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout) == json.loads((tmp_path / "proof.json").read_text()) == proven
    _, key = tenants.create(platform, f"s-{tenant.id}", tier="free")
    with FtClient(base_url=api_url, api_key=key.secret) as other, pytest.raises(NotFound):
        other.deletions.retrieve(asked["id"])
