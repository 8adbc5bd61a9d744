"""What a deletion leaves nowhere: on the nodes of a machine, of former members, and of the keys that encrypted the objects."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet, MultiFernet

from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.attempts.tables import health_verdicts
from control_plane.datasets import previews, suites
from control_plane.datasets.scored_suites.tables import scored_suites
from control_plane.datasets.tables import datasets, files
from control_plane.datasets.uploads import multipart_uploads, uploaded_files
from control_plane.evaluations.tables import evaluations
from control_plane.jobs import service as job_service
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs, sweep_trials, sweeps
from control_plane.notifications.tables import deliveries, outbox
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_states import JobState
from control_plane.serving import node_files
from control_plane.serving.tables import model_routes
from control_plane.tenant_data import deletion, deletion_requests, erasure
from control_plane.tenants import members
from control_plane.tenants.tables import idempotency_keys
from control_plane.tracking.tables import integrations, wandb_runs
from core import layout
from core.base_models import Catalogue
from core.errors import IntegrityError
from engine.adapters.stages import DEPRECATION_GRACE
from ft_assets.datasets import step as dataset_step
from resources.object_store.tenant_keys import KEYS, TenantKeys
from tests.support.jobs.finished_job import finish, rewrite
from tests.support.jobs.followed_jobs import Job
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.database_roles import as_owner
from tests.support.platform.deletable_tenants import SECRET, Clock, Weak, World, killed_while_working, texts_of_database
from tests.support.processes.scripted_training import Scenario

INSTALLATION_KEY = Fernet.generate_key()


def kept_on_nodes(world: World, tenant: str, id_: str) -> set[Path]:
    """A file in every directory in which this machine may keep something of a tenant and its adapter; their paths."""
    platform, work, record = world.platform, world.platform.settings.work_dir, adapters.get_adapter(world.platform, tenant, id_)
    nodes = (work, work / "nodes" / "1", work / "nodes" / "2")
    of_adapter = [
        node_files.directory(platform, record), node_files.directory(platform, record, "c" * 64),
        platform.settings.adapters_dir / ".making" / "tmp1" / id_, platform.settings.servers_dir / id_,
    ]  # fmt: skip
    names = ("datasets", "packs", "references", "warm_starts")  # the last two: of earlier releases
    of_tenant = [suites._place(platform, tenant, "d" * 64), *(work / name / tenant / "x" for name in names)]
    of_job = [place for node in nodes for place in (node / "jobs" / record.job_id, node / "launcher" / f"{record.job_id}-a1")]
    made = set[Path]()
    for directory in (*of_adapter, *of_tenant, *of_job, *(node / "inputs" / tenant for node in nodes)):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "part").write_text(SECRET)
        made.add(directory / "part")
    return made | {killed_while_working(work, tenant) / "upload"}


def test_no_directory_of_a_tenant_is_left_on_any_node_of_the_machine(world: World) -> None:
    tenant, other = world.tenant(), world.tenant()
    mine, theirs = (kept_on_nodes(world, one, world.trained(one)) for one in (tenant, other))
    assert world.carried_out(world.delete_data(tenant))
    assert [str(path) for path in sorted(mine) if path.exists()] == []
    assert [str(path) for path in sorted(theirs) if not path.exists()] == []
    left = [path for path in world.platform.settings.work_dir.rglob("*") if tenant in path.name and any(path.rglob("*"))]
    assert left == []


def prepared_and_served(platform: Platform, tenant: str, rows: Path) -> None:
    """Upload, check, preview and pack a file, and fetch the model of its job to where servers read it: all by the platform itself."""
    quiz = json.dumps({"question": "Which of these birds sings at night in the garden?"}).encode()
    suites.add(platform, tenant, io.BytesIO(quiz), name="quiz", filename="quiz.jsonl", field="question")
    with rows.open("rb") as stream:
        made = uploaded_files.create(platform, tenant, stream, filename="rows.jsonl", purpose="fine-tune")
    file = uploaded_files.validate(platform, made.id)
    previews.preview_dataset(platform, tenant, file.id, model="tiny-base", num_examples=1, max_seq_len=128)
    request = {"model": "tiny-base", "training_file": file.id, "hyperparameters": {"max_seq_len": 128}}
    packed, trained = (job_service.submit(platform, tenant, JobRequest.from_body({**request, "seed": seed})).job.id for seed in (7, 8))
    dataset_step.pin_dataset(platform, tenant, packed)
    dataset_step.pack(platform, tenant, packed)
    node_files.materialise(platform, adapters.get_adapter(platform, tenant, finish(platform, tenant, trained)))


def ids_of(platform: Platform, tenant: str) -> set[str]:
    """The id of a tenant, and those of its files, datasets, jobs and adapters."""
    tables = (files, datasets, jobs, adapters_table)
    with platform.engine.connect() as conn:
        return {tenant}.union(*(conn.scalars(sa.select(table.c.id).where(table.c.tenant_id == tenant)) for table in tables))


def places_of(home: Path, ids: set[str]) -> set[str]:
    """Directories below `home` with what is named after one of `ids`, or with a file that holds a row of a tenant."""
    found = set[str]()
    for path in home.rglob("*"):
        parts = path.relative_to(home).parts
        named = next((n for n, part in enumerate(parts) if any(id_ in part for id_ in ids)), None)
        if path.is_file() and (named is not None or SECRET.encode() in path.read_bytes()):
            found.add("/".join(parts[: -1 if named is None else named]))
    return found


def test_no_file_that_the_platform_wrote_for_a_tenant_is_left_on_the_machine(
    new_job: Callable[..., Job], write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    pools, base = tmp_path / "pools.yaml", build_tiny_model(tmp_path / "base")
    pools.write_text("pools: [{name: local, gpu_type: local, nodes: [{count: 2, gpus: 1}]}]")
    models = Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(base), "license": "MIT"}, base)})
    trained = new_job(env={"pools": str(pools)}, models=models, strategy="ddp", world_size=2)
    tenant, home, nodes = trained.tenant, trained.platform.settings.home, ("work", "work/nodes/1")
    for node in nodes:
        Scenario().write(home / node / "jobs" / trained.id)
    assert trained.run() is JobState.EVALUATING
    prepared_and_served(trained.platform, tenant, write_chat_rows(salt=tenant))
    ids = ids_of(trained.platform, tenant)
    of_nodes = {f"{node}/{name}" for node in nodes for name in ("jobs", "launcher", "inputs")}
    of_machine = {f"work/{name}" for name in ("adapters", "datasets", "packs", "suite_indexes")}
    assert places_of(home, ids) == {"objects/tenants", *of_nodes, *of_machine}
    known = {Path(place).parts[1] for place in of_nodes | of_machine} | {"scratch", "shipped_suites"}
    assert {path.name for path in (home / "work").iterdir()} == known, "a new place may hold files that are named after no id"
    store, clock = Weak(home / "objects"), Clock(now=utc_now())
    world = World(platform=replace(trained.platform, clock=clock, objects=store), clock=clock, store=store, write=write_chat_rows)
    assert world.carried_out(world.delete_data(tenant))
    assert places_of(home, ids) == set()


def test_no_copy_of_an_adapter_is_left_on_any_node_of_the_machine(world: World) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    there = kept_on_nodes(world, tenant, id_)
    world.clock.now += 2 * DEPRECATION_GRACE
    (asked,) = deletion_requests.archive_due(world.platform)
    assert deletion.carry_out_all(world.platform) == [asked]
    job_id = world.row(id_).job_id
    copies = [path for path in there if id_ in str(path) or f"jobs/{job_id}" in str(path)]
    assert len(copies) == 7
    assert [str(path) for path in copies if path.exists()] == []
    assert any(path.exists() for path in there), "what other adapters of the tenant need stays"


def test_former_members_lose_their_names_and_addresses_and_present_ones_are_named_in_the_proof(world: World) -> None:
    tenant = world.tenant()
    world.trained(tenant)
    gone, stays = (
        members.add(world.platform, tenant, email=f"{name}@example.com", role="viewer", name=f"{name} Doe") for name in ("gone", "stays")
    )
    members.remove(world.platform, tenant, gone.id)
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    found = texts_of_database(world.platform)
    assert [text for text in ("gone@example.com", "gone Doe") if text in found] == []
    assert members.get(world.platform, tenant, stays.id).email == "stays@example.com"
    (kept,) = [one["what"] for one in deletion.get(world.platform, tenant, id_).proof["kept"] if "keys" in one["what"]]
    assert "members with their names and e-mail addresses" in kept


def test_texts_in_tables_of_every_kind_are_erased(world: World) -> None:
    tenant, now = world.tenant(), world.clock.now
    adapter_id = world.trained(tenant)
    job_id = world.row(adapter_id).job_id
    multipart_uploads.create(
        world.platform, tenant, num_bytes=9, filename="text of an upload", purpose="fine-tune", mime_type="application/jsonl",
        column_map={"text of its column": "prompt"},
    )  # fmt: skip
    mine = {"tenant_id": tenant, "created_at": now}
    sealed = {"type": "wandb", "sealed_key": "text of a key", "hint": "text of a hint", "updated_at": now}
    verdict = {"job_id": job_id, "attempt": 1, "code": "x", "audience": "tenant", "level": "warning", "raised_at": now}
    suite = {"name": "text of a scored suite", "version": 1, "metric": "reward", "max_drop": 0.1, "num_items": 1, "sha256": "s"}
    evaluation = {"job_id": job_id, "adapter_id": adapter_id, "base_model": "tiny-base", "base_digest": "b", "kind": "manual"}
    event = {"seq": 10**9, "id": "evt_1", "type": "x", "subject": job_id, "data": {"note": "text of an event"}}
    delivery = {"channel": "webhook", "target": "we_1", "event_seq": 10**9, "subject": job_id, "state": "dead", "next_attempt_at": now}
    rows: list[tuple[sa.Table, dict[str, Any]]] = [
        (health_verdicts, {"id": "hv-1", **verdict, "message": "text of a verdict", "data": {"value": "text of its value"}}),
        (evaluations, {"id": "ev-1", **mine, **evaluation, "state": "failed", "error": {"message": "text of an evaluation's error"}}),
        (scored_suites, {"id": "s-1", **mine, **suite, "grader": {"code": "text of a grader"}, "object_key": "text of its items' key"}),
        (model_routes, {**mine, "name": "text of a route", "targets": [], "updated_at": now}),
        (integrations, {**mine, **sealed}),
        (wandb_runs, {"job_id": job_id, "entity": "text of an entity", "summary": {"text of a metric": 1.0}}),
        (idempotency_keys, {**mine, "key": "text of an idempotency key", "request_sha256": "r", "job_id": job_id}),
        (sweeps, {"id": "sw-1", **mine, "request": {"metadata": {"note": "text of a sweep"}}, "settings": {}, "submitted_at": now}),
        (sweep_trials, {"sweep_id": "sw-1", "number": 1, "parameters": {}, "error": {"message": "text of a trial's error"}}),
        (outbox, {**mine, **event}),
        (deliveries, {"id": "dlv_1", **mine, **delivery, "last_error": "text of a receiver"}),
    ]
    job = {
        "reason_detail": "text of a reason",
        "evaluation": {"note": "text of a report"},
        "error": {"code": "x", "message": "text of an error"},
    }
    file = {"source": "text of a source", "status_details": "text of a refusal", "policies": {"note": "text of policies"}}
    with world.platform.engine.begin() as conn:
        for table, row in rows:
            conn.execute(sa.insert(table).values(row))
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(job))
        conn.execute(sa.update(files).where(files.c.tenant_id == tenant).values(file))
    with as_owner(world.platform).begin() as conn:
        rewrite(conn, adapters_table.c.id == adapter_id, approval_note="text of an approval")
    before = set(re.findall(r'"([^"]*\btext of [^"]*)"', texts_of_database(world.platform)))
    assert len(before) == 25, "each is found as long as it is there"
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    after = texts_of_database(world.platform)
    assert [text for text in sorted(before) if text in after] == ["text of a route"], "which identifies it in the audit log"
    proof = deletion.get(world.platform, tenant, id_).proof
    assert any("names of model routes" in one["what"] for one in proof["kept"])
    assert proof["rows"]["uploads"] == 1


def test_the_key_that_encrypted_a_tenants_objects_is_destroyed_with_them(world: World) -> None:
    """A copy of an object, as a backup has it, cannot be read any more; the tenant goes on with another key."""
    store = Weak(world.platform.settings.home / "encrypted", keys=None, encrypts=False)
    keys = TenantKeys(store.root / KEYS, lambda: MultiFernet([Fernet(INSTALLATION_KEY)]))
    store = Weak(store.root, keys=keys, encrypts=True)
    world.store, world.platform = store, replace(world.platform, objects=store)
    tenant, other = world.tenant(), world.tenant()
    key, theirs = (f"{layout.tenant_prefix(one)}/files/file-1/a.jsonl" for one in (tenant, other))
    for one in (key, theirs):
        store.put_bytes(one, SECRET.encode())
    copy = (store.root / key).read_bytes()
    before = keys.lines(tenant), keys.lines(other)
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert (proof["num_objects"], proof["keys_destroyed"]) == (1, 1)
    assert len(keys.lines(tenant)) == 1 and keys.lines(tenant) != before[0] and keys.lines(other) == before[1]
    (store.root / key).parent.mkdir(parents=True, exist_ok=True)
    (store.root / key).write_bytes(copy)
    with pytest.raises(IntegrityError, match="no key"):
        store.get_bytes(key)
    store.put_bytes(f"{key}2", b"new")
    assert (store.get_bytes(f"{key}2"), store.get_bytes(theirs)) == (b"new", SECRET.encode())


def test_an_upload_that_comes_while_keys_are_exchanged_is_deleted_before_the_old_key(world: World) -> None:
    keys = TenantKeys(world.store.root / KEYS, lambda: MultiFernet([Fernet(INSTALLATION_KEY)]))

    class Late(Weak):
        late: tuple[str, bytes] | None = None

        def renew_keys(self, tenant: str) -> None:
            super().renew_keys(tenant)
            if self.late is not None:
                self.put_bytes(*self.late)
                self.late = None

    store = Late(world.store.root, keys=keys, encrypts=True)
    world.store, world.platform = store, replace(world.platform, objects=store)
    tenant = world.tenant()
    store.put_bytes(f"{layout.tenant_prefix(tenant)}/files/file-1/a.jsonl", b"row")
    id_ = world.delete_data(tenant)
    assert not deletion.carry_out(world.platform, id_)
    world.clock.now += erasure.TenantData.SETTLES
    store.late = f"{layout.tenant_prefix(tenant)}/files/file-2/b.jsonl", b"late"
    assert not deletion.carry_out(world.platform, id_), "what came late is looked for a second time, too"
    world.clock.now += erasure.TenantData.SETTLES
    assert deletion.carry_out(world.platform, id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert [one["bytes"] for one in proof["objects"]] == [3, 4]
    assert len(keys.lines(tenant)) == 1
