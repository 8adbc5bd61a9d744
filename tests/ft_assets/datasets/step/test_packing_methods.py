"""Every method's rows become its own kind of pack before the job waits for GPUs, and what it compares with has a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.attempts import start
from control_plane.attempts.claims import Claim
from control_plane.datasets import previews
from control_plane.datasets.service import check_format
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import service as estimate
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core import layout
from core.errors import InvalidDataset, InvalidRequest
from engine.training import methods
from engine.training.reference_logps import reference_key_for
from engine.training.spec import Quantization, TrainingSpec, WarmStart
from ft_assets.datasets import step
from tests.ft_assets.datasets.step.test_packing_builders import platform_on
from tests.support.models.tiny_model import build_tiny_model

torch = pytest.importorskip("torch", reason="needs the training environment")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def url(new_database: Callable[[], str]) -> str:
    return new_database()


@pytest.fixture(scope="module")
def machine(url: str, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Platform]]:
    """Makes platforms that share a database and an object store: one for each name of a machine."""
    home, made = tmp_path_factory.mktemp("machines"), []

    def make(name: str) -> Platform:
        made.append(platform_on(url, home / "objects", home / name, base))
        return made[-1]

    yield make
    for platform in made:
        platform.logins.dispose()


@pytest.fixture(scope="module")
def platform(machine: Callable[[str], Platform]) -> Platform:
    return machine("here")


@pytest.fixture(scope="module")
def tenant(platform: Platform) -> Tenant:
    return tenants.create(platform, "preferring", max_jobs_in_flight=100)[0]


def question(i: int) -> str:
    return f"What is the answer to question {i}, asked in the year {1900 + i}?"


def preferences(i: int) -> dict[str, Any]:
    return {"prompt": question(i), "chosen": f"It is {i}, of course.", "rejected": f"Nobody knows about {i}."}


def judgements(i: int) -> dict[str, Any]:
    return {"prompt": question(i), "completion": f"It is {i}." if i % 3 else f"Go away, {i}.", "label": bool(i % 3)}


def documents(i: int) -> dict[str, Any]:
    return {"text": f"Chapter {i}. " + " ".join(f"Line {j} of chapter {i} is about {i * j}." for j in range(1 + i % 40))}


def chats(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question(i)}, {"role": "assistant", "content": f"It is {i}."}]}


def uploaded(platform: Platform, tenant: Tenant, path: Path, row: Callable[[int], dict[str, Any]], *, count: int = 120, **more: Any) -> str:
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
    with path.open("rb") as stream:
        file = uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune", **more)
    assert file.status == "processed", file.status_details
    return str(file.id)


@pytest.fixture(scope="module")
def upload(platform: Platform, tenant: Tenant, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes a validated file of rows, once for each maker."""
    made: dict[str, str] = {}

    def make(row: Callable[[int], dict[str, Any]]) -> str:
        if row.__name__ not in made:
            path = tmp_path_factory.mktemp("rows") / f"{row.__name__}.jsonl"
            made[row.__name__] = uploaded(platform, tenant, path, row, policies={"near_duplicates": "off"})
        return made[row.__name__]

    return make


def prepared(platform: Platform, tenant: Tenant, file: str, method: str, **body: Any) -> tuple[step.Packed, TrainingSpec, Job]:
    """A submitted job as its preparation leaves it."""
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file, "method": method, **body})
    job_id = str(jobs.submit(platform, tenant.id, request).job.id)
    step.pin_dataset(platform, tenant.id, job_id)
    made = step.pack(platform, tenant.id, job_id)
    job = jobs.get(platform, tenant.id, job_id).job
    return made, TrainingSpec.from_dict(job.spec), job


def claim_of(job: Job, spec: TrainingSpec) -> Claim:
    return Claim(
        tenant=job.tenant_id,
        job_id=job.id,
        attempt=1,
        tier=job.tier,
        pool="local",
        num_gpus=1,
        placement=(),
        model=job.model,
        workload="w",
        frozen_spec=spec,
    )


@pytest.mark.parametrize(("method", "row"), [("dpo", preferences), ("kto", judgements)])
def test_a_reference_is_named_before_training_and_given_to_the_next_job_once_one_has_computed_it(
    platform: Platform, tenant: Tenant, upload: Callable[..., str], method: str, row: Callable[[int], dict[str, Any]]
) -> None:
    packed, spec, job = prepared(platform, tenant, upload(row), method)
    assert (job.state, packed.manifest.kind) == ("queued", methods.method_named(method).pack)
    assert packed.reference is not None and not packed.reference.stored
    assert spec.reference == packed.reference.key == reference_key_for(spec)
    workload = start.describe(platform, claim_of(job, spec))
    assert workload.reference_prefix == layout.reference_prefix(tenant.id, spec.reference)
    assert start.reference_input(platform.objects, claim_of(job, spec)) is None, "the workload computes it"
    if method == "kto":
        assert packed.manifest.num_desirable and packed.manifest.num_undesirable
    body = {"files": [{"name": "w/ref-shard-00000.parquet", "of": "shard-00000.parquet", "sha256": "0" * 64, "num_rows": 1}]}
    platform.objects.put_bytes(f"{workload.reference_prefix}/manifest.json", json.dumps(body).encode())
    second, other, next_job = prepared(platform, tenant, upload(row), method, hyperparameters={"beta": 0.3})
    assert second.reused and second.reference is not None and second.reference.stored
    assert other.reference == spec.reference and other.method_settings["beta"] == 0.3
    found = start.reference_input(platform.objects, claim_of(next_job, other))
    assert found is not None and found in start.describe(platform, claim_of(next_job, other)).inputs
    assert found.optional and [file.path for file in found.files] == ["manifest.json", "w/ref-shard-00000.parquet"]
    assert found.files[1].key == f"{workload.reference_prefix}/w/ref-shard-00000.parquet"


