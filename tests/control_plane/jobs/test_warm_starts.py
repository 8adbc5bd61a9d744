"""Starting from an earlier adapter or checkpoint: who may, from what, and which bytes."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.attempts.start import warm_start_input
from control_plane.attempts.tables import checkpoints
from control_plane.jobs import service as jobs
from control_plane.jobs import warm_starts
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import Job
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants as tenants_table
from core import layout
from core.errors import FtError, IntegrityError, InvalidRequest, NotFound
from engine.training.spec import LoraSettings
from tests.support.jobs.finished_job import finish, prepare, put_checkpoint, rewrite
from tests.support.platform.database_roles import as_owner

Submit = Callable[..., Job]


@pytest.fixture
def submit(platform: Platform, tenant: Tenant, training_file: str) -> Submit:
    def make(**fields: Any) -> Job:
        body = {"model": "tiny-base", "training_file": training_file, **fields}
        return jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job

    return make


@pytest.fixture
def trained(platform: Platform, tenant: Tenant, submit: Submit) -> dict[str, str]:
    """Names of a finished job: its adapter's id and model name, and a checkpoint of it under both of its names."""
    job_id = submit(hyperparameters={"rank": 16, "alpha": 24}).id
    adapter_id = finish(platform, tenant.id, job_id)
    checkpoint_id = put_checkpoint(platform, tenant.id, job_id, step=5)
    with platform.engine.connect() as conn:
        name = conn.execute(sa.select(adapters.c.name).where(adapters.c.id == adapter_id)).scalar_one()
    return {"adapter": adapter_id, "name": name, "job": job_id, "checkpoint": checkpoint_id, "step": f"{job_id}:step-5"}


def refused(submit: Submit, **fields: Any) -> FtError:
    with pytest.raises(FtError) as caught:
        submit(**fields)
    return caught.value


@pytest.mark.parametrize("reference", ["adapter", "name", "job"])
def test_a_job_starts_from_an_adapter_by_any_of_its_names(
    platform: Platform, submit: Submit, trained: dict[str, str], reference: str
) -> None:
    job = submit(warm_start=trained[reference])
    assert job.warm_start.adapter_id == trained["adapter"]
    assert job.model == "tiny-base"
    assert {k: job.hyperparameters[k] for k in ("rank", "alpha")} == {"rank": 16, "alpha": 24}, "taken from the adapter"
    spec = warm_starts.spec_of(job.warm_start)
    assert spec is not None
    assert (spec.adapter, spec.manifest_sha256) == (trained["name"], job.warm_start.manifest_sha256)


@pytest.mark.parametrize("reference", ["checkpoint", "step"])
def test_a_job_starts_from_a_checkpoint_by_either_of_its_names(submit: Submit, trained: dict[str, str], reference: str) -> None:
    start = submit(warm_start=trained[reference]).warm_start
    assert (start.checkpoint_id, start.adapter, start.adapter_id) == (trained["checkpoint"], trained["step"], None)


@pytest.mark.parametrize("reference", ["name", "step"])
def test_openais_clients_say_it_with_the_model(submit: Submit, trained: dict[str, str], reference: str) -> None:
    job = submit(model=trained[reference])
    assert job.model == "tiny-base"
    assert job.warm_start.adapter == trained[reference]
    error = refused(submit, model=trained["name"], warm_start=trained["checkpoint"])
    assert (error.code, error.param) == ("warm_start_mismatch", "warm_start")


def test_a_lineage_without_its_last_part_is_the_newest_in_production(platform: Platform, submit: Submit, trained: dict[str, str]) -> None:
    with platform.engine.begin() as conn:
        conn.execute(sa.update(adapters).where(adapters.c.id == trained["adapter"]).values(promoted_at=platform.clock()))
    assert submit(model=trained["name"].rpartition(":")[0]).warm_start.adapter_id == trained["adapter"]


