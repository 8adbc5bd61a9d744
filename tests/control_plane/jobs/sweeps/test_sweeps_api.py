"""``/v1/fine_tuning/sweeps``, comparisons, reuse and warm starts over HTTP, with OpenAI's client where it has a word for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, InvalidRequest, NotFound
from core.telemetry import provenance
from ft_client import FtClient
from tests.support.jobs.finished_job import COMMIT, finish, prepare

RANKS = {"parameters": {"rank": [8, 16, 32]}, "seed": 4}


@pytest.fixture
def sweep(ft: FtClient, training_file: str) -> dict[str, Any]:
    return ft.sweeps.create(model="tiny-base", training_file=training_file, sweep=RANKS, hyperparameters={"n_epochs": 2})


@pytest.fixture
def installed_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FT_COMMIT", COMMIT)
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


def test_a_sweep_is_one_object_with_its_jobs_in_it(client: openai.OpenAI, ft: FtClient, sweep: dict[str, Any]) -> None:
    assert sweep["id"].startswith("ftsweep-")
    assert (sweep["object"], sweep["status"], sweep["strategy"], sweep["metric"]) == ("fine_tuning.sweep", "running", "grid", "eval_loss")
    assert [t["parameters"] for t in sweep["trials"]] == [{"rank": 8}, {"rank": 16}, {"rank": 32}]
    assert sweep["counts"] == {"total": 3, "waiting": 0, "running": 3, "succeeded": 0, "failed": 0, "cancelled": 0}
    job = client.fine_tuning.jobs.retrieve(sweep["trials"][1]["job_id"])
    assert (job.sweep_id, job.status, job.seed, job.auto_promote) == (sweep["id"], "validating_files", 4, False)
    assert ft.sweeps.retrieve(sweep["id"]) == sweep
    assert [s["id"] for s in ft.sweeps.list().all()] == [sweep["id"]]


def test_the_best_trial_is_shown_and_its_job_compared_with_the_others(
    platform: Platform, tenant: Tenant, ft: FtClient, sweep: dict[str, Any], api_url: str, api_key: str
) -> None:
    ids = [t["job_id"] for t in sweep["trials"]]
    for job_id, loss in zip(ids, (0.5, 0.3, 0.4), strict=True):
        finish(platform, tenant.id, job_id, eval_loss=loss, scores={"holdout/exact_match": 1 - loss, "base/holdout/exact_match": 0.1})
    done = ft.sweeps.retrieve(sweep["id"])
    assert (done["status"], done["best"]["parameters"], done["best"]["value"]) == ("succeeded", {"rank": 16}, 0.3)
    assert done["best"]["fine_tuned_model"].startswith("ft:tiny-base:")
    found = ft.jobs.compare(ids)
    assert found["differing"] == {"rank": [8, 16, 32]}
    assert [j["id"] for j in found["jobs"]] == ids
    assert [j["eval_loss"] for j in found["jobs"]] == [0.5, 0.3, 0.4]
    first = found["jobs"][0]
    assert (first["final_loss"], first["eval_metrics"]["holdout/exact_match"]) == (0.25, 0.5)
    assert (first["hyperparameters"]["n_epochs"], first["hyperparameters"]["rank"], first["cost_micros"]) == (2, 8, 0)
    headers = {"authorization": f"Bearer {api_key}"}
    assert httpx.get(f"{api_url}/v1/fine_tuning/sweeps/{sweep['id']}/compare", headers=headers).json() == found


def test_jobs_that_were_not_prepared_are_compared_by_what_was_asked(ft: FtClient, sweep: dict[str, Any]) -> None:
    found = ft.jobs.compare([t["job_id"] for t in sweep["trials"][:2]])
    assert found["differing"] == {"rank": [8, 16]}
    assert [j["final_loss"] for j in found["jobs"]] == [None, None]


def test_a_comparison_needs_two_different_jobs_of_the_tenant(platform: Platform, ft: FtClient, api_url: str, sweep: dict[str, Any]) -> None:
    ids = [t["job_id"] for t in sweep["trials"]]
    for bad in ([ids[0]], [ids[0], ids[0]], []):
        with pytest.raises(InvalidRequest, match="2 to 100"):
            ft.jobs.compare(bad)
    _, key = tenants.create(platform, f"other-{sweep['id'][-8:]}")
    with FtClient(base_url=api_url, api_key=key.secret) as theirs:
        with pytest.raises(NotFound, match=ids[0]):
            theirs.jobs.compare(ids)
        with pytest.raises(NotFound, match="no sweep"):
            theirs.sweeps.retrieve(sweep["id"])


def test_a_bad_value_is_refused_by_its_place_in_the_sweep(ft: FtClient, training_file: str) -> None:
    with pytest.raises(InvalidRequest, match="rank 7") as refused:
        ft.sweeps.create(model="tiny-base", training_file=training_file, sweep={"parameters": {"rank": [8, 7]}})
    assert (refused.value.code, refused.value.param) == ("invalid_hyperparameter", "sweep.parameters.rank")
    assert ft.sweeps.list().all() == []
    assert ft.jobs.list().all() == []


def test_a_sweep_is_cancelled_with_its_jobs(ft: FtClient, sweep: dict[str, Any]) -> None:
    done = ft.sweeps.cancel(sweep["id"])
    assert (done["status"], done["counts"]["cancelled"]) == ("cancelled", 3)
    assert {j["status"] for j in ft.jobs.list().all()} == {"cancelled"}


def test_a_sweep_that_is_sent_again_under_its_key_is_the_same(ft: FtClient, training_file: str) -> None:
    body: dict[str, Any] = {"model": "tiny-base", "training_file": training_file, "sweep": RANKS, "idempotency_key": "once"}
    assert ft.sweeps.create(**body)["id"] == ft.sweeps.create(**body)["id"]
    with pytest.raises(Conflict):
        ft.sweeps.create(**{**body, "sweep": {**RANKS, "seed": 5}})
    assert len(ft.jobs.list().all()) == 3


@pytest.mark.usefixtures("installed_commit")
def test_openais_client_gets_the_finished_job_for_an_identical_request(
    platform: Platform, tenant: Tenant, client: openai.OpenAI, training_file: str
) -> None:
    body: dict[str, Any] = {"model": "tiny-base", "training_file": training_file, "seed": 1}
    first = client.fine_tuning.jobs.create(**body)
    assert (first.reused, first.reused_job_id) == (False, None)
    finish(platform, tenant.id, first.id)
    again = client.fine_tuning.jobs.create(**body)
    assert (again.id, again.status, again.reused) == (first.id, "succeeded", True)
    assert again.fine_tuned_model.startswith("ft:tiny-base:")
    forced = client.fine_tuning.jobs.create(**body, extra_body={"force": True})
    assert (forced.id != first.id, forced.status, forced.reused) == (True, "validating_files", False)
    other = client.fine_tuning.jobs.create(**body, metadata={"n": "2"})
    prepare(platform, tenant.id, other.id)
    ended = client.fine_tuning.jobs.retrieve(other.id)
    assert (ended.status, ended.reused, ended.reused_job_id, ended.trained_tokens) == ("succeeded", True, first.id, 0)
    assert ended.fine_tuned_model == again.fine_tuned_model


def test_openais_client_starts_from_a_fine_tuned_model(
    platform: Platform, tenant: Tenant, client: openai.OpenAI, training_file: str
) -> None:
    first = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    adapter_id = finish(platform, tenant.id, first.id)
    name = client.fine_tuning.jobs.retrieve(first.id).fine_tuned_model
    second = client.fine_tuning.jobs.create(model=name, training_file=training_file)
    assert (second.model, second.warm_start["adapter"], second.warm_start["adapter_id"]) == ("tiny-base", name, adapter_id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.fine_tuning.jobs.create(model="ft:tiny-base:nobody::x", training_file=training_file)
    assert refused.value.code == "model_not_found"
