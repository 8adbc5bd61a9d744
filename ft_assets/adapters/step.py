"""Ends an evaluated job: registers its adapter with complete lineage, then promotes it, leaves it for approval, or quarantines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.evaluations import answer_cache
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.reports import Evaluated, load_evaluated
from control_plane.jobs import results
from control_plane.jobs.tables import Job, jobs
from control_plane.jobs.transitions import job_row, locked, record, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.serving import accepted_bases
from core.errors import Conflict
from core.telemetry import spans
from engine.adapters import LORA_ADAPTER, OWN_SERVER, Refusal, Stage, release_step
from engine.evals import EvalConfig
from ft_assets.evals.step import fetch_final


def conclude(platform: Platform, tenant: str, job_id: str) -> Adapter:
    """Registers the adapter with its complete lineage, stores the verdict, promotes it if the job requests that, and ends the job.

    1. Gate failed: the adapter is quarantined and not served until a person releases it; the job fails with ``gate_failed`` and advice. A
       monitored job's verdict blocks only an adapter that is not applied or not servable; other failures are reported (``monitor_failed``).
       An experiment succeeds without an approved model, unless that is not applied or not servable.
    2. Its base was updated during training: its evaluation on the current one is ordered, and a pass continues with 3 or 4
       (:mod:`ft_assets.adapters.reevaluation_step`); the job succeeds.
    3. Approval required: it waits in ``staging`` for approval; the job succeeds.
    4. Else it is promoted, unless ``auto_promote`` is false or it is a whole model, whose server takes GPUs; the job succeeds. For an
       experiment that is not to be promoted, 2 and 3 wait until somebody wants to promote it.
    5. A monitored job's adapter was evaluated with the short suites so far: its evaluation with all of them is ordered.
    6. A job that has already ended keeps its state; registration and verdict are written once.
    """
    evaluated = load_evaluated(platform, tenant, job_id)
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    rules = evaluations.rules_of(job.request, None)
    with spans.span("register") as registering:
        made, refused = adapters.register(
            platform,
            tenant=tenant,
            job_id=job_id,
            directory=fetch_final(platform, job_id),
            report=evaluated.report,
            verdict=evaluated.verdict,
            eval_report_key=evaluated.key,
        )
        registering.set(ft__adapter=made.id, ft__eval_passed=bool(made.eval_passed))
    evaluations.of_job(platform, made, evaluated, rules)
    if job.state in FINAL:
        return made
    if not made.eval_passed:
        _end_quarantined(platform, job_id, made, evaluated, refused, rules)
        return made
    warning = None
    if rules.mode == "monitor":
        about = f"The evaluation of {made.name} before its promotion would have blocked it, but is only monitored:"
        warning = evaluated.alert(rules, code="monitor_failed", about=about, data={"adapter_id": made.id})
    return _end_passed(platform, job, made, rules, warning)


def _end_passed(platform: Platform, job: Job, made: Adapter, rules: EvalConfig, warning: Event | None) -> Adapter:
    requested = made.type == LORA_ADAPTER and job.request.get("auto_promote", True)
    is_shelved = rules.mode == "experiment" and not requested
    update = None
    passed = f"{'Adapter' if made.type == LORA_ADAPTER else 'Model'} {made.name} "
    verdict = "was not gated" if rules.mode == "off" else "passed its gate"
    passed += verdict if warning is None else "failed monitored rules, which do not block it,"
    if is_shelved:
        message = f"{passed} and is in {made.stage}; promote it with `ft promote {made.id}`."
    elif made.type == LORA_ADAPTER and (update := _order_on_present_base(platform, made)) is not None:
        made, then = _held_back(platform, made, rules, promoted=requested)
        message = f"{passed} on the base that it was trained on, which was updated meanwhile; evaluation {update} judges it on the present "
        message += f"one. Once that has passed: {then}."
    elif rules.approval == "required":
        made = _await_approval(platform, made)
        message = f"{passed} and waits in {made.stage} for approval: `ft adapters approve {made.id}`, with a key that may write."
    elif made.type != LORA_ADAPTER:
        then = f"promote it with `ft promote {made.id}`" if platform.servers is not None else OWN_SERVER.detail
        message = f"{passed} and is in {made.stage}; it is not served yet: {then}."
    elif not requested:
        message = f"{passed} and is in {made.stage}."
    elif _is_cancelled(platform, job.id):
        return made
    else:
        made, message = _promoted(platform, made, passed)
    if made.observed == "failed":
        message = f"The adapter {made.id} passed its gate, but no server takes it: {made.detail}"
        error = {"code": "not_servable", "message": message, "param": None}
        _end(platform, job.id, JobState.FAILED, message, warning, adapter_id=made.id, error=error)
        return made
    if rules.mode == "monitor" and made.type == LORA_ADAPTER and update is None:
        evaluations.request(platform, made.tenant_id, made.id, kind=evaluations.MONITOR)
    results.store(platform, made.tenant_id, job.id)
    ended = _end(platform, job.id, JobState.SUCCEEDED, message, warning, adapter_id=made.id, fine_tuned_model=made.name)
    if not ended and made.stage == Stage.PRODUCTION and _is_cancelled(platform, job.id):  # and not ended by another run of this step
        return promotions.deprecate(platform, made.tenant_id, made.id)  # cancelled while it was being promoted: it is not served
    return made


def _promoted(platform: Platform, made: Adapter, passed: str) -> tuple[Adapter, str]:
    """Promotes the adapter and returns it with a message; one that may not be served now keeps its stage, with the reason."""
    try:
        with spans.span("promote", ft__adapter=made.id):
            made = promotions.promote(platform, made.tenant_id, made.id)
    except Conflict as refused:
        if refused.code != "promotion_refused":
            raise
        return made, f"{passed} and is in {made.stage}; it is not served yet: {refused.message}."
    return made, f"{passed} and is in {made.stage}."


def _held_back(platform: Platform, made: Adapter, rules: EvalConfig, *, promoted: bool) -> tuple[Adapter, str]:
    """Returns an adapter that waits for a verdict on its current base, and what follows a pass."""
    if rules.approval == "required":
        return _await_approval(platform, made), f"`ft adapters approve {made.id} --promote`"
    return made, "it is promoted" if promoted else f"`ft promote {made.id}`"


def _await_approval(platform: Platform, made: Adapter) -> Adapter:
    with platform.engine.begin() as conn:
        if adapters.locked(conn, made.tenant_id, made.id).stage == Stage.DRAFT:
            adapters.set_stage(conn, made.id, Stage.STAGING)
            adapters.tell(conn, replace(made, stage=Stage.STAGING), "adapter.approval_pending", platform.clock())
    return adapters.get_adapter(platform, made.tenant_id, made.id)


def _order_on_present_base(platform: Platform, made: Adapter) -> str | None:
    """Returns the id of the evaluation that must pass before the adapter can be served; None if it can be served now."""
    present = platform.models.card(made.base_model).digest
    with platform.engine.connect() as conn:
        if present in accepted_bases.accepted_digests(platform.models, conn, made):
            return None
    ordered = evaluations.request(platform, made.tenant_id, made.id, kind=evaluations.BASE_UPDATE, base_digest=present)
    return ordered.id


def _end_quarantined(
    platform: Platform, job_id: str, made: Adapter, evaluated: Evaluated, refused: Sequence[Refusal], rules: EvalConfig
) -> None:
    failed = evaluated.verdict.failed
    can_be_served = bool(failed) and all(f.rule != "adapter_applied" for f in failed) and not any(r.is_fault for r in refused)
    why = "; ".join(filter(None, [evaluated.verdict.why_not, *(f"{r.code}: {r.detail}" for r in refused)]))
    message = f"Trained, not approved: {why}. {evaluated.advised} The model is kept and not served ({made.id}); "
    message += f"{release_step(made, evaluated.verdict.findings, refused, policy=platform.settings.release_policy)}."
    error = {"code": "gate_failed", "message": message, "param": None}
    with platform.engine.begin() as conn:
        answer_cache.forget(conn, made.tenant_id, job_id)
    if rules.mode == "experiment" and can_be_served:
        results.store(platform, made.tenant_id, job_id)
        _end(platform, job_id, JobState.SUCCEEDED, message, adapter_id=made.id)
    else:
        _end(platform, job_id, JobState.FAILED, message, adapter_id=made.id, error=error)


def _end(platform: Platform, job_id: str, target: JobState, message: str, warning: Event | None = None, **columns: Any) -> bool:
    """Moves the job to its end; returns False if it has ended otherwise meanwhile."""
    with platform.engine.begin() as conn:
        if locked(conn, job_id).state in FINAL:
            return False
        if warning is not None:
            record(conn, job_id, warning, now=platform.clock())
        transition(conn, job_id, target, message=message, now=platform.clock(), **columns)
        return True


def _is_cancelled(platform: Platform, job_id: str) -> bool:
    """Returns whether the job was cancelled meanwhile."""
    with platform.engine.connect() as conn:
        return bool(conn.execute(sa.select(jobs.c.state == JobState.CANCELLED).where(jobs.c.id == job_id)).scalar_one())
