"""Data commands of ``ft`` against the real API: uploads with policies, versions, suites, estimates, previews."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.datasets import suites
from control_plane.models import service as models
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant, tier_named
from core.base_models import Catalogue
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.background_worker import working

MODEL = "tiny-chat"
QUESTION = "Which of the seven lamps in the long corridor goes out first when the night watchman has closed the outer door?"
Ft = Callable[..., Any]
"""Runs ``ft`` with these arguments; see the fixtures."""


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform whose only base model has a real tokenizer and template."""
    directory = build_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    return replace(new_platform(), models=Catalogue({MODEL: ({"id": MODEL, "path": str(directory)}, directory.parent)}))


@pytest.fixture(scope="module")
def api_url(platform: Platform, serve: Callable[[ASGIApp], str]) -> Iterator[str]:
    with working(platform):
        yield serve(create_app(platform))


def test_an_upload_with_policies_is_a_dataset_that_is_listed_and_shown(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    made = ft("upload", write_chat_rows(120), "--policy", "pii=redact", "--model", MODEL, "--json").json
    assert (made["status"], made["policies"], made["model"]) == ("processed", {"pii": "redact"}, MODEL)
    listed = ft("datasets", "list", "--json").json
    assert [d["id"] for d in listed] == [made["dataset_id"]]
    (line,) = [row for row in ft("datasets", "list").out.splitlines() if made["dataset_id"] in row]
    assert "support v1" in line
    shown = ft("datasets", "show", made["dataset_id"])
    assert "row count:" in shown.out
    assert "rows," in shown.out
    assert ft("datasets", "show", made["id"], "--json").json["report"]["valid"] is True
    assert "[dataset_not_found" in ft("datasets", "show", "ds_0").err


def test_a_large_upload_is_followed_until_it_is_validated(ft: Ft, tmp_path: Path) -> None:
    draw, path = random.Random(3), tmp_path / "large.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as out:
        for i in range(3200):
            turns = [("user", f"{i} {draw.randbytes(700).hex()}"), ("assistant", f"It is {i}.")]
            out.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    at_once = ft("upload", path, "--no-wait", "--json").json
    assert at_once["status"] == "uploaded"
    done = ft("upload", path)
    assert done.code == 0, done.err
    assert "status:  processed" in done.out
    assert "validating: " in done.err


def test_contamination_lists_are_added_listed_and_removed_also_by_their_earlier_commands(ft: Ft, tmp_path: Path) -> None:
    path = tmp_path / "quiz.csv"
    path.write_text("q,a\n" + "".join(f"What is the sum of {i} and {i}?,{2 * i}\n" for i in range(9)))
    done = ft("contamination", "add", "quiz", path, "--field", "q")
    assert done.code == 0, done.err
    assert "9 items" in done.err
    assert [(s["name"], s["owner"], s["num_items"]) for s in ft("suites", "list", "--json").json] == [
        ("gsm8k", "platform", 1319),
        ("quiz", "tenant", 9),
    ]
    assert "[suite_exists" in ft("suites", "add", "quiz", path, "--field", "q").err
    assert ft("contamination", "remove", "quiz").code == 0
    assert [s["name"] for s in ft("contamination", "list", "--json").json] == ["gsm8k"]


@pytest.fixture
def operators_exam(platform: Platform, tmp_path: Path) -> Iterator[Path]:
    """A file of one question, which the operator has as a contamination list."""
    path = tmp_path / "exam.jsonl"
    path.write_text(json.dumps({"question": QUESTION}) + "\n")
    with path.open("rb") as stream:
        suites.add(platform, None, stream, name="exam", filename=path.name, field="question")
    yield path
    suites.remove(platform, None, "exam")


def test_a_check_compares_with_the_platforms_limits_lists_and_tokenizer(
    ft: Ft, api_url: str, tenant: Tenant, operators_exam: Path, write_chat_rows: Callable[..., Path]
) -> None:
    """What it finds is what an upload of the same file finds."""
    path = write_chat_rows(120)
    asked = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The third."}]}
    path.write_text(path.read_text() + json.dumps(asked) + "\n")
    assert ft("contamination", "add", "quiz", operators_exam).code == 0
    found = ft("check", path, "--model", MODEL, "--json", "--as-validation")
    made = ft("upload", path, "--model", MODEL, "--json").json
    report = found.json
    assert report.pop("platform") == {"url": api_url, "not_compared": [], "reason": None}
    assert report == ft("datasets", "show", made["id"], "--json").json["report"]
    assert report["stats"]["contamination"]["checked"] == ["gsm8k", "exam", "own/quiz"]
    assert report["stats"]["contamination"]["flagged"] == 1
    assert report["policies"]["max_examples"] == tier_named(tenant.tier).max_examples
    assert "not compared" not in found.err
    assert ft("check", path, "--offline", "--json").json["stats"]["contamination"]["checked"] == ["gsm8k"]


def test_a_check_refuses_a_file_over_the_tiers_limit_before_it_reads_it(ft: Ft, tenant: Tenant, tmp_path: Path) -> None:
    with (tmp_path / "large.jsonl").open("wb") as sparse:
        sparse.truncate(tier_named(tenant.tier).max_file_bytes + 1)
    done = ft("check", tmp_path / "large.jsonl")
    assert done.code == 1
    assert "has 10,737,418,241 bytes, more than the 10,737,418,240 that your tier may upload" in done.err


def test_a_file_here_is_previewed_with_the_platforms_tokenizer(ft: Ft, api_url: str, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(12)
    done = ft("preview", path, "--model", MODEL, "-n", "1")
    assert done.code == 0, done.err
    assert "<|im_start|>user" in done.out and "What is 0 plus 0?" in done.out
    assert done.err == ""
    for command in ("preview", "check"):
        unknown = ft(command, path, "--model", "tiny-chart")
        assert f"'tiny-chart' is not in the catalogue of {api_url}; choose one of: {MODEL}; did you mean {MODEL}?" in unknown.err
        here = ft(command, path, "--model", MODEL, "--offline")
        assert "Only the models of this directory were looked at: --offline was given" in here.err


def test_archive_of_a_tokenizer_is_made_once_and_again_when_its_files_change(platform: Platform) -> None:
    first = models.tokenizer_archive(platform, MODEL)
    made = first.stat().st_ino
    again = models.tokenizer_archive(platform, MODEL)
    assert (again, again.stat().st_ino) == (first, made)
    directory = platform.models.get(MODEL).directory
    assert directory is not None
    (directory / "tokenizer_config.json").touch()
    assert models.tokenizer_archive(platform, MODEL) != first


def test_recipes_are_listed_and_shown_with_their_sources(ft: Ft) -> None:
    listed = {r["id"]: r for r in ft("recipes", "list", "--json").json}
    assert {"any-lora@3", "any-full@3", "demo-llama-3m@6"} <= set(listed)
    done = ft("recipes", "show", "any-full", "--method", "dpo")
    assert done.code == 0, done.err
    assert "5e-07" in done.out
    assert "Zephyr" in done.out
    assert "[invalid_recipe" in ft("recipes", "show", "nobody").err


def test_adapter_recipe_and_gpus_are_part_of_an_estimate(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    found = ft("estimate", path, "--model", MODEL, "--adapter", "qlora", "--recipe", "any-qlora@3", "--json").json
    assert (found["recipe"], found["num_gpus"], found["memory"]["strategy"]) == ("any-qlora@3", 1, "single")
    assert "[invalid_hardware" in ft("estimate", path, "--model", MODEL, "--num-gpus", "3").err
    mixed = ft("estimate", f"{found['training_file']},tokens=500", "--model", MODEL)
    assert f"{found['training_file']}, " in mixed.out and " times an epoch (500 tokens)" in mixed.out, mixed.err


def test_an_estimate_of_a_file_uploads_it_and_says_what_it_rests_on(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    done = ft("estimate", path, "--model", MODEL, "--hp", "n_epochs=2")
    assert done.code == 0, done.err
    for shown in ("tokens:", "in 2 epochs", "steps:", "gpu hours:", "USD", "finishes in:", "  - price:"):
        assert shown in done.out
    found = ft("estimate", path, "--model", MODEL, "--tier", "free", "--json").json
    assert (found["object"], found["price_micros"]) == ("fine_tuning.estimate", 0)
    assert "[model_not_found" in ft("estimate", path, "--model", "nobody").err
    assert ft("jobs", "--json").json == []


def test_a_dataset_is_previewed_by_its_id(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    made = ft("upload", write_chat_rows(120), "--json").json
    done = ft("preview", made["dataset_id"], "--model", MODEL, "-n", "1")
    assert done.code == 0, done.err
    assert "What is 0 plus 0?" in done.out


def test_capability_suites_are_listed_with_the_reason_why_some_cannot_be_used(ft: Callable[..., Any]) -> None:
    listed = ft("suites", "capability")
    assert listed.code == 0
    lines = {line.split()[0]: " ".join(line.split()) for line in listed.out.splitlines() if line.strip()}
    assert lines["standin_choices"].startswith("standin_choices 1.0 0 200 yes")
    assert lines["mmlu"].startswith("mmlu 1.0 5 ? no:")
    found = {suite["name"]: suite for suite in ft("suites", "capability", "--json").json}
    assert [name for name, suite in found.items() if suite["ready"]] == ["standin_choices", "standin_copy"]
