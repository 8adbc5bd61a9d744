"""``ft sweep`` and ``ft compare`` against the real API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from ft_client.cli.submission_commands import parse_parameters
from tests.support.jobs.finished_job import finish

Ft = Callable[..., Any]


def test_parameters_are_lists_or_ranges() -> None:
    asked = parse_parameters(["rank=8,16", "learning_rate=1e-5..1e-3:log", "schedule=cosine,linear", "n_epochs=1..3"])
    assert asked == {
        "rank": [8, 16],
        "learning_rate": {"min": 1e-5, "max": 1e-3, "scale": "log"},
        "schedule": ["cosine", "linear"],
        "n_epochs": {"min": 1, "max": 3},
    }
    for bad in ("rank", "rank=", "=8"):
        with pytest.raises(typer.BadParameter, match="NAME=VALUES"):
            parse_parameters([bad])


def test_a_sweep_is_made_watched_and_its_best_model_named(
    platform: Platform, tenant: Tenant, ft: Ft, write_chat_rows: Callable[..., Path]
) -> None:
    made = ft("sweep", "create", write_chat_rows(120), "--model", "tiny-base", "-p", "rank=8,16", "--hp", "n_epochs=2", "--seed", "7")
    assert made.code == 0, made.err
    sweep_id = made.out.strip()
    none = ft("sweep", "best", sweep_id, "--json")
    assert (none.code, none.json) == (1, None), "none has succeeded yet"
    jobs = [t["job_id"] for t in ft("sweep", "show", sweep_id, "--json").json["trials"]]
    scored = [(job_id, loss, {"holdout/exact_match": loss}) for job_id, loss in zip(jobs, (0.5, 0.25), strict=True)]
    for (job_id, loss, scores), stage in zip(scored, ("draft", "quarantined"), strict=True):
        adapter_id = finish(platform, tenant.id, job_id, eval_loss=loss, scores=scores, stage=stage)
    shown = ft("sweep", "show", sweep_id)
    assert [line.split("\t")[0] for line in shown.out.splitlines()] == ["", "", "*"]
    assert "rank=16 (eval_loss 0.25)" in shown.err and "succeeded, not approved" in shown.out.splitlines()[2]
    best = ft("sweep", "best", sweep_id)
    assert (best.code, jobs[1] in best.out, f"ft promote {adapter_id}" in best.out) == (0, True, True)
    assert f"{sweep_id}\tsucceeded\ttiny-base\t2/2" in ft("sweep", "list").out
    compared = ft("compare", *jobs)
    assert compared.code == 0, compared.err
    lines = dict(line.split("\t", 1) for line in compared.out.splitlines())
    assert (lines["rank"], lines["eval_loss"], lines["holdout/exact_match"]) == ("8\t16", "0.5\t0.25", "0.5\t0.25")
    refused = ft("sweep", "cancel", sweep_id)
    assert (refused.code, "is already succeeded" in refused.err) == (1, True)


def test_a_sweep_with_a_bad_value_is_refused_and_names_it(ft: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = ft("sweep", "create", write_chat_rows(120), "--model", "tiny-base", "-p", "rank=8,7")
    assert done.code == 1
    assert "rank 7" in done.err
