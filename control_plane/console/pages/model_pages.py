"""Models: the list of adapters; one adapter with its lineage, exports, and the changes of its stage with their consequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Form, Query
from fastapi.responses import HTMLResponse, Response

from control_plane.adapters import exports, impact, lineage, promotions, schemas
from control_plane.adapters import service as adapters
from control_plane.console.documents import lineage_picture
from control_plane.console.pages.models.model_lineage import lineage_layers
from control_plane.console.pages.page import PageDep, PageRoute, see
from control_plane.datasets import service as datasets
from control_plane.datasets.service import ExampleMessage
from control_plane.evaluations import releases
from control_plane.evaluations import service as evaluations
from control_plane.http.authentication import AdminPrincipal, Approver, Writer
from engine.adapters import DEPRECATION_GRACE, Stage

MODELS = "/console/models"
STAGES = ("production", "draft", "staging", "quarantined", "deprecated", "archived")
HEADLINES = (
    "holdout/exact_match", "holdout/accuracy", "holdout/field_accuracy", "holdout/token_f1", "holdout/rouge_l", "holdout/bleu",
    "validation/perplexity",
)  # fmt: skip
"""Scores that can stand for a model, the strictest first."""
LESS_IS_BETTER = frozenset({"perplexity"})
EXPORT_FORMS = (
    ("adapter", "LoRA weights"), ("gguf_adapter", "LoRA weights as GGUF"), ("merged", "Base and adapter in one"),
    ("merged:fp8", "Base and adapter in one, FP8"), ("gguf:q4_k_m", "GGUF, 4 bits (Q4_K_M)"), ("gguf:q8_0", "GGUF, 8 bits"),
    ("gguf:f16", "GGUF, 16 bits"), ("gguf:f32", "GGUF, 32 bits"), ("tokenizer", "Tokenizer and chat template"),
)  # fmt: skip
"""Formats of exports, with their precision."""
MAX_IN_LINK = 4096
"""Characters of a message in a link to the playground: readers copy it into programs that cut long links."""
router = APIRouter(prefix=MODELS, route_class=PageRoute, include_in_schema=False)
After = Annotated[str | None, Query()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The score that a list shows for a model, beside its base's."""

    metric: str
    score: float
    base: float

    @property
    def is_share(self) -> bool:
        return self.metric != "perplexity"

    @property
    def gain(self) -> float:
        """Improvement over the base; positive is better."""
        return (self.base - self.score) if self.metric in LESS_IS_BETTER else (self.score - self.base)


def headline(metrics: Mapping[str, float]) -> Headline | None:
    """Return the first of ``HEADLINES`` that was scored for both; None if none was."""
    name = next((one for one in HEADLINES if one in metrics and f"base/{one}" in metrics), None)
    if name is None:
        return None
    return Headline(metric=name.rpartition("/")[2], score=metrics[name], base=metrics[f"base/{name}"])


@router.get("")
def list_models(page: PageDep, after: After = None, stage: Annotated[str | None, Query()] = None) -> HTMLResponse:
    """List adapters, newest first."""
    found = adapters.list_adapters(page.platform, page.tenant, after=after, stage=stage or None)
    shown = [(schemas.Adapter.model_validate(one), headline(one.metrics)) for one in found.items]
    return page.show("models.html", models=shown, has_more=found.has_more, after=after, stage=stage, stages=STAGES)