def test_under_qlora_the_reference_is_quantized_as_the_policy_is(platform: Platform, tenant: Tenant, upload: Callable[..., str]) -> None:
    _, plain, _ = prepared(platform, tenant, upload(preferences), "dpo")
    packed, spec, _ = prepared(platform, tenant, upload(preferences), "dpo", adapter="qlora")
    assert spec.quantization is not None and packed.reference is not None
    assert packed.reference.quantization == "nf4-double"
    assert spec.reference != plain.reference


def test_the_key_of_a_reference_covers_the_start_of_the_training(platform: Platform, tenant: Tenant, upload: Callable[..., str]) -> None:
    _, spec, _ = prepared(platform, tenant, upload(preferences), "simpo")
    starts = [replace(spec, warm_start=WarmStart(adapter="ft:one", manifest_sha256=digest)) for digest in ("a" * 64, "b" * 64)]
    renamed = replace(spec, warm_start=WarmStart(adapter="ft:two", manifest_sha256="a" * 64))
    changed = [
        spec,
        *starts,
        replace(spec, quantization=Quantization()),
        replace(spec, precision="fp16"),
        replace(spec, base_digest="other"),
    ]
    assert len({reference_key_for(s) for s in changed}) == len(changed)
    assert reference_key_for(renamed) == reference_key_for(starts[0])
    assert reference_key_for(replace(spec, seed=spec.seed + 1, attention="flash_attention_2")) == reference_key_for(spec)


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_methods_without_a_reference_take_the_same_pairs(
    platform: Platform, tenant: Tenant, upload: Callable[..., str], method: str
) -> None:
    packed, spec, job = prepared(platform, tenant, upload(preferences), method)
    assert (packed.manifest.kind, packed.reference, spec.reference, job.state) == ("pairs", None, None, "queued")
    assert packed.total_steps == spec.optimization.total_steps(num_rows=packed.manifest.num_rows, world_size=1)


def test_continued_pretraining_loses_nothing_of_a_long_document(platform: Platform, tenant: Tenant, upload: Callable[..., str]) -> None:
    sft, _, _ = prepared(platform, tenant, upload(documents), "sft")
    cpt, spec, _ = prepared(platform, tenant, upload(documents), "cpt")
    assert sft.manifest.truncated > 10 and sft.manifest.split == 0
    assert (cpt.manifest.truncated, cpt.manifest.kind, spec.reference) == (0, "windows", None)
    assert cpt.manifest.split > 10 and cpt.manifest.num_tokens > 1.5 * sft.manifest.num_tokens
    assert cpt.manifest.num_trained_tokens == cpt.manifest.num_tokens - cpt.manifest.num_examples


def test_continued_pretraining_learns_every_token_of_conversations(platform: Platform, tenant: Tenant, upload: Callable[..., str]) -> None:
    sft, _, _ = prepared(platform, tenant, upload(chats), "sft")
    cpt, _, _ = prepared(platform, tenant, upload(chats), "cpt")
    assert cpt.manifest.num_tokens == sft.manifest.num_tokens
    assert cpt.manifest.num_trained_tokens == cpt.manifest.num_tokens - cpt.manifest.num_examples > 2 * sft.manifest.num_trained_tokens


