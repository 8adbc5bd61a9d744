"""Mixtures really packed: one pack per file, shared with other jobs; the spec pins every version; warnings name the file."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import evaluation_workload, next_run
from control_plane.evaluations.evaluation_workload import Question, StoredWeights
from control_plane.jobs import responses
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import service as estimates
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.errors import Conflict, InvalidDataset, InvalidRequest, NotFound
from engine.evals.config import EvalConfig
from engine.evals.suites.suite_items import validation_suites
from ft_assets.datasets import step
from ft_assets.evals import step as evaluation_step
from tests.support.models.tiny_model import build_tiny_model

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
    "upsilon",
]


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    model = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return replace(new_platform(), models=Catalogue({"tiny": ({"id": "tiny", "path": str(model)}, model)}))


@pytest.fixture
def tenant(platform: Platform) -> str:
    return tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")[0].id


def rows(topic: str, count: int) -> list[dict[str, Any]]:
    """Conversations that differ in most of their words."""
    said = [
        (f"{topic} {WORDS[n % 20]} {WORDS[n // 20 % 20]} {n}", f"{WORDS[(n * 7) % 20]} {topic} {n * n} {WORDS[n // 3 % 20]}")
        for n in range(count)
    ]
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]


def upload(platform: Platform, tenant: str, body: Sequence[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in body))
    with path.open("rb") as stream:
        return uploaded_files.create(platform, tenant, stream, filename=path.name, purpose="fine-tune").id


@pytest.fixture
def two(platform: Platform, tenant: str, tmp_path: Path) -> tuple[str, str]:
    """A large and a small file."""
    large = upload(platform, tenant, rows("rivers", 120), tmp_path / "large.jsonl")
    return large, upload(platform, tenant, rows("stars", 30), tmp_path / "small.jsonl")


def request(*files: dict[str, Any], **fields: Any) -> JobRequest:
    settings = {"rank": 8, "n_epochs": 1, "max_seq_len": 64, "batch_size": 4}
    return JobRequest.from_body({"model": "tiny", "seed": 5, "training_files": list(files), "hyperparameters": settings, **fields})


def prepared(platform: Platform, tenant: str, asked: JobRequest) -> tuple[str, step.Packed]:
    job_id = jobs.submit(platform, tenant, asked).job.id
    step.pin_dataset(platform, tenant, job_id)
    return job_id, step.pack(platform, tenant, job_id)


def events(platform: Platform, job_id: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with platform.engine.connect() as conn:
        for code, message in conn.execute(sa.select(job_events.c.code, job_events.c.message).where(job_events.c.job_id == job_id)):
            found.setdefault(code, []).append(message)
    return found


def test_a_mixture_is_packed_file_by_file_and_its_spec_pins_every_version(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    job_id, packed = prepared(platform, tenant, request({"file": large, "weight": 1}, {"file": small, "weight": 1}))
    job = jobs.row(platform, tenant, job_id)
    assert job.spec is not None
    sources, packs = job.spec["sources"], packed.manifests
    assert [s["pack_fingerprint"] for s in sources] == [p.fingerprint for p in packs]
    assert [s["dataset_id"] for s in sources] == step.versions_of(platform, tenant, job_id) == [p.dataset_id for p in packs]
    assert (job.spec["pack_fingerprint"], job.spec["dataset_id"]) == (packs[0].fingerprint, packs[0].dataset_id)
    tokens = [s["rows_per_epoch"] * p.num_tokens / p.num_rows for s, p in zip(sources, packs, strict=True)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.1), "equal weights, equal tokens"
    assert sources[0]["rows_per_epoch"] < packs[0].num_rows and sources[1]["rows_per_epoch"] > packs[1].num_rows
    assert packed.total_steps == -(-sum(s["rows_per_epoch"] for s in sources) // 4)
    assert not step.pack_differences(platform, tenant, packs)
    shown = responses.job(jobs.get(platform, tenant, job_id))
    assert shown.training_file == large and shown.training_files is not None
    assert [(f.file, f.weight, f.dataset_id) for f in shown.training_files] == [
        (large, 1.0, packs[0].dataset_id),
        (small, 1.0, packs[1].dataset_id),
    ]
    (planned,) = events(platform, job_id)["mixture_planned"]
    assert large in planned and small in planned


def test_a_job_stores_what_a_mixture_means_and_lists_it(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    given = request({"file": large, "weight": 2, "tokens": None}, {"file": small, "weight": 1, "tokens": None})
    job = jobs.submit(platform, tenant, given).job
    assert job.request["training_files"] == [{"file": large, "weight": 2.0}, {"file": small, "weight": 1.0}]
    assert given.sha256 == request({"file": large, "weight": 2.0}, {"file": small, "weight": 1}).sha256
    with platform.engine.begin() as conn:
        stored = {**job.request, "training_files": [{**one, "note": None} for one in job.request["training_files"]]}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job.id).values(request=stored))
    (listed,) = jobs.list_jobs(platform, tenant).items
    assert [(one.file, one.weight) for one in listed.job.training_files] == [(large, 2.0), (small, 1.0)]


def test_packs_are_shared_with_jobs_on_one_file_and_with_other_mixtures(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    alone = {"model": "tiny", "seed": 5, "hyperparameters": {"rank": 8, "n_epochs": 1, "max_seq_len": 64, "batch_size": 4}}
    _, single = prepared(platform, tenant, JobRequest.from_body({**alone, "training_file": large}))
    _, first = prepared(platform, tenant, request({"file": large}, {"file": small}))
    _, second = prepared(platform, tenant, request({"file": small, "tokens": 300}, {"file": large}))
    assert first.manifests[0].fingerprint == single.manifest.fingerprint
    assert not first.reused, "the small file was not packed before"
    assert second.reused and {p.fingerprint for p in first.manifests} == {p.fingerprint for p in second.manifests}
    assert [s.rows_per_epoch for s in first.sources] == [p.num_rows for p in first.manifests], "each row once"
    assert first.spec_sha256 != second.spec_sha256


def test_a_later_run_of_a_job_asks_for_the_same_mixture(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    job_id, _ = prepared(platform, tenant, request({"file": large, "weight": 3}, {"file": small, "tokens": 400}))
    again = next_run.request(jobs.row(platform, tenant, job_id), {"learning_rate": 1e-4})
    assert again.training_files == jobs.row(platform, tenant, job_id).training_files
    job_id, packed = prepared(platform, tenant, again)
    assert packed.reused and jobs.row(platform, tenant, job_id).hyperparameters["learning_rate"] == 1e-4


def test_the_estimate_counts_all_files(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    for file_id in two:
        uploaded_files.wait_until_validated(platform, file_id)
    asked = request({"file": large, "weight": 1}, {"file": small, "weight": 1})
    found = estimates.estimate(platform, tenant, asked)
    assert found.training_files is not None
    assert found.training_files[0].tokens == pytest.approx(found.training_files[1].tokens, abs=1)
    assert found.tokens.per_epoch == sum(file.tokens for file in found.training_files)
    _, packed = prepared(platform, tenant, asked)
    assert found.total_steps == pytest.approx(packed.total_steps, abs=1)
    with pytest.raises(InvalidRequest, match="an epoch would read"):
        estimates.estimate(platform, tenant, request({"file": large, "weight": 1000}, {"file": small, "tokens": 10**6}))


def test_held_out_rows_of_one_file_that_another_trains_on_are_counted(platform: Platform, tenant: str, tmp_path: Path) -> None:
    large, other = rows("rivers", 120), rows("stars", 30)
    files = [upload(platform, tenant, large, tmp_path / "a.jsonl"), upload(platform, tenant, large[:60] + other, tmp_path / "b.jsonl")]
    held_out = upload(platform, tenant, large[:5] + rows("moons", 15), tmp_path / "held.jsonl")
    job_id, packed = prepared(platform, tenant, request(*({"file": f} for f in files), validation_file=held_out))
    (warned,) = events(platform, job_id)["validation_overlap"]
    assert "5 of 20" in warned and files[0] not in warned, "it is counted over all files"
    assert [p.validation is not None for p in packed.manifests] == [True, False], "the validation file is packed once"
    own, _ = prepared(platform, tenant, request({"file": files[0]}, {"file": files[1]}, force=True))
    held = sum(1 for _ in step.validation_rows(platform, tenant, jobs.row(platform, tenant, own)))
    assert held > 10, "each file's own held-out rows are evaluated"


def asked(platform: Platform, tenant: str, job_id: str, scratch: Path) -> Question:
    """The question of the job's evaluation; staged as an agent does, it must hold the same held-out rows."""
    job = jobs.row(platform, tenant, job_id)
    model = platform.models.get_pinned(job.model, job.base_digest)
    assert model.directory is not None
    judged = evaluation_step.Judged(
        tenant=tenant, job=job, adapter=StoredWeights(prefix="adapters/a", manifest_sha256="0" * 64), base_model=job.model,
        base_dir=model.directory, base_digest=job.base_digest, eval_config=EvalConfig(), key="report", compare=False,
    )  # fmt: skip
    scratch.mkdir()
    found = evaluation_step._question(platform, judged, scratch, [], [])
    assert found.run.validation_pack_dir is not None
    staged = scratch / "staged"
    for file in evaluation_workload._validation_files(platform, job):
        (staged / file.path).parent.mkdir(parents=True, exist_ok=True)
        (staged / file.path).write_bytes(platform.objects.get_bytes(file.key))
    assert not list(staged.rglob("shard-*"))
    here, there = (validation_suites(place, limit=1000)[0] for place in (found.run.validation_pack_dir, staged))
    assert [suite.digest for suite in here] == [suite.digest for suite in there]
    return found