def test_a_value_that_differs_from_the_adapters_is_refused_and_an_equal_one_is_not(submit: Submit, trained: dict[str, str]) -> None:
    changes = (("rank", 8), ("alpha", 32), ("target_modules", ["q_proj"]), ("use_rslora", True), ("use_dora", True))
    for name, value in (*changes, ("init_lora_weights", "pissa")):
        error = refused(submit, warm_start=trained["adapter"], hyperparameters={name: value})
        assert (error.code, error.param) == ("warm_start_mismatch", f"hyperparameters.{name}")
    same = {"rank": 16, "alpha": 24.0, "target_modules": "all-linear", "n_epochs": 2}
    assert submit(warm_start=trained["adapter"], hyperparameters=same).hyperparameters["n_epochs"] == 2


def test_the_kind_of_adapter_stays_and_a_checkpoint_of_pissa_is_plain_lora_of_twice_the_rank(
    platform: Platform, tenant: Tenant, submit: Submit
) -> None:
    first, second = submit().id, submit(hyperparameters={"n_epochs": 3}).id
    finish(platform, tenant.id, first, lora=LoraSettings(rank=8, alpha=16, use_rslora=True, use_dora=True))
    kept = submit(warm_start=first).hyperparameters
    assert (kept["use_rslora"], kept["use_dora"]) == (True, True)
    finish(platform, tenant.id, second, lora=LoraSettings(rank=8, alpha=16, dropout=0.0, init_lora_weights="pissa"))
    begun = submit(warm_start=f"{second}:step-10").hyperparameters
    assert (begun["rank"], begun["alpha"], "init_lora_weights" in begun) == (16, 32.0, False)


def test_chosen_modules_stay_as_they_were(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit().id
    finish(platform, tenant.id, first, lora=LoraSettings(rank=8, alpha=16, target_modules=("q_proj", "v_proj")))
    assert submit(warm_start=first).hyperparameters["target_modules"] == ["q_proj", "v_proj"]
    submit(warm_start=first, hyperparameters={"target_modules": ["v_proj", "q_proj"]})


def test_what_is_not_the_tenants_does_not_exist(platform: Platform, trained: dict[str, str], write_chat_rows: Callable[..., Any]) -> None:
    from control_plane.datasets.uploads import uploaded_files

    other, _ = tenants.create(platform, f"o-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(platform, other.id, stream, filename="a.jsonl", purpose="fine-tune").id
    for reference in trained.values():
        with pytest.raises(NotFound) as error:
            jobs.submit(
                platform,
                other.id,
                JobRequest.from_body({"model": "tiny-base", "training_file": file, "warm_start": reference}),
            )
        assert (error.value.code, error.value.param) == ("warm_start_not_found", "warm_start")


@pytest.mark.parametrize("reference", ["ft:tiny-base:x::y", "adp-0", "ftjob-0", "ftckpt_0", "ftjob-0:step-1", "nonsense"])
def test_what_does_not_exist_is_named(submit: Submit, reference: str) -> None:
    error = refused(submit, warm_start=reference)
    assert error.code == "warm_start_not_found"
    assert reference in error.message


def test_a_job_without_an_adapter_says_what_state_it_is_in(submit: Submit) -> None:
    assert "validating" in refused(submit, warm_start=submit().id).message


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"base_model": "old-base"}, "old-base, not on tiny-base"),
        ({"base_digest": "f" * 64}, "digest ffff"),
        ({"stage": "archived"}, "deleted"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    platform: Platform, submit: Submit, trained: dict[str, str], columns: dict[str, str], why: str
) -> None:
    with as_owner(platform).begin() as conn:
        rewrite(conn, adapters.c.id == trained["adapter"], **columns)
    error = refused(submit, warm_start=trained["adapter"])
    assert (error.code, error.param) == ("warm_start_mismatch", "warm_start")
    assert why in error.message


def test_a_full_parameter_job_starts_from_no_adapter(platform: Platform, tenant: Tenant, trained: dict[str, str]) -> None:
    body = {"model": "tiny-base", "training_file": "f", "method": "full", "warm_start": trained["adapter"]}
    with pytest.raises(InvalidRequest, match="full-parameter"):
        warm_starts.on_base(platform, tenant.id, JobRequest.from_body(body))


