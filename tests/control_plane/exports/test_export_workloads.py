"""Exports of what needs the base's weights: reserved, made on the reserved device, billed or refunded."""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from agent.messages import REFUSED, Exit, Heartbeat, WriteRequest
from control_plane.adapters import adapter_signatures, exports, signing_keys
from control_plane.adapters.tables import Export
from control_plane.adapters.tables import exports as exports_table
from control_plane.api.app import create_app
from control_plane.attempts import agents, evaluation_endings
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.attempts.exports.export_endings import archive_key
from control_plane.billing.tables import ledger_entries, meter_events
from control_plane.exports import export_workload
from control_plane.models.catalogue import Given, add_local, catalogue_of
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.platform.task_queue import SCHEMA
from control_plane.queue import cycle
from control_plane.queue.tables import held_devices, reservations
from control_plane.serving import rollout
from control_plane.tenant_data.erasure import TenantData
from control_plane.tenants.rules import Tenant
from core.durable_files import sha256_of
from core.errors import Forbidden, InvalidRequest
from core.workload import Kind
from engine.adapters.exports import ExportFormat
from engine.adapters.exports.archive import build_export
from ft_client.cli.command_tree import build as command_tree
from resources.launcher import open_launcher
from tests.control_plane.adapters.test_exports import MODEL, register
from tests.support.jobs.followed_evaluations import following
from tests.support.jobs.followed_jobs import until
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.database_roles import as_operator
from tests.support.servers.served_app import served


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def platform(fresh_platform: Platform, base: Path) -> Platform:
    add_local(fresh_platform.settings, MODEL, base, Given(license="Apache-2.0"))
    return replace(fresh_platform, models=catalogue_of(fresh_platform.settings))


@pytest.fixture
def adapter_id(platform: Platform, tenant: Tenant, base: Path, tmp_path: Path) -> str:
    return register(platform, tenant.id, base, tmp_path)


def ordered(platform: Platform, tenant: Tenant, adapter_id: str, **form: str) -> Export:
    return exports.request(platform, tenant.id, adapter_id, **{"format": "merged", **form})


def begin(platform: Platform, tenant: Tenant, order: Export) -> Claim:
    """Have the scheduler start the export, whose workload runs for a minute."""
    cycle.run_cycle(platform)
    held = attempts.claim(platform, tenant.id, order.job_id, Kind.EXPORT)
    assert held.export_id == order.id
    attempts.mark_started(platform, held, started_at=time.time() - 60)
    return held


def is_wanted(platform: Platform, held: Claim) -> bool:
    with platform.engine.connect() as conn:
        return attempts.is_wanted(conn, job_id=held.job_id, evaluation_id=held.evaluation_id, export_id=held.export_id)


def killed(held: Claim) -> WorkloadStatus:
    now = time.time()
    return WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=-9, started_at=now - 60, ended_at=now)


def state(platform: Platform, order: Export) -> tuple[str, str | None]:
    query = sa.select(exports_table.c.status, exports_table.c.error["code"].astext).where(exports_table.c.id == order.id)
    with platform.engine.connect() as conn:
        return tuple(conn.execute(query).one())


def entries(platform: Platform, job_id: str) -> list[tuple[int, str]]:
    query = sa.select(ledger_entries.c.attempt, ledger_entries.c.kind).where(ledger_entries.c.job_id == job_id)
    with platform.engine.connect() as conn:
        return sorted((row.attempt, row.kind) for row in conn.execute(query))


def test_an_export_holds_a_device_that_nothing_else_holds(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    order = ordered(platform, tenant, adapter_id)
    other = ordered(platform, tenant, adapter_id, format="gguf")
    held = begin(platform, tenant, order)
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(reservations).where(reservations.c.export_id == order.id)).one()
        devices = conn.execute(sa.select(held_devices).where(held_devices.c.job_id == order.job_id)).all()
    assert (row.kind, row.num_gpus, row.attempt) == ("export", 1, held.attempt)
    assert [[d.node, 1] for d in devices] == row.placement
    assert (state(platform, order)[0], state(platform, other)[0]) == ("running", "queued"), "a job holds one reservation at most"
    cycle.run_cycle(platform)
    assert state(platform, other)[0] == "queued"