@router.get("/{adapter_id}")
def model_page(page: PageDep, adapter_id: str) -> HTMLResponse:
    """Show an adapter: stage, scores, lineage, exports, and what may be done with it with what that would change."""
    platform, tenant = page.platform, page.tenant
    now = impact.standing(platform, tenant, adapter_id)
    (found,) = lineage.of_adapter(platform, tenant, now.adapter.id)["adapters"]
    layers, clock = lineage_layers(found, now), platform.clock()
    prompt = datasets.example_prompt(platform, tenant, now.adapter.dataset_id)
    title = "Lineage from uploaded files to the names that callers use"
    return page.show(
        "model.html",
        model=schemas.Adapter.model_validate(now.adapter),
        headline=headline(now.adapter.metrics),
        evaluations=evaluations.list_evaluations(platform, tenant, now.adapter.id).items,
        impacts=[impact.impact(now, change, at=clock) for change in impact.possible(now)],
        logical=now.logical,
        layers=layers,
        pictures=(lineage_picture.wide(layers, title=title), lineage_picture.tall(layers, title=title)),
        exports=exports.list_exports(platform, tenant, now.adapter.id),
        forms=EXPORT_FORMS,
        grace_days=DEPRECATION_GRACE.days,
        release=releases.releasability(platform, now.adapter) if now.adapter.stage == Stage.QUARANTINED else None,
        why_not=[finding.sentence for finding in promotions.failed_rules(platform, now.adapter)],
        prompt=prompt or [ExampleMessage(role="user", content="Hello")],
        tried={"left": now.adapter.base_model, "right": now.adapter.name, **_playground_fields(prompt)},
    )


def _playground_fields(prompt: Sequence[ExampleMessage]) -> Mapping[str, str]:
    """Return the fields of the playground that hold `prompt`; without messages that are shortened, or too long for a link."""
    fields = {"system": "system", "user": "message"}
    return {fields[m.role]: m.content for m in prompt if m.is_whole and len(m.content) <= MAX_IN_LINK}


@router.post("/{adapter_id}/exports")
def export(page: PageDep, tenant: Writer, adapter_id: str, form: Annotated[str, Form()] = "adapter") -> Response:
    """Order an export; the page shows its progress."""
    kind, _, precision = form.partition(":")
    exports.request(page.platform, tenant, adapter_id, format=kind, precision=precision or None)
    return see(f"{MODELS}/{adapter_id}#exports")


@router.post("/{adapter_id}/exports/{export_id}/delete")
def delete_export(page: PageDep, tenant: Writer, adapter_id: str, export_id: str) -> Response:
    """Delete an export with its archive, or stop making it."""
    exports.delete(page.platform, tenant, adapter_id, export_id)
    return see(f"{MODELS}/{adapter_id}", "deleted")


@router.post("/{adapter_id}/promote")
def promote(page: PageDep, tenant: Writer, adapter_id: str) -> Response:
    """Promote an adapter to production."""
    promotions.promote(page.platform, tenant, adapter_id)
    return see(f"{MODELS}/{adapter_id}", "promoted")


@router.post("/{adapter_id}/rollback")
def rollback(page: PageDep, tenant: Writer, adapter_id: str) -> Response:
    """Withdraw an adapter in favor of the one before it, whose page follows."""
    done = promotions.rollback(page.platform, tenant, adapter_id)
    return see(f"{MODELS}/{done.serving.id}", "rolled-back")


@router.post("/{adapter_id}/deprecate")
def deprecate(page: PageDep, tenant: Writer, adapter_id: str) -> Response:
    """Stop serving an adapter."""
    promotions.deprecate(page.platform, tenant, adapter_id)
    return see(f"{MODELS}/{adapter_id}", "deprecated")


@router.post("/{adapter_id}/release")
def release(page: PageDep, principal: AdminPrincipal, adapter_id: str, reason: Annotated[str, Form()] = "") -> Response:
    """Serve an adapter that did not pass its gate."""
    releases.release(page.platform, principal.tenant.id, adapter_id, by=principal.id, reason=reason)
    return see(f"{MODELS}/{adapter_id}", "model-released")


@router.post("/{adapter_id}/approve")
def approve(page: PageDep, principal: Approver, adapter_id: str, note: Annotated[str, Form()] = "") -> Response:
    """Approve an adapter that waits for it."""
    promotions.approve(page.platform, principal.tenant.id, adapter_id, by=principal.id, note=note or None)
    return see(f"{MODELS}/{adapter_id}", "approved")


@router.post("/{adapter_id}/reject")
def reject(page: PageDep, principal: Approver, adapter_id: str, note: Annotated[str, Form()] = "") -> Response:
    """Reject an adapter that waits for approval."""
    promotions.reject(page.platform, principal.tenant.id, adapter_id, by=principal.id, note=note or None)
    return see(f"{MODELS}/{adapter_id}", "rejected")