@pytest.fixture
def whole(platform: Platform, tenant: Tenant, trained: dict[str, str]) -> str:
    """Name of a whole model in the registry, with its files; `trained` names it from then on."""
    prefix = layout.adapter_prefix(tenant.id, trained["adapter"])
    files = {"config.json": b"{}", "model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()}
    manifest = json.dumps({"format": 1, "files": listed}).encode()
    for name, data in {**files, "manifest.json": manifest}.items():
        platform.objects.put_bytes(f"{prefix}/{name}", data)
    row = {"type": "full_model", "manifest_sha256": hashlib.sha256(manifest).hexdigest(), "rank": None, "alpha": None, "modules": None}
    with as_owner(platform).begin() as conn:
        rewrite(conn, adapters.c.id == trained["adapter"], **row)
        conn.execute(sa.update(tenants_table).where(tenants_table.c.id == tenant.id).values(tier="premium"))
    return trained["name"]


@pytest.mark.parametrize(("reference", "method"), [("adapter", "full"), ("name", {"type": "cpt"}), ("job", "full")])
def test_a_full_parameter_job_starts_from_a_whole_model_by_any_of_its_names(
    platform: Platform, tenant: Tenant, submit: Submit, trained: dict[str, str], whole: str, reference: str, method: Any
) -> None:
    if reference == "name":
        body = {"model": whole, "training_file": "f", "method": method, "adapter": "full"}
        requested, start = warm_starts.on_base(platform, tenant.id, JobRequest.from_body(body))
        assert requested.model == "tiny-base"
    else:
        start = submit(warm_start=trained[reference], method=method).warm_start
    assert start is not None
    assert (start.adapter, start.adapter_id, start.whole) == (whole, trained["adapter"], True)
    spec = warm_starts.spec_of(start)
    assert spec is not None
    files = warm_start_input(platform, tenant.id, spec, whole=True).files
    assert sorted(file.path for file in files) == [
        "config.json", "manifest.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    ]  # fmt: skip


def test_a_whole_model_is_refused_to_adapter_jobs_and_without_its_files(
    platform: Platform, tenant: Tenant, submit: Submit, trained: dict[str, str], whole: str
) -> None:
    for fields in ({"warm_start": whole}, {"model": whole}, {"warm_start": trained["job"], "method": "qlora"}):
        error = refused(submit, **fields)
        assert error.code == "warm_start_mismatch"
        assert "set adapter to full" in error.message
    platform.objects.delete(f"{layout.adapter_prefix(tenant.id, trained['adapter'])}/config.json")
    assert refused(submit, warm_start=whole, method="full").code == "warm_start_not_found"


def test_a_checkpoint_of_a_full_parameter_job_is_refused_and_its_model_is_named(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    job_id = submit().id
    prepare(platform, tenant.id, job_id, adapter="full", lora=None)
    error = refused(submit, warm_start=put_checkpoint(platform, tenant.id, job_id, step=5), method="full")
    assert error.code == "warm_start_mismatch"
    assert error.message.endswith(f"can be started from: {job_id}")


def test_a_checkpoint_that_is_not_kept_any_more_is_refused(platform: Platform, submit: Submit, trained: dict[str, str]) -> None:
    with platform.engine.begin() as conn:
        this = checkpoints.c.id == trained["checkpoint"]
        prefix = conn.execute(sa.select(checkpoints.c.object_prefix).where(this)).scalar_one()
    platform.objects.delete(f"{prefix}/adapter_model.safetensors")
    assert "later checkpoint" in refused(submit, warm_start=trained["checkpoint"]).message
    with platform.engine.begin() as conn:
        conn.execute(sa.update(checkpoints).where(this).values(retired_at=platform.clock()))
    assert refused(submit, warm_start=trained["checkpoint"]).code == "warm_start_not_found"


@pytest.mark.parametrize("reference", ["adapter", "checkpoint"])
def test_the_training_gets_the_adapters_files_and_nothing_else(
    platform: Platform, tenant: Tenant, submit: Submit, trained: dict[str, str], reference: str
) -> None:
    start = warm_starts.spec_of(submit(warm_start=trained[reference]).warm_start)
    assert start is not None
    files = warm_start_input(platform, tenant.id, start).files
    assert sorted(file.path for file in files) == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert all(hashlib.sha256(platform.objects.get_bytes(file.key)).hexdigest() == file.sha256 for file in files)


def test_the_training_gets_the_digests_of_the_manifest_that_the_spec_names(
    platform: Platform, tenant: Tenant, submit: Submit, trained: dict[str, str]
) -> None:
    """Whoever fetches a file compares it with its digest."""
    start = warm_starts.spec_of(submit(warm_start=trained["adapter"]).warm_start)
    assert start is not None
    prefix, named = layout.adapter_prefix(tenant.id, trained["adapter"]), warm_start_input(platform, tenant.id, start)
    platform.objects.put_bytes(f"{prefix}/adapter_model.safetensors", b"other weights")
    assert warm_start_input(platform, tenant.id, start) == named
    platform.objects.put_bytes(f"{prefix}/manifest.json", b"{}")
    with pytest.raises(IntegrityError, match="manifest"):
        warm_start_input(platform, tenant.id, start)


def test_two_starts_are_two_requests_and_one_start_is_one(platform: Platform, submit: Submit, trained: dict[str, str]) -> None:
    by_id, by_name, by_checkpoint = (submit(warm_start=trained[r]).warm_start for r in ("adapter", "name", "checkpoint"))
    assert by_id == by_name
    assert by_id.manifest_sha256 != by_checkpoint.manifest_sha256


def test_a_base_model_alone_starts_from_nothing(platform: Platform, submit: Submit) -> None:
    job_id = submit().id
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(jobs_table.c.warm_start).where(jobs_table.c.id == job_id)).one()
    assert row.warm_start is None
    assert warm_starts.spec_of(row.warm_start) is None


def test_another_tenants_job_and_its_bytes_do_not_exist(
    platform: Platform, trained: dict[str, str], submit: Submit, tenant: Tenant
) -> None:
    other, _ = tenants.create(platform, f"o-{uuid.uuid4().hex[:8]}", tier="standard")
    for reference in (trained["job"], submit().id):
        with pytest.raises(NotFound) as hidden:
            warm_starts.find(platform, other.id, reference, param="warm_start")
        assert hidden.value.message.replace(reference, "X") == not_found(platform, tenant.id)
    for reference in ("adapter", "checkpoint"):
        start = warm_starts.spec_of(submit(warm_start=trained[reference]).warm_start)
        assert start is not None
        with pytest.raises(NotFound, match="does not exist any more"):
            warm_start_input(platform, other.id, start)


def not_found(platform: Platform, tenant: str) -> str:
    """What is said of a job that nobody has, its name left out."""
    with pytest.raises(NotFound) as absent:
        warm_starts.find(platform, tenant, "ftjob-nobodys", param="warm_start")
    return absent.value.message.replace("ftjob-nobodys", "X")


@pytest.mark.parametrize("reference", ["adapter", "checkpoint"])
def test_bytes_that_were_deleted_since_are_not_looked_for(
    platform: Platform, tenant: Tenant, submit: Submit, trained: dict[str, str], reference: str
) -> None:
    start = warm_starts.spec_of(submit(warm_start=trained[reference]).warm_start)
    assert start is not None
    with as_owner(platform).begin() as conn:
        rewrite(conn, adapters.c.id == trained["adapter"], stage="archived")
        conn.execute(sa.update(checkpoints).where(checkpoints.c.id == trained["checkpoint"]).values(removed_at=platform.clock()))
    with pytest.raises(NotFound) as gone:
        warm_start_input(platform, tenant.id, start)
    assert gone.value.code == "warm_start_not_found"