def num_measured(question: Question, *, limit: int = 1000) -> int:
    assert question.run.validation_pack_dir is not None
    ((suite,), _) = validation_suites(question.run.validation_pack_dir, limit=limit)
    return suite.num_items


def test_an_evaluation_measures_the_held_out_rows_of_every_file(
    platform: Platform, tenant: str, two: tuple[str, str], tmp_path: Path
) -> None:
    large, small = two
    job_id, packed = prepared(platform, tenant, request({"file": large}, {"file": small}))
    held_out = [pack.validation["num_examples"] for pack in packed.manifests if pack.validation]
    assert len(held_out) == 2 and all(held_out)
    question = asked(platform, tenant, job_id, tmp_path / "mixed")
    assert num_measured(question) == sum(held_out)
    assert num_measured(question, limit=2) <= 2
    settings = {"rank": 8, "n_epochs": 1, "max_seq_len": 64, "batch_size": 4}
    single = JobRequest.from_body({"model": "tiny", "training_file": large, "hyperparameters": settings, "seed": 5})
    job_id, packed = prepared(platform, tenant, single)
    assert packed.manifest.validation
    assert num_measured(asked(platform, tenant, job_id, tmp_path / "single")) == packed.manifest.validation["num_examples"]


def test_rows_read_too_often_are_warned_of(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    job_id, packed = prepared(platform, tenant, request({"file": large}, {"file": small, "tokens": 30_000}))
    (warned,) = events(platform, job_id)["source_repeated"]
    assert warned.startswith(f"{small}: its rows are read ")
    settings = {"rank": 8, "n_epochs": 10, "max_seq_len": 64, "batch_size": 4}
    twice = {"file": small, "tokens": 2 * packed.manifests[1].num_tokens}
    job_id, _ = prepared(platform, tenant, request({"file": large}, twice, hyperparameters=settings))
    (warned,) = events(platform, job_id)["source_repeated"]
    assert warned.startswith(f"{small}: its rows are read 20 times over all epochs")


def pairs(topic: str, count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": row["messages"][0]["content"], "chosen": row["messages"][1]["content"], "rejected": f"no {topic} at {n}"}
        for n, row in enumerate(rows(topic, count))
    ]


def test_preference_files_are_mixed_and_one_reference_serves_every_ratio(platform: Platform, tenant: str, tmp_path: Path) -> None:
    large, small = (
        upload(platform, tenant, pairs(topic, count), tmp_path / f"{topic}.jsonl") for topic, count in (("rivers", 120), ("stars", 30))
    )
    packed: list[step.Packed] = []
    for weights in ((1, 1), (3, 1)):
        files = ({"file": file, "weight": weight} for file, weight in zip((large, small), weights, strict=True))
        packed.append(prepared(platform, tenant, request(*files, method="dpo"))[1])
    assert [pack.manifest.kind for pack in packed] == ["pairs", "pairs"]
    assert all(len(pack.sources) == 2 for pack in packed) and packed[0].sources != packed[1].sources
    references = [pack.reference for pack in packed]
    assert references[0] is not None and references[1] is not None and references[0].key == references[1].key
    _, alone = prepared(platform, tenant, request({"file": large}, method="dpo"))
    assert alone.reference is not None and alone.reference.key != references[0].key
    single = JobRequest.from_body({**alone_settings(), "training_file": large, "method": "dpo"})
    _, one = prepared(platform, tenant, single)
    assert one.reference is not None and one.reference.key == alone.reference.key, "of the same pack"


def alone_settings() -> dict[str, Any]:
    return {"model": "tiny", "seed": 6, "hyperparameters": {"rank": 8, "n_epochs": 1, "max_seq_len": 64, "batch_size": 4}}


def test_unknown_files_equal_files_and_other_formats_are_refused(
    platform: Platform, tenant: str, two: tuple[str, str], tmp_path: Path
) -> None:
    large, small = two
    with pytest.raises(NotFound, match="'file-none' does not exist") as missing:
        jobs.submit(platform, tenant, request({"file": large}, {"file": "file-none"}))
    assert missing.value.param == "training_files[1].file"
    same = upload(platform, tenant, rows("stars", 30), tmp_path / "again.jsonl")
    for file_id in (small, same):
        uploaded_files.wait_until_validated(platform, file_id)
    with pytest.raises(InvalidRequest, match=f"{same} and {small} hold the same rows") as equal:
        jobs.submit(platform, tenant, request({"file": small}, {"file": same}))
    assert equal.value.param == "training_files[1].file"
    few = upload(platform, tenant, rows("moons", 5), tmp_path / "few.jsonl")
    late = jobs.submit(platform, tenant, request({"file": large}, {"file": small})).job.id
    with platform.engine.begin() as conn:  # as if the job had been submitted while its file was validated
        submitted = {"training_files": [{"file": large}, {"file": few}]}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == late).values(request=submitted))
    uploaded_files.wait_until_validated(platform, few)
    refusing: tuple[Callable[[], object], ...] = (
        lambda: jobs.submit(platform, tenant, request({"file": large}, {"file": few})),
        lambda: estimates.estimate(platform, tenant, request({"file": large}, {"file": few})),
        lambda: step.pin_dataset(platform, tenant, late),
    )
    uploaded_files.wait_until_validated(platform, large)
    for refuse in refusing:
        with pytest.raises(InvalidDataset) as short:
            refuse()
        assert (short.value.code, short.value.param) == ("invalid_training_file", "training_files[1].file")
    with pytest.raises(InvalidRequest, match="holds chat rows, which method dpo cannot train on") as of_another_format:
        jobs.submit(platform, tenant, request({"file": large}, {"file": small}, method="dpo"))
    assert of_another_format.value.param == "training_files[0].file"
    with pytest.raises(InvalidRequest, match="were both given"):
        request({"file": large}, training_file=small)


def test_a_file_that_an_open_mixture_names_is_kept(platform: Platform, tenant: str, two: tuple[str, str]) -> None:
    large, small = two
    jobs.submit(platform, tenant, request({"file": large}, {"file": small}))
    with pytest.raises(Conflict):
        uploaded_files.delete(platform, tenant, small)
