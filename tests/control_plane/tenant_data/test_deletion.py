"""Deletions with proof: nothing left, nothing too early, through crashes, and a chain that shows every change."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import lineage, promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as table
from control_plane.attempts.tables import agents as agents_table
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.tables import checkpoints
from control_plane.billing.tables import ledger_entries
from control_plane.datasets import suites, validation_state
from control_plane.datasets.tables import datasets
from control_plane.datasets.tables import files as files_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import answer_cache
from control_plane.evaluations.tables import eval_scores
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.serving.tables import replica_adapters
from control_plane.tenant_data import deletion, deletion_requests, erasure
from control_plane.tenant_data.tables import deletion_objects, deletions
from core import layout
from core.errors import Conflict, InvalidRequest
from engine.adapters.stages import DEPRECATION_GRACE
from tests.support.jobs.finished_job import rewrite
from tests.support.platform.database_roles import as_owner
from tests.support.platform.deletable_tenants import SECRET, Servers, Weak, World, killed_while_working, texts_of_database, working
from tests.support.platform.ledger_entries import enter


def answered(platform: Platform, tenant: str, *, manifest: str) -> None:
    """An evaluation of an adapter has run, and its answers and those of its base are kept for the next one."""
    section = {"digest": "d-golden", "environment": "cpu", "answers": {"r1": SECRET}, "seconds": 1.0}
    answer_cache.remember(platform, tenant, {
        "suites": {"golden": {"kind": "golden"}}, "digests": {"base": "base", "candidate": answer_cache.subject_digest("base", manifest)},
        "subjects": {"base": {"golden": section}, "candidate": {"golden": section}},
    })  # fmt: skip


def test_a_deprecated_adapter_keeps_its_files_for_thirty_days_and_not_longer(world: World) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    prefix = layout.adapter_prefix(tenant, id_)
    world.clock.now += DEPRECATION_GRACE - timedelta(minutes=1)
    assert deletion_requests.archive_due(world.platform) == []
    assert world.keys(prefix)
    before = {key: world.store.get_bytes(key) for key in world.keys(prefix)}
    world.store.put_bytes(f"{prefix}/evaluations/ev-1/report.json", b"{}")
    answered(world.platform, tenant, manifest=world.row(id_).manifest_sha256)
    answered(world.platform, tenant, manifest="another")
    world.clock.now += timedelta(minutes=2)
    (asked,) = deletion_requests.archive_due(world.platform)
    assert deletion.carry_out_all(world.platform) == [asked]
    assert world.keys(prefix) == [f"{prefix}/evaluations/ev-1/report.json"], "reports say why it was served, and stay"
    record = adapters.get_adapter(world.platform, tenant, id_)
    assert (record.stage, record.archived_at, record.manifest_sha256 != "") == ("archived", world.clock.now, True)
    proven = deletion.get(world.platform, tenant, asked)
    listed = {o["key"]: (o["bytes"], o["sha256"]) for o in proven.proof["objects"]}
    for key, body in before.items():
        assert listed[key] == (len(body), hashlib.sha256(body).hexdigest())
    with world.platform.engine.connect() as conn:
        final = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == record.job_id, checkpoints.c.final)).one()
        cached = conn.execute(sa.select(eval_scores.c.subject_digest)).scalars().all()
    assert sorted(cached) == ["base+another@cpu", "base@cpu"], "nothing is compared with its answers any more"
    assert final.removed_at is not None, "the same weights, under another key"
    assert any(o["key"].startswith(final.object_prefix) for o in proven.proof["objects"])
    assert not (world.platform.settings.work_dir / "adapters" / id_).exists()
    assert [d["files"] for d in proven.proof["directories"]] == [1, 1]
    traced = lineage.of_adapter(world.platform, tenant, id_, verify=True)
    assert traced["holds"] and traced["adapters"][0]["deletion"]["id"] == asked
    everything = world.delete_data(tenant)
    assert world.carried_out(everything)
    traced = lineage.of_adapter(world.platform, tenant, id_, verify=True)
    assert traced["holds"] and traced["adapters"][0]["deletion"]["id"] == everything, "which covers the dataset too"


@pytest.mark.parametrize("ready", [True, False], ids=["a server has it", "a server that had it does not answer"])
def test_an_adapter_that_may_still_be_served_is_kept(world: World, ready: bool) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    served = replace(world.platform, fleet=Servers(adapters={world.row(id_).name: "/x"}, ready=ready))
    world.clock.now += 2 * DEPRECATION_GRACE
    with world.platform.engine.begin() as conn:
        seen = {"replica": "http://a", "adapter_id": id_, "observed": "loaded", "updated_at": world.clock.now}
        conn.execute(sa.insert(replica_adapters).values(**seen))
    assert deletion_requests.archive_due(served) == []
    assert world.row(id_).stage == "deprecated"
    assert deletion_requests.archive_due(replace(world.platform, fleet=Servers(adapters={}))) != []


def test_an_adapter_that_a_waiting_job_starts_from_is_kept(world: World) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    with world.platform.engine.connect() as conn:
        file = conn.execute(
            sa.select(files_table.c.id).where(files_table.c.tenant_id == tenant, files_table.c.purpose == "fine-tune")
        ).scalar()
    body = {"model": "tiny-base", "training_file": file, "warm_start": id_}
    job = jobs.submit(world.platform, tenant, JobRequest.from_body(body)).job
    world.clock.now += 2 * DEPRECATION_GRACE
    assert deletion_requests.archive_due(world.platform) == []
    jobs.cancel(world.platform, tenant, job.id)
    assert len(deletion_requests.archive_due(world.platform)) == 1


def test_an_adapter_promoted_again_in_its_grace_is_not_deleted(world: World) -> None:
    tenant = world.tenant()
    id_ = world.deprecated(tenant)
    world.clock.now += 2 * DEPRECATION_GRACE
    with world.platform.engine.begin() as conn:
        adapters.set_stage(conn, id_, adapters.Stage.PRODUCTION, promoted_at=world.clock.now)
    assert world.row(id_).deprecated_at is None
    assert deletion_requests.archive_due(world.platform) == []


@pytest.mark.parametrize("after", [0, 5])
def test_a_deletion_goes_on_after_the_store_was_away(world: World, after: int) -> None:
    tenant = world.tenant()
    world.trained(tenant)
    everything = {key: hashlib.sha256(world.store.get_bytes(key)).hexdigest() for key in world.keys(layout.tenant_prefix(tenant))}
    id_ = world.delete_data(tenant)
    world.store.left = after
    assert not deletion.carry_out(world.platform, id_)
    assert "the store is away" in str(deletion.get(world.platform, tenant, id_).waiting_for)
    assert len(world.keys(layout.tenant_prefix(tenant))) == len(everything) - after
    world.store.left = None
    assert world.carried_out(id_)
    proof = deletion.get(world.platform, tenant, id_).proof
    assert sorted(o["sha256"] for o in proof["objects"]) == sorted(everything.values()), "also of what went before the crash"
    assert world.keys(layout.tenant_prefix(tenant)) == []
    with world.platform.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(deletion_objects)).scalar() == 0


def test_what_a_killed_process_left_of_a_tenants_upload_is_deleted_and_proven(world: World) -> None:
    tenant, work = world.tenant(), world.platform.settings.work_dir
    others = killed_while_working(work, world.tenant())
    left = killed_while_working(work, tenant)
    with working(work, tenant) as used:
        id_ = world.delete_data(tenant)
        assert not deletion.carry_out(world.platform, id_)
        assert "a process of this machine works with files" in str(deletion.get(world.platform, tenant, id_).waiting_for)
        assert (used / "upload").read_text() == SECRET, "it was removed under its process"
    assert world.carried_out(id_)
    assert not left.exists() and not used.exists() and others.exists()
    listed = {d["directory"]: d["bytes"] for d in deletion.get(world.platform, tenant, id_).proof["directories"]}
    assert {listed[str(left)], listed[str(used)]} == {len(SECRET)}


class Watched(Weak):
    """A store that says where the files lie that it wrote."""

    wrote: list[Path]

    def get_file(self, key: str, path: Path) -> None:
        super().get_file(key, path)
        if "/files/" in key:
            self.wrote.append(path)


def test_an_upload_that_is_validated_lies_in_its_tenants_directory(world: World) -> None:
    world.store = Watched(world.platform.settings.home / "objects")
    world.store.wrote = []
    world.platform = replace(world.platform, objects=world.store)
    tenant = world.tenant()
    world.trained(tenant)
    assert world.store.wrote
    assert all(path.is_relative_to(world.platform.settings.work_dir / "scratch" / tenant) for path in world.store.wrote)


def test_nothing_of_a_tenants_texts_is_left_and_another_tenants_data_is_untouched(world: World) -> None:
    tenant, other = world.tenant(), world.tenant()
    id_, others = world.trained(tenant), world.trained(other)
    running = jobs.submit(
        world.platform, tenant, JobRequest.from_body({"model": "tiny-base", "training_file": world_file(world, tenant), "seed": 7})
    ).job.id
    job_id = world.row(id_).job_id
    with world.platform.engine.begin() as conn:
        now = world.clock.now
        event = {
            "id": "ftevent-1",
            "job_id": job_id,
            "level": "error",
            "type": "message",
            "code": "x",
            "message": SECRET,
            "data": {"row": SECRET},
        }
        conn.execute(sa.insert(job_events).values(**event, created_at=now))
        for job, subject in ((job_id, "base"), (world.row(others).job_id, "base")):
            suite = hashlib.sha256(job.encode()).hexdigest()
            row = {"subject_digest": subject, "suite_digest": suite, "suite": "holdout", "scores": {"a": SECRET}, "created_at": now}
            conn.execute(sa.insert(eval_scores).values(row))
        common = {"subject_digest": "base", "suite_digest": "g", "suite": "golden", "scores": {}, "created_at": now}
        conn.execute(sa.insert(eval_scores).values(common))
        enter(conn, tenant, job_id, amount_micros=1234, gpu_type="H200", gpu_seconds=9.0)
    kept = world.keys(layout.tenant_prefix(other))
    before = texts_of_database(world.platform)
    assert [text for text in (SECRET, "payroll of acme", "secret plan") if text not in before] == []
    deletion_id = world.delete_data(tenant)
    assert world.delete_data(tenant) == deletion_id, "asked for twice, it is one"
    assert world.carried_out(deletion_id)
    after = [line for line in texts_of_database(world.platform).splitlines() if other not in line and others not in line]
    mine = "\n".join(line for line in after if hashlib.sha256(world.row(others).job_id.encode()).hexdigest() not in line)
    for text in (SECRET, "payroll of acme", "secret plan"):
        assert text not in mine
    assert world.keys(layout.tenant_prefix(tenant)) == []
    assert world.keys(layout.tenant_prefix(other)) == kept
    assert adapters.get_adapter(world.platform, other, others).stage == "production"
    with world.platform.engine.connect() as conn:
        assert (
            conn.execute(sa.select(sa.func.sum(ledger_entries.c.amount_micros)).where(ledger_entries.c.tenant_id == tenant)).scalar()
            == 1234
        )
        assert conn.execute(sa.select(sa.func.count()).select_from(eval_scores)).scalar() == 2, "the other tenant's and the platform's stay"
        assert conn.execute(sa.select(jobs_table.c.state).where(jobs_table.c.id == running)).scalar() == "cancelled"
        assert conn.execute(sa.select(datasets.c.content_sha256).where(datasets.c.tenant_id == tenant)).scalar()
    assert world.row(id_).stage == "archived"
    for directory in (f"adapters/{id_}", f"jobs/{job_id}", f"datasets/{tenant}"):
        assert not (world.platform.settings.work_dir / directory).exists()
    found = deletion.get(world.platform, tenant, deletion_id)
    assert "payroll" not in json.dumps(found.proof)
    assert found.proof["rows"]["files"] >= 1
    traced = lineage.of_adapter(world.platform, tenant, id_, verify=True)
    assert traced["holds"], "every digest stays; what is not there has its proof"
    with world.write(salt="again").open("rb") as stream:
        again = uploaded_files.create(world.platform, tenant, stream, filename="new.jsonl", purpose="fine-tune")
    assert again.status == "processed", "the tenant itself goes on"


def world_file(world: World, tenant: str) -> str:
    with world.platform.engine.connect() as conn:
        query = sa.select(files_table.c.id).where(files_table.c.tenant_id == tenant, files_table.c.purpose == "fine-tune")
        return str(conn.execute(query).scalar())


def test_deletion_asks_twice_and_for_a_reason(world: World) -> None:
    tenant = world.tenant()
    with pytest.raises(InvalidRequest, match="type the id to delete"):
        deletion_requests.request_tenant(world.platform, tenant, confirm="yes", reason="r", requested_by="k")
    with pytest.raises(Conflict, match="needs a reason"):
        deletion_requests.request_tenant(world.platform, tenant, confirm=tenant, reason=" ", requested_by="k")
    longest = "r" * deletion_requests.MAX_REASON_CHARS
    with pytest.raises(InvalidRequest, match="at most 1000 are kept"):
        deletion_requests.request_tenant(world.platform, tenant, confirm=tenant, reason=f"{longest}r", requested_by="k")
    made = deletion_requests.request_tenant(world.platform, tenant, confirm=tenant, reason=longest, requested_by="k")
    assert deletion.get(world.platform, tenant, made.id).reason == longest


@pytest.mark.parametrize("tampered", ["a size in a proof", "a reason", "a deletion taken out"])
def test_a_proof_that_was_changed_or_taken_out_breaks_the_chain(world: World, tampered: str) -> None:
    done = []
    for _ in range(3):
        tenant = world.tenant()
        world.store.put_bytes(f"{layout.tenant_prefix(tenant)}/files/file-1/a.jsonl", b"row")
        done.append(world.delete_data(tenant))
        assert world.carried_out(done[-1])
    whole = deletion.verify_chain(world.platform)
    assert (whole.num_deletions, whole.broken) == (3, ())
    with as_owner(world.platform).begin() as conn:
        conn.execute(sa.text("SET LOCAL session_replication_role = replica"))  # as nobody can who is not the database's owner
        second = deletions.c.id == done[1]
        if tampered == "a deletion taken out":
            conn.execute(sa.delete(deletions).where(second))
        else:
            proof = sa.func.jsonb_set(deletions.c.proof, "{objects,0,bytes}", sa.cast(9, deletions.c.proof.type))
            values = {"proof": proof} if "size" in tampered else {"reason": "another"}
            conn.execute(sa.update(deletions).where(second).values(values))
    assert deletion.verify_chain(world.platform).broken == ((done[2],) if "taken" in tampered else (done[1],))


def test_a_record_of_before_the_rules_is_withdrawn_and_deleted_like_any_other(world: World) -> None:
    tenant = world.tenant()
    id_ = world.trained(tenant)
    with as_owner(world.platform).begin() as conn:
        rule = conn.execute(sa.text(RULE), {"name": "ck_adapters_commit_present"}).scalar_one()
        conn.execute(sa.text("ALTER TABLE adapters DROP CONSTRAINT ck_adapters_commit_present"))
        rewrite(conn, table.c.id == id_, commit="")
        conn.execute(sa.text(f"ALTER TABLE adapters ADD CONSTRAINT ck_adapters_commit_present {rule} NOT VALID"))
    assert world.carried_out(world.delete_data(tenant))
    assert world.row(id_).stage == "archived"


RULE = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = :name"


def test_a_row_that_the_database_refuses_to_change_keeps_no_other_deletion_waiting(world: World) -> None:
    bad, good = world.tenant(), world.tenant()
    world.trained(bad)
    with as_owner(world.platform).begin() as conn:
        conn.execute(sa.text(f"ALTER TABLE datasets ADD CONSTRAINT spoilt CHECK (tenant_id <> '{bad}') NOT VALID"))
    first, second = world.delete_data(bad), world.delete_data(good)
    assert deletion.carry_out_all(world.platform) == []
    world.clock.now += erasure.TenantData.SETTLES
    assert deletion.carry_out_all(world.platform) == [second]
    waiting_for = deletion.get(world.platform, bad, first).waiting_for
    assert waiting_for == 'new row for relation "datasets" violates check constraint "spoilt"', "further lines may hold a row's values"


def test_a_deletion_waits_for_whoever_was_at_work_just_now(world: World) -> None:
    tenant = world.tenant()
    adapter_id = world.trained(tenant)
    id_ = world.delete_data(tenant)
    job_id, now = world.row(adapter_id).job_id, world.clock.now
    file_id = world_file(world, tenant)
    agent = {"job_id": job_id, "attempt": 9, "node": 0, "may_read": [], "heartbeat_at": now}
    agent |= dict.fromkeys(("reported_step", "reported_validation", "beat", "notices"), 0)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.insert(attempts_table).values(job_id=job_id, attempt=9, workload=f"{job_id}-a9"))
        conn.execute(sa.insert(agents_table).values(agent))
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(heartbeat_at=now))
        conn.execute(sa.update(files_table).where(files_table.c.id == file_id).values(status="uploaded"))
    validation_state.Work(world.platform, file_id).begin()
    forget = {
        f"job {job_id}": sa.update(jobs_table).where(jobs_table.c.id == job_id).values(heartbeat_at=None),
        f"file {file_id}": sa.update(files_table).where(files_table.c.id == file_id).values(progress=sa.null()),
    }
    for who, over in forget.items():
        assert not deletion.carry_out(world.platform, id_)
        assert who in str(deletion.get(world.platform, tenant, id_).waiting_for)
        with world.platform.engine.begin() as conn:
            conn.execute(over)
    assert not deletion.carry_out(world.platform, id_)
    assert f"a workload of job {job_id}" in str(deletion.get(world.platform, tenant, id_).waiting_for)
    assert world.keys(layout.tenant_prefix(tenant)), "nothing is deleted under somebody's hands"
    world.clock.now += 2 * erasure.QUIET
    assert world.carried_out(id_)


def test_nothing_new_is_taken_while_everything_is_deleted_and_the_same_file_is_whole_again_afterwards(world: World) -> None:
    tenant = world.tenant()
    world.trained(tenant)
    file_id = world_file(world, tenant)
    id_ = world.delete_data(tenant)
    body = {"model": "tiny-base", "training_file": file_id, "seed": 7}
    calls: list[Callable[[], Any]] = [
        lambda: jobs.submit(world.platform, tenant, JobRequest.from_body(body)),
        lambda: upload(world, tenant),
        lambda: suites.add(world.platform, tenant, io.BytesIO(b'{"q": "Why?"}'), name="quiz", filename="q.jsonl", field="q"),
    ]
    for call in calls:
        with pytest.raises(Conflict, match="is being deleted") as refused:
            call()
        assert refused.value.code == "data_being_deleted"
    assert world.carried_out(id_)
    again = upload(world, tenant)
    with world.platform.engine.connect() as conn:
        this = (datasets.c.tenant_id == tenant) & (datasets.c.id == again.dataset_id)
        report = conn.execute(sa.select(datasets.c.report).where(this)).scalar_one()
    assert "erased" not in report and report["stats"], "the same content: the same dataset, with a report again"


def upload(world: World, tenant: str) -> Any:
    with world.write(salt=tenant).open("rb") as stream:
        return uploaded_files.create(world.platform, tenant, stream, filename="a.jsonl", purpose="fine-tune")


def test_servers_are_asked_once_a_round_however_many_adapters_there_are(world: World) -> None:
    for tenant in (world.tenant(), world.tenant()):
        for seed in (1, 2):
            promotions.deprecate(world.platform, tenant, world.trained(tenant, seed=seed))
    fleet = Servers(adapters={})
    served = replace(world.platform, fleet=fleet)
    world.clock.now += 2 * DEPRECATION_GRACE
    assert len(deletion_requests.archive_due(served)) == 4
    assert fleet.asked == 1
    assert len(deletion.carry_out_all(served)) == 4
    assert fleet.asked == 2
