"""From a model's name to the uploaded file: every link there, and each broken one found."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError as Violation

from control_plane.adapters import lineage, lineage_checks
from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import attempts
from control_plane.datasets.tables import files
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.serving.tables import model_routes
from control_plane.tenants.rules import Tenant
from core import layout
from core.errors import NotFound, QuotaExceeded
from engine.training.spec import Source
from resources.object_store import LocalObjectStore
from tests.support.jobs.finished_job import COMMIT, finish
from tests.support.platform.database_roles import as_owner
from tests.support.platform.ledger_entries import enter


@pytest.fixture
def upload(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path) -> tuple[str, str]:
    """A file's id, and the sha256 of the bytes on its owner's disk."""
    path = write_chat_rows()
    with path.open("rb") as stream:
        file = uploaded_files.create(platform, tenant.id, stream, filename="support.jsonl", purpose="fine-tune")
    return str(file.id), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def train(platform: Platform, tenant: Tenant, upload: tuple[str, str]) -> Callable[..., str]:
    def make(**fields: Any) -> str:
        body = {"model": "tiny-base", "training_file": upload[0], **fields}
        job = jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job
        return finish(platform, tenant.id, job.id)

    return make


def name_of(platform: Platform, id_: str) -> str:
    with platform.engine.connect() as conn:
        return str(conn.execute(sa.select(adapters.c.name).where(adapters.c.id == id_)).scalar_one())


def broken(found: Mapping[str, Any]) -> list[str]:
    return [link["link"] for one in found["adapters"] for link in one["links"] if link["holds"] is False]


def test_a_models_name_leads_to_the_sha256_of_the_file_on_its_owners_disk(
    platform: Platform, tenant: Tenant, train: Callable[..., str], upload: tuple[str, str]
) -> None:
    id_ = train()
    with platform.engine.begin() as conn:
        job_id = conn.execute(sa.select(adapters.c.job_id).where(adapters.c.id == id_)).scalar_one()
        enter(conn, tenant.id, job_id, amount_micros=5, gpu_type="H200", gpu_seconds=60.0)
        conn.execute(sa.insert(attempts).values(job_id=job_id, attempt=1, workload=f"{job_id}-a1", outcome="succeeded", last_step=10))
    found = lineage.of_model(platform, tenant.id, name_of(platform, id_), verify=True)
    (one,) = found["adapters"]
    assert (found["kind"], found["holds"], broken(found)) == ("adapter", True, [])
    assert (one["uploads"][0]["id"], one["uploads"][0]["sha256"], one["uploads"][0]["filename"]) == (*upload, "support.jsonl")
    assert one["dataset"]["id"] == one["uploads"][0]["dataset_id"] == one["training"]["spec"]["dataset_id"]
    assert (one["training"]["commit"], one["training"]["attempts"][0]["gpu_type"]) == (COMMIT, "H200")
    assert [c["final"] for c in one["training"]["checkpoints"]] == [True]
    assert set(one["files"]["files"]) == {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt"}
    assert one["base_model"]["digest"] == platform.models.get("tiny-base").digest
    assert one["base_model"]["in_catalogue"] and one["deletion"] is None and one["parents"] == []
    looked_at = {link["link"] for link in one["links"] if link["holds"]}
    assert {
        "adapter manifest",
        "adapter file adapter_model.safetensors",
        "frozen spec",
        "dataset rows",
        f"training file {upload[0]}",
        "base model",
    } <= looked_at


def test_it_is_found_by_id_by_logical_name_and_by_each_target_of_a_route(
    platform: Platform, tenant: Tenant, train: Callable[..., str]
) -> None:
    first, second = train(seed=1), train(seed=2)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(adapters).where(adapters.c.id == second).values(promoted_at=platform.clock()))
        conn.execute(sa.update(adapters).where(adapters.c.id == first).values(promoted_at=sa.func.now() - sa.text("interval '1 day'")))
        targets = [{"adapter_id": id_, "base_model": "tiny-base", "weight": weight} for id_, weight in ((first, 1), (second, 9))]
        now = platform.clock()
        conn.execute(sa.insert(model_routes).values(tenant_id=tenant.id, name="support", targets=targets, created_at=now, updated_at=now))
    logical = name_of(platform, second).rpartition(":")[0]
    assert lineage.of_adapter(platform, tenant.id, first)["adapters"][0]["adapter"]["id"] == first
    newest = lineage.of_model(platform, tenant.id, logical)
    assert (newest["kind"], newest["adapters"][0]["adapter"]["id"]) == ("logical_name", second)
    routed = lineage.of_model(platform, tenant.id, "support")
    assert [(a["weight"], a["adapter"]["id"]) for a in routed["adapters"]] == [(1, first), (9, second)]
    base = lineage.of_model(platform, tenant.id, "tiny-base")
    assert (base["kind"], base["adapters"], len(base["base_model"]["digest"])) == ("base_model", [], 64)


def test_another_tenants_model_is_not_traced(platform: Platform, train: Callable[..., str]) -> None:
    name = name_of(platform, train())
    for asked in (name, name.rpartition(":")[0], "ft:nothing"):
        with pytest.raises(NotFound):
            lineage.of_model(platform, "somebody-else", asked)


def test_warm_starts_are_followed_back_to_the_first(platform: Platform, tenant: Tenant, train: Callable[..., str]) -> None:
    chain = [train()]
    for _ in range(2):
        chain.append(train(warm_start=chain[-1]))
        with as_owner(platform).begin() as conn:  # as registration writes it
            conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            conn.execute(sa.update(adapters).where(adapters.c.id == chain[-1]).values(parent_adapter_id=chain[-2]))
    (one,) = lineage.of_adapter(platform, tenant.id, chain[-1], verify=True)["adapters"]
    assert [p["adapter"]["id"] for p in one["parents"]] == [chain[1], chain[0]]
    assert (one["more_parents"], one["holds"]) == (False, True)
    assert {link["adapter_id"] for link in one["links"]} == {None, chain[1], chain[0]}


@pytest.mark.parametrize("what", ["file", "rows", "manifest", "weights", "spec"])
def test_verify_says_which_link_does_not_hold(
    platform: Platform, tenant: Tenant, train: Callable[..., str], upload: tuple[str, str], what: str
) -> None:
    id_ = train()
    (before,) = lineage.of_adapter(platform, tenant.id, id_, verify=True)["adapters"]
    prefix = layout.adapter_prefix(tenant.id, id_)
    where = {
        "file": (uploaded_files.get(platform, tenant.id, upload[0]).object_key, f"training file {upload[0]}"),
        "rows": (f"{layout.dataset_prefix(tenant.id, before['dataset']['id'])}/rows.parquet", "dataset rows"),
        "manifest": (f"{prefix}/manifest.json", "adapter manifest"),
        "weights": (f"{prefix}/adapter_model.safetensors", "adapter file adapter_model.safetensors"),
    }
    if what == "spec":
        with as_owner(platform).begin() as conn:
            conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
            changed = jobs_table.c.spec.op("||")(sa.cast({"recipe": "other@1"}, jobs_table.c.spec.type))
            conn.execute(sa.update(jobs_table).where(jobs_table.c.id == before["job"]["id"]).values(spec=changed))
        expected = "frozen spec"
    else:
        key, expected = where[what]
        platform.objects.put_bytes(key, b"something else")
    found = lineage.of_adapter(platform, tenant.id, id_, verify=True)
    assert (before["holds"], found["holds"]) == (True, False)
    assert broken(found) == [expected]
    if what != "spec":
        platform.objects.delete(key)
        assert broken(lineage.of_adapter(platform, tenant.id, id_, verify=True)) == [expected], "lost, and not deleted by its tenant"


def test_a_file_that_its_tenant_deleted_breaks_nothing_and_is_named(
    platform: Platform, tenant: Tenant, train: Callable[..., str], upload: tuple[str, str]
) -> None:
    id_ = train()
    uploaded_files.delete(platform, tenant.id, upload[0])
    found = lineage.of_adapter(platform, tenant.id, id_, verify=True)
    (one,) = found["adapters"]
    assert found["holds"]
    assert [(link["link"], link["detail"]) for link in one["links"] if link["holds"] is None] == [
        ("signature", "not signed yet"),
        (f"training file {upload[0]}", "deleted; see its proof"),
    ]
    assert one["uploads"][0]["sha256"] == upload[1], "the digest stays"


def test_no_connection_waits_while_bytes_are_read_and_two_verify_at_once(
    platform: Platform, tenant: Tenant, train: Callable[..., str]
) -> None:
    id_ = train()
    watched = Watched(platform)
    assert lineage.of_adapter(replace(platform, objects=watched), tenant.id, id_, verify=True)["holds"]
    assert len(watched.held) > 5
    assert max(watched.held) == 0
    with lineage_checks.turn(), lineage_checks.turn():
        with pytest.raises(QuotaExceeded, match="ask again") as refused:
            lineage.of_adapter(platform, tenant.id, id_, verify=True)
        assert (refused.value.code, refused.value.http_status) == ("too_many_verifications", 429)
        assert lineage.of_adapter(platform, tenant.id, id_)["adapters"]
    assert lineage.of_adapter(platform, tenant.id, id_, verify=True)["holds"]


class Watched(LocalObjectStore):
    """A store that writes down how many connections of the database are taken while it is read."""

    def __init__(self, platform: Platform) -> None:
        assert isinstance(platform.objects, LocalObjectStore)
        super().__init__(platform.objects.root)
        self.pool, self.held = platform.engine.pool, list[int]()

    def open(self, key: str) -> BinaryIO:
        self.held.append(self.pool.checkedout())  # type: ignore[attr-defined]
        return super().open(key)

    def get_bytes(self, key: str) -> bytes:
        self.held.append(self.pool.checkedout())  # type: ignore[attr-defined]
        return super().get_bytes(key)


@pytest.fixture
def mixed(platform: Platform, tenant: Tenant, upload: tuple[str, str], write_chat_rows: Callable[..., Path]) -> tuple[str, str]:
    """Two validated files with different rows."""
    with write_chat_rows(40, name="more.jsonl", salt=" Tell me.").open("rb") as stream:
        other = uploaded_files.create(platform, tenant.id, stream, filename="more.jsonl", purpose="fine-tune").id
    for file_id in (upload[0], other):
        uploaded_files.wait_until_validated(platform, file_id)
    return upload[0], other


def test_a_mixture_leads_to_every_dataset_and_file(platform: Platform, tenant: Tenant, mixed: tuple[str, str]) -> None:
    body = {"model": "tiny-base", "training_files": [{"file": mixed[0], "weight": 2}, {"file": mixed[1], "weight": 1}]}
    job = jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job
    with platform.engine.connect() as conn:
        versions = dict(conn.execute(sa.select(files.c.id, files.c.dataset_id).where(files.c.id.in_(mixed))).all())
    ids = [versions[file_id] for file_id in mixed]
    sources = tuple(Source(dataset_id=id_, pack_fingerprint=f"pk_{n}", rows_per_epoch=5) for n, id_ in enumerate(ids))
    with pytest.raises(Violation, match=r"disagrees with its job .*: dataset_ids"):
        finish(platform, tenant.id, job.id, sources=(sources[0], replace(sources[1], dataset_id="ds_other")))
    again = jobs.submit(platform, tenant.id, JobRequest.from_body({**body, "force": True})).job
    adapter = finish(platform, tenant.id, again.id, sources=sources)
    found = lineage.of_adapter(platform, tenant.id, adapter, verify=True)
    (one,) = found["adapters"]
    assert [one["dataset"]["id"], *(dataset["id"] for dataset in one["mixed_datasets"])] == ids
    assert [(file["role"], file["id"]) for file in one["uploads"]] == [("training", file_id) for file_id in mixed]
    checked = [link["link"] for link in one["links"]]
    assert checked.count("dataset rows") == 2 and "spec's sources" in checked
    assert [f"dataset of file {file_id}" in checked for file_id in mixed] == [True, True]
    assert broken(found) == []
