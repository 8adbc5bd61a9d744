"""The database itself keeps lineage complete and final: by plain SQL, past every function of ours."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError as Violation

from control_plane.adapters import service
from control_plane.adapters.tables import adapter_stage_moves, adapters
from control_plane.datasets.tables import datasets, files
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenant_data.tables import deletions
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, FtError, LineageIncomplete
from engine.adapters.stages import STAGE_TRANSITIONS
from tests.support.jobs.finished_job import rewrite
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.database_roles import as_owner

D = "d" * 64


@pytest.fixture
def registered(platform: Platform, tenant: Tenant) -> Callable[[str], str]:
    def make(stage: str = "draft") -> str:
        return add_adapter(platform, tenant.id, name=f"ft:b:{tenant.id}:s:{uuid.uuid4().hex[:8]}", stage=stage, loaded=False)

    return make


def error_of(engine: Engine, statement: sa.Executable) -> FtError:
    with pytest.raises(FtError) as refused, service.kept("adapter adp-1"), engine.begin() as conn:
        conn.execute(statement)
    return refused.value


def test_the_stages_that_the_database_knows_are_those_of_the_code(platform: Platform) -> None:
    with platform.engine.connect() as conn:
        known = {(a, b) for a, b in conn.execute(sa.select(adapter_stage_moves))}
    assert known == {(a.value, b.value) for a, targets in STAGE_TRANSITIONS.items() for b in targets}


@pytest.mark.parametrize(
    ("changes", "gap"),
    [
        ({"dataset_id": "ds_gone"}, "dataset_id"),
        ({"dataset_ids": ["ds_gone"]}, "dataset_ids"),
        ({"base_digest": "sha256:0"}, "base_digest"),
        ({"spec_sha256": ""}, "spec_sha256"),
        ({"lock_sha256": "D" * 64}, "lock_sha256"),
        ({"manifest_sha256": "0"}, "manifest_sha256"),
        ({"commit": ""}, "commit"),
        ({"commit": None}, "commit"),
        ({"eval_report_key": None}, "eval_report_key"),
        ({"rank": None}, "rank, alpha"),
        ({"rank": 0}, "rank, alpha"),
        ({"type": "merged"}, "type"),
        ({"parent_adapter_id": "adp-nobody"}, "parent_adapter_id"),
        ({"parent_checkpoint_id": "ftckpt_none"}, "parent_checkpoint_id"),
        ({"pack_fingerprint": "pk_other"}, "pack_fingerprint"),
        ({"job_id": "ftjob-none"}, "job_id"),
        ({"stage": "production"}, "stage"),
        ({"stage": "staging"}, "stage"),
    ],
    ids=str,
)
def test_a_record_with_a_gap_is_refused_and_the_gap_is_named(
    platform: Platform, registered: Callable[[str], str], changes: dict[str, Any], gap: str
) -> None:
    with platform.engine.begin() as conn:
        row = dict(conn.execute(sa.select(adapters).where(adapters.c.id == registered("draft"))).mappings().one())
        job = dict(conn.execute(sa.select(jobs).where(jobs.c.id == row["job_id"])).mappings().one())
        new = uuid.uuid4().hex[:12]
        follow = {k: changes[k] for k in ("dataset_id", "base_digest", "spec_sha256") if k in changes}  # the job agrees, and both are wrong
        conn.execute(sa.insert(jobs).values({k: v for k, v in job.items() if v is not None} | {"id": f"ftjob-{new}"} | follow))
    values = {k: v for k, v in row.items() if v is not None} | {"id": f"adp-{new}", "name": f"ft:b:t:s:{new}", "job_id": f"ftjob-{new}"}
    refused = error_of(platform.engine, sa.insert(adapters).values(values | changes))
    assert isinstance(refused, LineageIncomplete)
    assert f"without: {gap};" in refused.message
    if not follow:
        with platform.engine.begin() as conn:
            conn.execute(sa.insert(adapters).values(values))  # without the gap it goes in


@pytest.mark.parametrize(
    "column", ["manifest_sha256", "dataset_id", "eval_passed", "metrics", "name", "spec_sha256", "object_prefix", "created_at", "tenant_id"]
)
def test_a_record_never_changes(platform: Platform, registered: Callable[[str], str], column: str) -> None:
    other: dict[str, Any] = {"eval_passed": False, "metrics": {"a": 2.0}, "created_at": sa.func.now()}
    value = other.get(column, D)
    refused = error_of(platform.engine, sa.update(adapters).where(adapters.c.id == registered("production")).values({column: value}))
    assert (refused.code, refused.http_status) == ("record_is_final", 409)
    assert column in refused.message


@pytest.mark.parametrize("stage", ["staging", "production", "quarantined", "deprecated", "archived"])
def test_every_illegal_move_is_refused(platform: Platform, registered: Callable[[str], str], stage: str) -> None:
    legal = {b.value for a, targets in STAGE_TRANSITIONS.items() for b in targets if a.value == stage}
    id_, now = registered(stage), sa.func.now()
    dates = {"promoted_at": now, "deprecated_at": now, "archived_at": now}
    tried = 0
    for target in ("draft", "staging", "production", "quarantined", "deprecated", "archived"):
        if target not in legal | {stage}:
            refused = error_of(platform.engine, sa.update(adapters).where(adapters.c.id == id_).values(stage=target, **dates))
            assert isinstance(refused, Conflict)
            assert f"is {stage} and cannot become {target}" in refused.message
            tried += 1
    assert tried > 0


def test_what_did_not_pass_its_gate_is_served_by_no_detour(platform: Platform, registered: Callable[[str], str]) -> None:
    this = adapters.c.id == registered("draft")
    with as_owner(platform).begin() as conn:
        rewrite(conn, this, eval_passed=False, stage="quarantined")
    for stage, code in (("production", "invalid_state"), ("draft", "gate_failed")):
        refused = error_of(platform.engine, sa.update(adapters).where(this).values(stage=stage, promoted_at=sa.func.now()))
        assert refused.code == code
    unsigned = sa.update(adapters).where(this).values(stage="draft", released_at=sa.func.now())
    with pytest.raises(Violation, match="release_signed"), platform.engine.begin() as conn:
        conn.execute(unsigned)
    with platform.engine.begin() as conn:
        conn.execute(unsigned.values(released_by="key_1", release_reason="read"))


def test_what_a_person_has_to_approve_is_not_served_before_and_that_is_not_taken_back(
    platform: Platform, registered: Callable[[str], str]
) -> None:
    this = sa.update(adapters).where(adapters.c.id == registered("draft"))
    promoted = this.values(stage="production", promoted_at=sa.func.now())
    signed = {"approved_by": "key_1", "approved_at": sa.func.now()}
    with platform.engine.begin() as conn:
        conn.execute(this.values(approval="pending"))
    assert error_of(platform.engine, promoted).code == "needs_approval"
    assert error_of(platform.engine, this.values(approval="none")).code == "invalid_state"
    with pytest.raises(Violation, match="approval_signed"), platform.engine.begin() as conn:
        conn.execute(this.values(approval="approved"))
    with platform.engine.begin() as conn:
        conn.execute(this.values(approval="rejected", **signed))
    assert error_of(platform.engine, promoted).code == "needs_approval"
    with platform.engine.begin() as conn:
        conn.execute(this.values(approval="approved", **signed))
        conn.execute(promoted)
    assert error_of(platform.engine, this.values(approval="rejected")).code == "needs_approval"


def test_a_draft_that_nobody_has_to_approve_is_not_entered_for_a_job_that_asked_for_it(
    platform: Platform, tenant: Tenant, registered: Callable[[str], str]
) -> None:
    with platform.engine.begin() as conn:
        row = dict(conn.execute(sa.select(adapters).where(adapters.c.id == registered("draft"))).mappings().one())
        job = dict(conn.execute(sa.select(jobs).where(jobs.c.id == row["job_id"])).mappings().one())
        new = uuid.uuid4().hex[:12]
        asked = {"id": f"ftjob-{new}", "request": {"eval_config": {"approval": "required"}}}
        conn.execute(sa.insert(jobs).values({k: v for k, v in job.items() if v is not None} | asked))
    values = {k: v for k, v in row.items() if v is not None} | {"id": f"adp-{new}", "name": f"ft:b:t:s:{new}", "job_id": f"ftjob-{new}"}
    signed = {"approval": "approved", "approved_by": "key_1", "approved_at": sa.func.now()}
    for past in ({"approval": "none"}, signed):
        assert "without: approval;" in error_of(platform.engine, sa.insert(adapters).values(values | past)).message
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(adapters).values(values | {"approval": "pending"}))


def test_the_table_of_moves_is_not_added_to_nor_changed(platform: Platform) -> None:
    statements: list[sa.Executable] = [
        sa.insert(adapter_stage_moves).values(from_stage="archived", to_stage="draft"),
        sa.update(adapter_stage_moves).values(to_stage="draft"),
        sa.delete(adapter_stage_moves),
    ]
    for statement in statements:
        with pytest.raises(Violation, match="adapter_stage_moves is refused"), as_owner(platform).begin() as conn:
            conn.execute(statement)


@pytest.mark.parametrize("table", ["adapters", "datasets", "deletions", "evaluations", "adapter_stage_moves", "files", "jobs"])
def test_what_lineage_rests_on_cannot_be_emptied(platform: Platform, table: str) -> None:
    with pytest.raises(Violation, match=r"TRUNCATE of .* is refused"), as_owner(platform).begin() as conn:
        conn.execute(sa.text(f"TRUNCATE {table} CASCADE"))


def test_an_adapter_and_its_dataset_cannot_be_deleted(platform: Platform, registered: Callable[[str], str]) -> None:
    id_ = registered("archived")
    assert error_of(platform.engine, sa.delete(adapters).where(adapters.c.id == id_)).code == "record_is_final"
    with pytest.raises(Violation, match="DELETE of datasets"), platform.engine.begin() as conn:
        conn.execute(sa.delete(datasets).where(datasets.c.id == f"ds_{id_}"))
    for linked in (sa.delete(files).where(files.c.id == f"file-{id_}"), sa.delete(jobs).where(jobs.c.id == f"ftjob-{id_}")):
        with pytest.raises(Violation, match="foreign key"), platform.engine.begin() as conn:
            conn.execute(linked)


def test_a_datasets_content_and_a_files_digest_are_final_and_the_rest_is_not(platform: Platform, registered: Callable[[str], str]) -> None:
    id_ = registered("draft")
    dataset, file = datasets.c.id == f"ds_{id_}", files.c.id == f"file-{id_}"
    for column, value in {"content_sha256": D, "row_count": 7, "uri": "file:///else", "format": "text"}.items():
        with pytest.raises(Violation, match="datasets is refused"), platform.engine.begin() as conn:
            conn.execute(sa.update(datasets).where(dataset).values({column: value}))
    with pytest.raises(Violation, match="files is refused"), platform.engine.begin() as conn:
        conn.execute(sa.update(files).where(file).values(sha256=D))
    for other in (None, f"ds_{registered('draft')}"):
        with pytest.raises(Violation, match="files is refused"), platform.engine.begin() as conn:
            conn.execute(sa.update(files).where(file).values(dataset_id=other))
    with platform.engine.begin() as conn:
        conn.execute(sa.update(datasets).where(dataset).values(review="approved", cooled_at=sa.func.now(), report={"erased": True}))
        conn.execute(sa.update(files).where(file).values(filename="other", sha256=files.c.sha256))


def test_the_digest_of_an_import_is_written_once_it_is_fetched(platform: Platform, registered: Callable[[str], str]) -> None:
    new = {"id": f"file-{uuid.uuid4().hex}", "filename": "f", "purpose": "fine-tune", "bytes": 0, "sha256": "", "object_key": "k"}
    with platform.engine.begin() as conn:
        tenant = conn.execute(sa.select(adapters.c.tenant_id).where(adapters.c.id == registered("draft"))).scalar_one()
        conn.execute(sa.insert(files).values(**new, tenant_id=tenant, status="uploaded", created_at=sa.func.now()))
        conn.execute(sa.update(files).where(files.c.id == new["id"]).values(sha256=D))
    with pytest.raises(Violation, match="files is refused"), platform.engine.begin() as conn:
        conn.execute(sa.update(files).where(files.c.id == new["id"]).values(sha256="0" * 64))
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(files.c.sha256).where(files.c.id == new["id"])).scalar_one() == D


def test_a_job_with_an_adapter_keeps_what_it_was_trained_from(platform: Platform, registered: Callable[[str], str]) -> None:
    this, another = sa.update(jobs).where(jobs.c.id == f"ftjob-{registered('draft')}"), f"file-{registered('draft')}"
    of_files: tuple[dict[str, Any], ...] = ({"training_file": another}, {"validation_file": another}, {"method": "dpo"})
    mixed = {"request": {"training_files": [{"file": another, "weight": 2.0}]}}
    for changes in (*of_files, mixed, {"dataset_id": "ds_x"}, {"spec": {"a": 1}}, {"spec_sha256": D}, {"pack_fingerprint": "pk_1"}):
        refused = error_of(platform.engine, this.values(changes))
        assert refused.code == "record_is_final"
    with platform.engine.begin() as conn:
        conn.execute(this.values(loss=1.0, dataset_id=jobs.c.dataset_id, request={"model": "tiny-base"}))


def test_verdicts_and_proofs_are_only_added_to(platform: Platform, registered: Callable[[str], str], tenant: Tenant) -> None:
    id_, now = registered("draft"), platform.clock()
    proof = {
        "id": f"del-{id_}",
        "tenant_id": tenant.id,
        "subject_kind": "adapter",
        "subject_id": id_,
        "reason": "r",
        "proof": {},
        "sha256": D,
    }
    verdict = {"id": f"ev-{id_}", "tenant_id": tenant.id, "job_id": f"ftjob-{id_}", "adapter_id": id_, "base_model": "b", "base_digest": D}
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(deletions).values(**proof, requested_at=now, done_at=now))
        conn.execute(sa.insert(evaluations).values(**verdict, kind="gate", state="running", created_at=now))
        conn.execute(
            sa.update(evaluations).values(state="succeeded", outcome="passed", finished_at=now).where(evaluations.c.id == f"ev-{id_}")
        )
    for statement in (
        sa.update(deletions).values(reason="another"),
        sa.delete(deletions),
        sa.update(evaluations).where(evaluations.c.id == f"ev-{id_}").values(outcome="quarantined"),
        sa.delete(evaluations).where(evaluations.c.id == f"ev-{id_}"),
    ):
        with pytest.raises(Violation, match="is refused"), platform.engine.begin() as conn:
            conn.execute(statement)