def test_answers_of_one_label_end_the_preparation_with_the_reason(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    file = uploaded(platform, tenant, tmp_path / "good.jsonl", lambda i: {**judgements(i), "label": True})
    with pytest.raises(InvalidDataset, match="are good") as refused:
        prepared(platform, tenant, file, "kto")
    assert refused.value.code == "one_label"


@pytest.mark.parametrize(
    ("row", "method", "wanted"),
    [
        (preferences, "dpo", [f"It is {i}, of course." for i in range(120)]),
        pytest.param(judgements, "kto", [f"It is {i}." for i in range(120) if i % 3], marks=pytest.mark.slow),
        (chats, "sft", [f"It is {i}." for i in range(120)]),
        (documents, "cpt", []),
    ],
)
def test_the_evaluation_asks_for_answers_that_are_wanted(
    platform: Platform, tenant: Tenant, upload: Callable[..., str], row: Callable[[int], dict[str, Any]], method: str, wanted: list[str]
) -> None:
    _, _, job = prepared(platform, tenant, upload(row), method)
    rows = list(step.validation_rows(platform, tenant.id, job))
    assert bool(rows) == bool(wanted)
    for found in rows:
        *prompt, answer = found["messages"]
        assert answer["role"] == "assistant" and answer["content"] in wanted
        assert [m["role"] for m in prompt] == ["user"]


@pytest.mark.parametrize(
    ("row", "method"), [(preferences, "dpo"), (preferences, "simpo"), (judgements, "kto"), (documents, "cpt"), (chats, "sft")]
)
def test_the_estimate_counts_what_the_pack_then_holds(
    platform: Platform, tenant: Tenant, upload: Callable[..., str], row: Callable[[int], dict[str, Any]], method: str
) -> None:
    request = JobRequest.from_body({"model": "tiny-base", "training_file": upload(row), "method": method})
    told = estimate.estimate(platform, tenant.id, request).model_dump()
    packed, _, _ = prepared(platform, tenant, upload(row), method)
    assert told["tokens"]["per_epoch"] == pytest.approx(packed.manifest.num_tokens, rel=0.15)  # the split takes whole rows
    assert told["total_steps"] == pytest.approx(packed.total_steps, abs=max(2, 0.2 * packed.total_steps))
    assert ("pair" in str(told["assumptions"])) == (methods.method_named(method).pack == "pairs")
    if packed.manifest.window and packed.manifest.window < packed.manifest.settings["max_seq_len"]:
        assert "windows have " in str(told["assumptions"]) and "filled to" not in str(told["assumptions"])


@pytest.mark.parametrize(
    ("hyperparameters", "shortened", "few"),
    [
        pytest.param({}, True, False, id="a small dataset gets shorter windows"),
        pytest.param({"n_epochs": 0.5}, True, True, id="fewer rows than steps: a row for each is the most"),
        pytest.param({"batch_size": 4, "n_epochs": 1}, True, True, id="a requested batch stays"),
        pytest.param({"max_steps": 5}, False, False, id="requested steps need no windows"),
        pytest.param({"packing": False}, False, False, id="unpacked rows have no windows"),
    ],
)
def test_a_small_dataset_makes_the_steps_of_its_recipe_or_the_job_says_how_many(
    platform: Platform, tenant: Tenant, upload: Callable[..., str], hyperparameters: dict[str, Any], shortened: bool, few: bool
) -> None:
    packed, spec, job = prepared(platform, tenant, upload(chats), "sft", hyperparameters=hyperparameters)
    manifest, told = packed.manifest, {event.code: event.message for event in jobs.events_since(platform, tenant.id, job.id, 0)[0]}
    assert (manifest.window != manifest.settings["max_seq_len"]) == shortened == ("windows_shortened" in told)
    assert ("few_steps" in told) == few == (packed.total_steps < 100 and "max_steps" not in hyperparameters)
    assert spec.optimization.accumulation_steps == hyperparameters.get("batch_size", spec.optimization.accumulation_steps)
    assert (
        manifest.max_seq_len == spec.max_seq_len >= max(manifest.lengths["edges"][i] for i, n in enumerate(manifest.lengths["counts"]) if n)
    )
    assert manifest.truncated == 0
    if shortened:
        assert f"{manifest.window:,} tokens instead of {manifest.settings['max_seq_len']:,}" in told["windows_shortened"]
        assert f"{packed.total_steps} steps" in told["windows_shortened"]


def test_previews_show_what_carries_loss(platform: Platform, tenant: Tenant, upload: Callable[..., str]) -> None:
    shown = previews.preview_dataset(platform, tenant.id, upload(judgements), model="tiny-base", num_examples=2, max_seq_len=None)
    assert [(s.kind, s.side) for s in shown] == [("kto", "bad"), ("kto", "good")]
    assert [[span.text for span in s.loss_spans] for s in shown] == [["Go away, 0.<|im_end|>"], ["It is 1.<|im_end|>"]]
    pair = previews.preview_dataset(platform, tenant.id, upload(preferences), model="tiny-base", num_examples=1, max_seq_len=None)
    assert [s.side for s in pair] == ["chosen", "rejected"]


@pytest.mark.parametrize("format", ["chat", "prompt_completion", "preference", "kto", "text"])
@pytest.mark.parametrize("method", list(methods.registered_methods()))
def test_rows_are_refused_with_the_methods_that_take_them(format: str, method: str) -> None:
    kind = "chat" if format == "prompt_completion" else format
    if kind in methods.method_named(method).rows:
        check_format(format, method, "file-1", param="training_file")
        return
    with pytest.raises(InvalidRequest) as refused:
        check_format(format, method, "file-1", param="training_file")
    assert (refused.value.code, refused.value.param) == ("preference_rows", "training_file")
    assert methods.method_named(method).row_help in refused.value.message
    assert any(name in refused.value.message.split("use method ")[1] for name in methods.registered_methods())