def test_the_start_of_a_workload_waits_for_no_export(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    small, large = ordered(platform, tenant, adapter_id, format="adapter"), ordered(platform, tenant, adapter_id)
    begin(platform, tenant, large)
    query = sa.text(f"SELECT args->>'export_id', queue_name, lock FROM {SCHEMA}.procrastinate_jobs WHERE args->>'export_id' IS NOT NULL")
    with platform.engine.connect() as conn:
        queue_of = {row[0]: (row[1], row[2]) for row in conn.execute(query)}
    assert queue_of == {small.id: ("exports", f"exports:{tenant.id}"), large.id: ("export_starts", f"export_starts:{large.id}")}


def test_an_export_whose_device_was_released_without_an_end_gets_a_task(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    order = ordered(platform, tenant, adapter_id)
    held = begin(platform, tenant, order)
    with platform.engine.begin() as conn:
        conn.execute(sa.text(f"DELETE FROM {SCHEMA}.procrastinate_jobs"))  # the worker did them
    assert exports.add_lost(platform) == 0, "its workload has the device"
    cycle.release(platform, order.job_id, held.attempt)
    assert exports.add_lost(platform) == 1


def test_deleting_a_tenants_data_ends_its_running_exports(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    held = begin(platform, tenant, ordered(platform, tenant, adapter_id))
    assert is_wanted(platform, held)
    TenantData(tenant=tenant.id, id="deletion").withdraw(platform)
    assert not is_wanted(platform, held)


def test_an_adapter_and_a_tokenizer_wait_for_no_device(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    for form in ("adapter", "tokenizer"):
        order = ordered(platform, tenant, adapter_id, format=form)
        cycle.run_cycle(platform)
        assert (order.expected_s, state(platform, order)[0]) == (None, "queued")


def test_an_export_that_is_killed_is_refunded_and_given_up_the_third_time(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    order = ordered(platform, tenant, adapter_id)
    for number in (1, 2, 3):
        held = begin(platform, tenant, order)
        ending = evaluation_endings.judge(None, killed(held), cancelled=False, stalled=False)
        attempts.finish(platform, held, ending)
        assert state(platform, order) == (("queued", None) if number < 3 else ("failed", "export_failed"))
        assert entries(platform, order.job_id)[-2:] == [(held.attempt, "refund"), (held.attempt, "usage")]
    with platform.engine.connect() as conn:
        seen = conn.execute(sa.select(meter_events.c.kind).where(meter_events.c.job_id == order.job_id)).scalars().all()
    assert sorted(seen) == ["ended"] * 3 + ["started"] * 3
    again = ordered(platform, tenant, adapter_id)
    assert (again.id, again.status) == (order.id, "queued"), "it may be asked for again"
    held = begin(platform, tenant, again)
    attempts.finish(platform, held, evaluation_endings.judge(None, killed(held), cancelled=False, stalled=False))
    assert state(platform, order) == ("queued", None), "and has three attempts again"


@pytest.mark.parametrize(("code", "billed"), [("gguf_not_supported", ["usage"]), ("llama_cpp_missing", ["refund", "usage"])])
def test_what_cannot_be_made_says_why_at_once(platform: Platform, tenant: Tenant, adapter_id: str, code: str, billed: list[str]) -> None:
    """What the platform lacks is refunded."""
    order = ordered(platform, tenant, adapter_id, format="gguf", precision="q4_k_m")
    held = begin(platform, tenant, order)
    said = Exit(exit_code=64, evidence={REFUSED: True}, stop_reason=None, error={"code": code, "message": "m", "param": None})
    attempts.finish(platform, held, evaluation_endings.judge(said, killed(held), cancelled=False, stalled=False))
    assert state(platform, order) == ("failed", code)
    assert [kind for _, kind in entries(platform, order.job_id)] == billed


def test_an_export_that_is_deleted_before_it_begins_releases_its_device(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    order = ordered(platform, tenant, adapter_id)
    cycle.run_cycle(platform)
    exports.delete(platform, tenant.id, adapter_id, order.id)
    export_workload.carry_out(platform, open_launcher(platform.settings), tenant.id, order.id)
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(reservations.c.released_at).where(reservations.c.export_id == order.id)).scalar_one() is not None
    assert entries(platform, order.job_id) == []


def test_a_deleted_export_is_stopped_and_its_archive_removed(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    order = ordered(platform, tenant, adapter_id)
    held = begin(platform, tenant, order)
    exports.delete(platform, tenant.id, adapter_id, order.id)
    with platform.engine.connect() as conn:
        assert attempts.requested_stop(conn, held) == "cancel"
    attempts.finish(platform, held, evaluation_endings.judge(None, killed(held), cancelled=True, stalled=False))
    with platform.engine.connect() as conn:
        loose = conn.execute(sa.text("SELECT object_key FROM loose_objects")).scalars().all()
    assert loose == [f"tenants/{tenant.id}/exports/{adapter_id}/{order.id}-a{held.attempt}.tar"]


def test_an_exports_agent_writes_its_archive_and_nothing_else(platform: Platform, tenant: Tenant, adapter_id: str) -> None:
    held = begin(platform, tenant, ordered(platform, tenant, adapter_id))
    digest = hashlib.sha256(b"x").hexdigest()
    own = f"tenants/{tenant.id}/exports/{adapter_id}/{held.export_id}-a{held.attempt}.tar"
    assert agents.write_urls(platform, held, WriteRequest(key=own, part_sha256=(digest,)))
    for key in (own.replace(f"-a{held.attempt}", f"-a{held.attempt + 1}"), own.replace(adapter_id, f"{adapter_id}/.."), f"{own}/x"):
        with pytest.raises(Forbidden):
            agents.write_urls(platform, held, WriteRequest(key=key, part_sha256=(digest,)))


def verified(platform: Platform, api_key: str, adapter_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Export merged weights by the command to `folder`, and return the verdict of the command that verifies them without a network."""
    ft, saved = CliRunner(), folder.with_suffix(".keys")
    monkeypatch.setenv("FT_API_KEY", api_key)
    with served(create_app(platform)) as url:
        monkeypatch.setenv("FT_API_URL", url)
        done = ft.invoke(command_tree(), ["export", adapter_id, "--format", "merged", "-o", str(folder)])
        assert done.exit_code == 0, done.output
        assert ft.invoke(command_tree(), ["models", "keys", "-o", str(saved)]).exit_code == 0
    monkeypatch.setenv("FT_API_URL", "http://127.0.0.1:9")  # nothing listens there
    return ft.invoke(command_tree(), ["models", "verify", str(folder), "--keys", str(saved)]).output


def test_what_a_workload_made_is_signed_by_the_worker_and_again_after_a_revocation(
    platform: Platform, tenant: Tenant, api_key: str, adapter_id: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ordered(platform, tenant, adapter_id)
    held = begin(platform, tenant, order)
    record, content = exports.content_of(platform, order)
    files = content(base_dir=base, adapter_dir=rollout.materialise(platform, record))
    built = build_export(replace(files, format=ExportFormat.ADAPTER), tmp_path)  # merging takes long, and is tried below
    with platform.engine.connect() as conn:
        platform.objects.put_file(archive_key(conn, held), built.archive)
    described = {"manifest": built.manifest, "manifest_sha256": built.manifest_sha256}
    evidence = {"bytes": built.archive.stat().st_size, "sha256": sha256_of(built.archive), **described}
    said = Exit(exit_code=0, evidence=json.loads(json.dumps(evidence)), stop_reason=None)
    agents.heartbeat(platform, agents.introduce(platform, held, may_read=[]), Heartbeat(exit=said))
    attempts.finish(platform, held, evaluation_endings.judge(said, killed(held), cancelled=False, stalled=False))
    made = exports.get(platform, tenant.id, adapter_id, order.id)
    assert (made.status, made.signature) == ("ready", None), "what makes it has no key"
    assert adapter_signatures.sign_due(platform) == 2, "the adapter and its export"
    assert adapter_signatures.sign_due(platform) == 0
    assert "VERIFIED: the" in verified(platform, api_key, adapter_id, tmp_path / "first", monkeypatch)

    operator = as_operator(platform)
    leaked = exports.get(platform, tenant.id, adapter_id, order.id).signing_key_id
    signing_keys.rotate(operator)
    signing_keys.revoke(operator, str(leaked))
    assert exports.get(platform, tenant.id, adapter_id, order.id).signature is None
    assert adapter_signatures.sign_due(platform) == 2
    assert "VERIFIED: the" in verified(platform, api_key, adapter_id, tmp_path / "second", monkeypatch)


DESCRIBED: dict[str, object] = {"bytes": 7, "sha256": "0" * 64, "manifest": {}, "manifest_sha256": "0" * 64}


@pytest.mark.parametrize(
    "wrong",
    [{"bytes": -1}, {"bytes": "7"}, {"bytes": 2**63}, {"sha256": "x"}, {"sha256": None}, {"manifest": [1]}, {"manifest_sha256": 7}],
    ids=str,
)
def test_an_export_ends_only_with_a_description_that_its_row_can_hold(
    platform: Platform, tenant: Tenant, adapter_id: str, wrong: dict[str, object]
) -> None:
    held = begin(platform, tenant, ordered(platform, tenant, adapter_id))
    token, said = agents.introduce(platform, held, may_read=[]), Exit(exit_code=0, evidence={**DESCRIBED, **wrong}, stop_reason=None)
    with pytest.raises(InvalidRequest) as refused:
        agents.heartbeat(platform, token, Heartbeat(exit=said))
    assert refused.value.code == "report_invalid"
    agents.heartbeat(platform, token, Heartbeat(exit=replace(said, evidence=DESCRIBED)))


@pytest.mark.parametrize("manifest", [{}, {"files": ["model.safetensors"]}, {"files": {"model.safetensors": 1}}])
def test_an_export_whose_manifest_lists_no_files_is_not_signed_and_holds_up_no_other(
    platform: Platform, tenant: Tenant, adapter_id: str, manifest: dict[str, object]
) -> None:
    order = ordered(platform, tenant, adapter_id, format="tokenizer")
    with platform.engine.begin() as conn:
        conn.execute(sa.update(exports_table).where(exports_table.c.id == order.id).values(status="ready", manifest=manifest))
    other = ordered(platform, tenant, adapter_id, format="adapter")
    assert exports.make(platform, tenant.id, other.id) == "ready"
    assert adapter_signatures.sign_due(platform) == 2, "the adapter and the other export"
    assert exports.get(platform, tenant.id, adapter_id, order.id).signature is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_merged_weights_are_made_on_the_device_proven_and_billed(
    platform: Platform, tenant: Tenant, api_key: str, adapter_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(platform, open_launcher(platform.settings)) as followed:
        order = ordered(followed.platform, tenant, adapter_id)
        cycle.run_cycle(followed.platform)
        export_workload.carry_out(followed.platform, followed.launcher, tenant.id, order.id)
        export_workload.carry_out(followed.platform, followed.launcher, tenant.id, order.id)  # its task may be run twice
        until(lambda: state(platform, order)[0] not in ("queued", "running"), timeout_s=800)
    found, stream = exports.content(platform, tenant.id, adapter_id, order.id)
    with stream, (tmp_path / "export.tar").open("wb") as file:
        file.write(stream.read())
    assert hashlib.sha256((tmp_path / "export.tar").read_bytes()).hexdigest() == found.sha256
    with tarfile.open(tmp_path / "export.tar") as tar:
        assert {"model.safetensors", "config.json", "tokenizer.json", "manifest.json"} <= set(tar.getnames())
        manifest = json.load(tar.extractfile("manifest.json") or stream)
    assert manifest["proof"]["mean_difference"] < 1e-4 < manifest["proof"]["adapter_effect"]
    assert manifest == {**found.manifest, "files": manifest["files"]}
    assert [kind for _, kind in entries(platform, order.job_id)] == ["usage"]
    adapter_signatures.sign_due(platform)
    assert "VERIFIED: the" in verified(platform, api_key, adapter_id, tmp_path / "files", monkeypatch)
