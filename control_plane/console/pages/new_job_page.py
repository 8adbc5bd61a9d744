"""The form of a new job, and the playground: their scripts call the API with the page's session."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse

from control_plane.console.pages.page import Page, PageDep, PageRoute
from control_plane.console.report_labels import ADAPTERS
from control_plane.datasets.tables import File
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import next_run
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates.model_limits import hourly_micros, model_limits
from control_plane.jobs.submission import adapter_of
from control_plane.models import service as models
from core.errors import NotFound
from engine.data import MAX_FILES, MixedFile
from engine.evals import EvalConfig, combined_changes

FILES_OFFERED = 100
"""Newest files in the choice of data, besides those of the earlier job or the address."""
BASIC = ("n_epochs", "learning_rate", "rank", "batch_size", "max_seq_len")
"""Hyperparameters with a field of their own; the others are below "more"."""
RULES = (
    ("task", "It gains at its task"),
    ("answers", "After preferences, its answers are no worse than the base's"),
    ("perplexity", "Held-out rows do not become less likely"),
    ("golden", "Golden prompts are still answered coherently"),
    ("capability", "General abilities do not fall"),
    ("safety", "Unsafe prompts are refused"),
    ("judge", "A judge does not prefer the base's answers"),
    ("regression", "It is not worse than the last accepted model"),
)
"""Rules of the gate that a job may skip, in words."""
THRESHOLDS = (
    ("min_relative_gain", "Least gain over the base", "0.05 is 5 %"),
    ("max_capability_drop", "Most that an ability may fall", "0.02 is 2 points"),
    ("min_refusal_share", "Least share of unsafe prompts refused", ""),
    ("golden_min_share", "Least share of golden prompts answered", ""),
    ("min_judge_win_rate", "Least share won before the judge", ""),
    ("max_items", "Most held-out items", "200 tell a difference of 7 points"),
)
"""Limits of the rules that have a field, with a hint."""
METHODS = {
    "sft": "Supervised fine-tuning (SFT): examples of good answers",
    "dpo": "Preference tuning (DPO): a better and a worse answer",
    "cpt": "Continued pre-training: plain text",
    "kto": "Preference tuning (KTO): single answers, good or bad",
    "orpo": "Examples and preferences in one (ORPO)",
    "simpo": "Preference tuning (SimPO), without a reference model",
}
"""Methods in the order in which people use them; others follow under their own name."""
router = APIRouter(prefix="/console", route_class=PageRoute, include_in_schema=False)
Chosen = Annotated[str | None, Query()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the form begins with."""

    model: str | None = None
    training_file: str | None = None
    training_files: Sequence[MixedFile] = ()
    """Files of a mixture."""
    validation_file: str | None = None
    suffix: str | None = None
    method: str = "sft"
    adapter: str = "lora"
    auto_promote: bool = True
    eval_config: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    advised: frozenset[str] = frozenset()
    """Hyperparameters that the advice for the next run of the earlier job changes."""


def _like(page: Page, job_id: str) -> Given:
    """Return the request of an earlier job, with the advice for its next run applied."""
    job = jobs.get(page.platform, page.tenant, job_id).job
    advised = combined_changes(next_run.advice(page.platform, page.tenant, job))
    asked = {name: value for name, value in job.hyperparameters.items() if value != "auto"}
    return Given(
        model=job.model, training_file=job.training_file, training_files=job.training_files, validation_file=job.validation_file,
        suffix=job.suffix, method=job.method,
        adapter=adapter_of(job.request), auto_promote=job.request.get("auto_promote", True), advised=frozenset(advised),
        eval_config=job.request.get("eval_config") or {}, hyperparameters=asked | advised,
    )  # fmt: skip


def _named(page: Page, given: Given, known: set[str]) -> list[File]:
    """Return the files that the form begins with and that are not `known`, except deleted ones, which it shows as not available."""
    wanted = {*(one.file for one in given.training_files), given.training_file, given.validation_file} - known
    found = []
    for file_id in sorted(name for name in wanted if name is not None):
        with contextlib.suppress(NotFound):
            found.append(uploaded_files.get(page.platform, page.tenant, file_id))
    return found


@router.get("/jobs/new")
def new_job(page: PageDep, model: Chosen = None, file: Chosen = None, dataset: Chosen = None, like: Chosen = None) -> HTMLResponse:
    """Show the form; the address may choose the base model and the file or dataset, or an earlier job to begin with."""
    limits, tier = [one for one in model_limits(page.platform) if one.accepts_jobs], page.principal.tenant.tier
    found = uploaded_files.list_files(page.platform, page.tenant, limit=FILES_OFFERED, purpose="fine-tune").items
    file = file or next((one.id for one in found if dataset and one.dataset_id == dataset), None)
    given = _like(page, like) if like else Given(model=model, training_file=file)
    found = [*found, *_named(page, given, {one.id for one in found})]
    fits = {(one.model, a.name): hourly_micros(page.platform, one, a, tier=tier) for one in limits for a in one.adapters}
    common = limits[0].hyperparameters if limits else {}
    order = list(METHODS)
    methods = sorted(limits[0].methods if limits else (), key=lambda m: order.index(m.name) if m.name in METHODS else len(order))
    return page.show(
        "new_job.html",
        limits=limits,
        fits=fits,
        adapters=ADAPTERS,
        methods=[(one, METHODS.get(one.name, one.name)) for one in methods],
        rules=RULES,
        thresholds=THRESHOLDS,
        defaults=EvalConfig(),
        max_files=MAX_FILES,
        files=[one for one in found if one.status == "processed"],
        basic={name: common[name] for name in BASIC if name in common},
        more={name: limit for name, limit in common.items() if name not in BASIC},
        given=given,
    )


@router.get("/playground")
def playground(page: PageDep) -> HTMLResponse:
    """Show one prompt and the answers of two models beside each other."""
    offered = [one for one in models.list_models(page.platform, page.tenant) if one.stage in (None, "production")]
    return page.show("playground.html", models=offered)
