"""Adapters and exports are signed by the worker and verified offline; keys are rotated and revoked."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from sqlalchemy.exc import ProgrammingError
from typer.testing import CliRunner

from control_plane.adapters import adapter_signatures, lineage, signing_keys
from control_plane.adapters.service import set_stage
from control_plane.adapters.tables import adapters
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, IntegrityError, NotFound
from engine.adapters.signatures import dsse, public_keys, signed_folder, statements
from engine.adapters.stages import Stage
from ft_client import FtClient
from ft_client.cli.command_tree import build
from tests.support.jobs.finished_job import finish
from tests.support.platform.database_roles import as_operator


@pytest.fixture
def signer(platform: Platform, tmp_path: Path) -> Platform:
    """The platform with a key file of its own, as its operators have it."""
    return as_operator(replace(platform, settings=replace(platform.settings, signing_key_file=tmp_path / "keys" / "signing.key")))


@pytest.fixture
def adapter_id(platform: Platform, tenant: Tenant, api_url: str, api_key: str, write_chat_rows: Callable[..., Path]) -> str:
    with FtClient(base_url=api_url, api_key=api_key) as client:
        file = client.files.create(write_chat_rows())
    job = jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": file["id"]})).job
    return finish(platform, tenant.id, job.id, stage="staging")


def link_of(platform: Platform, tenant: str, adapter_id: str) -> lineage.Json:
    (link,) = (
        one for one in lineage.of_adapter(platform, tenant, adapter_id, verify=True)["adapters"][0]["links"] if one["link"] == "signature"
    )
    return dict(link)


def test_a_registered_adapter_is_signed_and_its_lineage_verifies_the_signature(
    signer: Platform, tenant: Tenant, adapter_id: str, api_url: str, api_key: str
) -> None:
    with FtClient(base_url=api_url, api_key=api_key) as client:
        with pytest.raises(NotFound) as early:
            client.adapters.signature(adapter_id)
        assert early.value.code == "signature_not_found"
        assert link_of(signer, tenant.id, adapter_id)["holds"] is None
        adapter_signatures.sign_due(signer)
        published = httpx.get(f"{api_url}/.well-known/ft-signing-keys.json")  # without a key
        assert published.status_code == 200
        statement = dsse.open_envelope(client.adapters.signature(adapter_id), public_keys.read_key_set(published.json()))
    record = adapter_signatures.get_adapter(signer, tenant.id, adapter_id)
    assert statements.statement_subjects(statement)["manifest.json"] == record.manifest_sha256
    inputs = {one["name"]: one["digest"] for one in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert inputs["base_model:tiny-base"] == {"sha256": record.base_digest} and f"dataset:{record.dataset_id}" in inputs
    assert link_of(signer, tenant.id, adapter_id)["holds"] is True
    before = adapter_signatures.signature(signer, tenant.id, adapter_id)
    adapter_signatures.sign_due(signer)
    assert adapter_signatures.signature(signer, tenant.id, adapter_id) == before
    other = json.loads(json.dumps(before)) | {"payload": dsse.sign_statement({"subject": []}, signing_keys.current(signer))["payload"]}
    with signer.engine.begin() as conn:
        conn.execute(sa.update(adapters).where(adapters.c.id == adapter_id).values(signature=other))
    assert link_of(signer, tenant.id, adapter_id)["holds"] is False


def test_an_adapter_whose_files_are_not_those_of_its_record_is_not_signed(signer: Platform, tenant: Tenant, adapter_id: str) -> None:
    record = adapter_signatures.get_adapter(signer, tenant.id, adapter_id)
    signer.objects.put_bytes(f"{record.object_prefix}/manifest.json", b'{"files": {}}')
    adapter_signatures.sign_due(signer)
    with pytest.raises(NotFound):
        adapter_signatures.signature(signer, tenant.id, adapter_id)


def test_a_replaced_key_verifies_what_it_signed_until_it_is_revoked(
    signer: Platform, tenant: Tenant, adapter_id: str, tmp_path: Path
) -> None:
    adapter_signatures.sign_due(signer)
    old = public_keys.key_id(signing_keys.current(signer).public_key())
    assert stat.S_IMODE(signer.settings.signing_key_file.stat().st_mode) == 0o600
    signed_before = adapter_signatures.signature(signer, tenant.id, adapter_id)
    new = signing_keys.rotate(signer)
    assert stat.S_IMODE(signer.settings.signing_key_file.stat().st_mode) == 0o600
    assert [*signing_keys.trusted(signer)][:1] == [new.id] and old in signing_keys.trusted(signer)
    assert dsse.open_envelope(signed_before, signing_keys.trusted(signer))
    revoked = signing_keys.revoke(signer, old)
    assert signing_keys.revoke(signer, old).revoked_at == revoked.revoked_at
    with pytest.raises(IntegrityError) as refused:
        dsse.open_envelope(signed_before, signing_keys.trusted(signer))
    assert refused.value.code == "signing_key_unknown" and old in refused.value.message
    adapter_signatures.sign_due(signer)
    assert adapter_signatures.signature(signer, tenant.id, adapter_id)["signatures"][0]["keyid"] == new.id
    late = {"signature": signed_before, "signing_key_id": old}  # of a round that began before the revocation
    with signer.engine.begin() as conn:
        conn.execute(sa.update(adapters).where(adapters.c.id == adapter_id).values(**late))
    assert adapter_signatures.sign_due(signer) == 1
    assert adapter_signatures.signature(signer, tenant.id, adapter_id)["signatures"][0]["keyid"] == new.id
    signing_keys.revoke(signer, new.id)
    with pytest.raises(IntegrityError, match="signing-keys rotate"):
        adapter_signatures.sign_due(signer)


def test_an_export_is_verified_offline_by_the_command(
    adapter_id: str, api_url: str, api_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, saved, ft = tmp_path / "export", tmp_path / "keys.json", CliRunner()
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_API_KEY", api_key)
    assert ft.invoke(build(), ["export", adapter_id, "-o", str(folder)]).exit_code == 0
    assert (folder / signed_folder.ENVELOPE_FILE).is_file()
    assert ft.invoke(build(), ["models", "keys", "-o", str(saved)]).exit_code == 0
    monkeypatch.setenv("FT_API_URL", "http://127.0.0.1:9")  # nothing listens there
    command = ["models", "verify", str(folder), "--keys", str(saved)]
    found = ft.invoke(build(), command)
    assert found.exit_code == 0 and "VERIFIED" in found.output, found.output
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    refused = ft.invoke(build(), [*command, "--json"])
    assert refused.exit_code == 1
    assert [one["code"] for one in json.loads(refused.stdout)["refusals"]] == ["file_changed"]


def test_a_key_that_cannot_sign_is_refused_with_its_file(signer: Platform) -> None:
    with pytest.raises(Conflict, match="in its Secret"):
        signing_keys.rotate(signer)
    file = signer.settings.signing_key_file
    file.parent.mkdir()
    file.touch(0o600)
    other = rsa.generate_private_key(public_exponent=65537, key_size=1024).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for content in (b"nothing", other):
        file.write_bytes(content)
        with pytest.raises(IntegrityError, match="ed25519") as refused:
            signing_keys.current(signer)
        assert refused.value.code == "signing_key_unreadable" and str(file) in refused.value.message
    file.chmod(0o644)
    with pytest.raises(IntegrityError, match="chmod 600"):
        signing_keys.current(signer)


def test_the_key_that_signs_stays_when_the_next_one_cannot_be_published(signer: Platform) -> None:
    before = signing_keys.current(signer)

    def away(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO signing_keys"):
            raise OSError("the database is away")

    sa.event.listen(signer.engine, "before_cursor_execute", away)
    try:
        with pytest.raises(OSError, match="away"):
            signing_keys.rotate(signer)
    finally:
        sa.event.remove(signer.engine, "before_cursor_execute", away)
    assert signing_keys.current(signer).private_bytes_raw() == before.private_bytes_raw()
    assert public_keys.key_id(before.public_key()) != signing_keys.rotate(signer).id in signing_keys.trusted(signer)


def test_an_archived_adapter_is_not_signed_because_its_files_are_gone(
    signer: Platform, tenant: Tenant, adapter_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = adapter_signatures.get_adapter(signer, tenant.id, adapter_id)
    signer.objects.delete(f"{record.object_prefix}/manifest.json")
    with signer.engine.begin() as conn:
        set_stage(conn, adapter_id, Stage.ARCHIVED, archived_at=signer.clock())
    adapter_signatures.sign_due(signer)
    assert adapter_id not in caplog.text


def test_only_operators_revoke_a_key(signer: Platform, platform: Platform) -> None:
    id_ = public_keys.key_id(signing_keys.current(signer).public_key())
    with pytest.raises(ProgrammingError, match="permission denied"):
        signing_keys.revoke(platform, id_)
    assert id_ in signing_keys.trusted(signer)
