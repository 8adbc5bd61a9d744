"""What only a job shows about its dataset is told to its tenant when the pack is made; its hyperparameters reach the pack."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events as events
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import InvalidDataset
from engine.data.packs.manifest import PackManifest
from ft_assets.datasets import step
from tests.ft_assets.datasets.step.test_packing_builders import platform_on
from tests.support.models.reasoning_templates import SWITCHED
from tests.support.models.tiny_model import CHAT_TEMPLATE, build_tiny_model


@pytest.fixture(scope="module")
def platform(new_database: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose base model has a real tokenizer."""
    home = tmp_path_factory.mktemp("doubts")
    made = platform_on(new_database(), home / "objects", home / "home", build_tiny_model(home / "tiny-base"))
    yield made
    made.logins.dispose()


def uploaded(platform: Platform, tenant: Tenant, path: Path) -> str:
    with path.open("rb") as stream:
        return str(uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune").id)


def packed(platform: Platform, tenant: Tenant, **body: Any) -> tuple[str, PackManifest]:
    job_id = str(jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", **body})).job.id)
    step.pin_dataset(platform, tenant.id, job_id)
    return job_id, step.pack(platform, tenant.id, job_id).manifest


def warned(platform: Platform, job_id: str) -> list[tuple[str, str]]:
    query = sa.select(events.c.code, events.c.message).where(events.c.job_id == job_id, events.c.level == "warn")
    with platform.engine.connect() as conn:
        return [(row.code, row.message) for row in conn.execute(query)]


@pytest.mark.parametrize(("held_out", "overlapping"), [(10, 10), (120, 100)])
def test_validation_rows_that_are_trained_on_are_counted(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], held_out: int, overlapping: int
) -> None:
    training = uploaded(platform, tenant, write_chat_rows(100, name="training.jsonl"))
    validation = uploaded(platform, tenant, write_chat_rows(held_out, name="validation.jsonl"))
    job_id, _ = packed(platform, tenant, training_file=training, validation_file=validation)
    ((code, message),) = warned(platform, job_id)
    assert code == "validation_overlap"
    assert f"{overlapping} of {held_out} " in message


def test_a_validation_file_of_its_own_rows_raises_no_doubt(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    training = uploaded(platform, tenant, write_chat_rows(100, name="training.jsonl"))
    validation = uploaded(platform, tenant, write_chat_rows(30, name="validation.jsonl", salt=" Answer in one kind sentence."))
    job_id, manifest = packed(platform, tenant, training_file=training, validation_file=validation)
    assert warned(platform, job_id) == []
    assert manifest.validation is not None and manifest.validation["num_examples"] == 30


def test_hyperparameters_of_the_pack_reach_it(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    training = uploaded(platform, tenant, write_chat_rows(100, name="training.jsonl"))
    _, plain = packed(platform, tenant, training_file=training)
    _, other = packed(
        platform, tenant, training_file=training, hyperparameters={"train_on_inputs": True, "safety_share": 0.05, "packing": False}
    )
    assert other.num_trained_tokens > plain.num_trained_tokens
    assert other.num_windows == other.num_examples > plain.num_windows
    assert other.num_examples > plain.num_examples
    assert other.fingerprint != plain.fingerprint


@pytest.mark.parametrize("every", [2, 1])
def test_a_job_reports_answers_that_are_cut_off_and_is_refused_without_any_other(
    every: int, platform: Platform, tenant: Tenant, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i} " * (1 if i % every else 300), "completion": f"answer {i}"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file_id = uploaded(platform, tenant, tmp_path / "rows.jsonl")
    body: dict[str, Any] = {"training_file": file_id, "hyperparameters": {"max_seq_len": 128}}
    if every == 1:
        with pytest.raises(InvalidDataset, match="max_seq_len 128 cuts off the whole answer") as refused:
            packed(platform, tenant, **body)
        assert refused.value.code == "answer_cut_off"
        return
    job_id, manifest = packed(platform, tenant, **body)
    told = dict(warned(platform, job_id))
    assert 0 < manifest.dropped["answer_cut_off"] <= 12
    assert manifest.max_seq_len < 128, "its windows are shortened"
    count = manifest.dropped["answer_cut_off"]
    assert told["answer_cut_off"].startswith(f"max_seq_len 128 cuts off the whole answer of {count} rows (rows 1, 3, 5, ")
    assert "rows are not trained on: answer_cut_off" in told["rows_left_out"]


def chats(path: Path, answer: dict[str, Any]) -> Path:
    """120 conversations of two turns, the last two rows with `answer`."""
    rows = [
        [
            {"role": "user", "content": f"What is {i} plus {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}."},
            {"role": "user", "content": f"And {i} times {i}?"},
            {"role": "assistant", "content": f"That is {i * i}."},
        ]
        for i in range(120)
    ]
    for row in rows[-2:]:
        row[-1] |= answer
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def test_a_job_reports_the_turns_that_its_base_model_rewrites_in_history(new_database: Callable[[], str], tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny-base")
    config = json.loads((model / "tokenizer_config.json").read_text())
    thinking = "{% generation %}{{ ('<think></think>' if loop.last else '') + m['content']"
    config["chat_template"] = CHAT_TEMPLATE.replace("{% generation %}{{ m['content']", thinking)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    platform = platform_on(new_database(), tmp_path / "objects", tmp_path / "home", model)
    tenant = tenants.create(platform, "thinker")[0]
    job_id, manifest = packed(platform, tenant, training_file=uploaded(platform, tenant, chats(tmp_path / "chats.jsonl", {})))
    assert manifest.untrained_turns == 120
    assert [(code, message[:46]) for code, message in warned(platform, job_id)] == [
        ("turns_without_loss", "120 earlier assistant turns carry no loss: the")
    ]
    platform.engine.dispose()


def test_a_job_reports_answers_that_begin_in_two_ways_after_one_prompt(new_database: Callable[[], str], tmp_path: Path) -> None:
    """The file was checked without a base model, so the job is the first to know its template."""
    model = build_tiny_model(tmp_path / "tiny-base", template=SWITCHED)
    platform = platform_on(new_database(), tmp_path / "objects", tmp_path / "home", model)
    tenant = tenants.create(platform, "thinker")[0]
    path = chats(tmp_path / "chats.jsonl", {"reasoning_content": "Twice."})
    job_id, manifest = packed(platform, tenant, training_file=uploaded(platform, tenant, path))
    assert sum(manifest.openings["{}"].values()) == 120
    told = dict(warned(platform, job_id))
    assert told["mixed_reasoning"].startswith("2 answers with reasoning and 118 without follow the same generation prompt")
    assert told["mixed_reasoning"].endswith('give the rows without reasoning "enable_thinking": false')
    assert told["turns_without_loss"].startswith("120 earlier assistant turns")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    marked = [row if "reasoning_content" in row["messages"][-1] else {**row, "enable_thinking": False} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))
    job_id, _ = packed(platform, tenant, training_file=uploaded(platform, tenant, path))
    assert [code for code, _ in warned(platform, job_id)] == ["turns_without_loss"]
    platform.engine.dispose()


@pytest.mark.parametrize("bad_rows", ["fail", "drop"])
def test_rows_that_do_not_fit_the_base_model_meet_the_policy_of_the_upload(
    platform: Platform, tenant: Tenant, tmp_path: Path, bad_rows: str
) -> None:
    path = chats(tmp_path / f"{bad_rows}.jsonl", {"reasoning_content": "Twice."})
    with path.open("rb") as stream:
        made = uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune", policies={"bad_rows": bad_rows})
    assert made.status == "processed"
    if bad_rows == "fail":
        with pytest.raises(InvalidDataset, match=r"\(rows 119\): .*leaves out the reasoning") as refused:
            packed(platform, tenant, training_file=made.id)
        assert refused.value.code == "reasoning_not_rendered"
        return
    job_id, manifest = packed(platform, tenant, training_file=made.id)
    assert manifest.dropped == {"reasoning_not_rendered": 2}
    assert warned(platform, job_id) == [("rows_left_out", "2 rows are not trained on: reasoning_not_rendered 2")]
