"""Carries out one ordered evaluation: evaluates the registered files of an adapter on the named base, and records the outcome.

A failed attempt leaves the order for the next one, three in all. The tenant is notified of a failed verdict in the adapter's job. An
adapter that waited for a verdict on its updated base is promoted after a pass, if its job requested that.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import adapters as adapters_table
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.evaluation_workload import StoredWeights
from control_plane.evaluations.reports import Evaluated
from control_plane.evaluations.tables import Evaluation
from control_plane.evaluations.tables import evaluations as evaluations_table
from control_plane.jobs.tables import Job, job_events
from control_plane.jobs.transitions import job_row
from control_plane.jobs.transitions import record as write_event
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event, Level
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher
from control_plane.platform.records import many
from core import layout
from core.errors import Conflict, FtError
from engine.adapters import AdapterRecord, Stage
from engine.evals import PASSED, EvalConfig
from ft_assets.evals import step
from ft_assets.evals.step import Judged

PASSED_EVENT = "reevaluation_passed"
SETTLED, LOOKED_BACK = timedelta(minutes=1), timedelta(days=1)
"""A live run continues within seconds; a promotion that was not continued within a day is left to a person."""
UPDATED = (
    "does not pass its gate on the bytes that its base model was updated to while it was trained, and is not served: train it again on "
    "those:"
)
ABOUT = {
    evaluations.BASE_UPDATE: "does not pass its gate on other bytes of its base model, to which that is to be updated: train it again on "
    "those, or deprecate it:",
    evaluations.MONITOR: "fails a monitored rule; it stays in service:",
    evaluations.MANUAL: "failed a requested evaluation; serving is unchanged:",
}
UNACCEPTED = (
    "failed a requested evaluation by its job's rules on other bytes of its base model than it was trained on, and is not served on those "
    "until it passes there:"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Subject of the evaluation, read when its run begins."""

    record: AdapterRecord
    job: Job
    base_dir: Path
    rules: EvalConfig


def run(platform: Platform, launcher: Launcher, evaluation_id: str) -> Evaluation:
    """Carries out an evaluation that holds a reservation or has its result, and returns its updated row; one that has ended is returned
    unchanged.

    An error is recorded first and then raised, so that the caller sees it too.
    """
    order = evaluations.find(platform, evaluation_id)
    if order.state == evaluations.RUNNING:
        subjects: list[Subject] = []

        def judged() -> Judged:
            subjects.append(_subject(platform, order))
            return _judged(order, subjects[0])

        evaluated = step.run_evaluation(platform, launcher, order.tenant_id, order.job_id, judged, evaluation_id=order.id)
        _end(platform, order, subjects[0], evaluated)
    ended = evaluations.find(platform, evaluation_id)
    _go_on(platform, ended)  # also if the previous run died between verdict and promotion
    return ended


def _subject(platform: Platform, held: Evaluation) -> Subject:
    record = adapters.get_adapter(platform, held.tenant_id, held.adapter_id)
    if record.stage == Stage.ARCHIVED:
        raise Conflict(f"adapter {record.id} was archived meanwhile and its files are deleted", code="not_reevaluated")
    _check_reads_alike(platform, record, held.base_digest)
    _, base_dir = platform.models.get_local(record.base_model, held.base_digest, fresh=True)
    with platform.engine.connect() as conn:
        job = job_row(conn, record.tenant_id, record.job_id)
    return Subject(record=record, job=job, base_dir=base_dir, rules=evaluations.rules_of(job.request, held.eval_config))


def _check_reads_alike(platform: Platform, record: AdapterRecord, digest: str) -> None:
    """Refuses a base with another tokenizer: held-out rows are kept as tokens, which are meaningless to it."""
    if digest == record.base_digest:
        return
    trained_on, judged_on = (platform.models.get_pinned(record.base_model, d) for d in (record.base_digest, digest))
    if (trained_on.tokenizer_digest, trained_on.template_digest) != (judged_on.tokenizer_digest, judged_on.template_digest):
        raise Conflict(
            f"adapter {record.id} was trained with another tokenizer or template than {digest[:12]} has; train it again there",
            code="not_reevaluated",
        )


def _judged(held: Evaluation, subject: Subject) -> Judged:
    record = subject.record
    return Judged(
        tenant=record.tenant_id,
        job=subject.job,
        adapter=StoredWeights(prefix=record.object_prefix, manifest_sha256=record.manifest_sha256),
        base_model=record.base_model,
        base_dir=subject.base_dir,
        base_digest=held.base_digest,
        eval_config=subject.rules,
        key=layout.evaluation_key(record.tenant_id, record.id, held.id),
        compare=held.kind != evaluations.BASE_UPDATE,  # whether it holds there, not whether it is the best of its lineage
    )


def _end(platform: Platform, held: Evaluation, subject: Subject, evaluated: Evaluated) -> None:
    """Records the verdict and the tenant's notification in one transaction; does nothing for a run that was declared dead."""
    with platform.engine.begin() as conn:
        if not evaluations.finish(conn, held, **evaluations.verdict_columns(evaluated, subject.rules, platform.clock())):
            return
        waited = held.kind == evaluations.BASE_UPDATE and _waits(subject.record)
        if (event := _alert(held, subject, evaluated, waited=waited)) is not None:
            write_event(conn, subject.job.id, event, now=platform.clock())


def _alert(held: Evaluation, subject: Subject, evaluated: Evaluated, *, waited: bool) -> Event | None:
    watched = not subject.rules.blocks
    why = UPDATED if waited else UNACCEPTED if _withholds(held, subject, evaluated) else ABOUT[held.kind]
    if watched and not (waited or held.kind == evaluations.MANUAL):
        why = ABOUT[evaluations.MONITOR]
    about = f"Adapter {subject.record.name} {why}"
    data = {"adapter_id": subject.record.id, "evaluation_id": held.id, "base_digest": held.base_digest}
    return evaluated.alert(subject.rules, code="monitor_failed" if watched else "reevaluation_failed", about=about, data=data)


def _withholds(held: Evaluation, subject: Subject, evaluated: Evaluated) -> bool:
    """Returns whether the evaluation keeps the adapter from other bytes of its base than it was trained on: the newest verdict there by the
    rules of its job counts, even if it was requested."""
    other = held.base_digest != subject.record.base_digest
    return held.kind == evaluations.MANUAL and held.eval_config is None and other and not evaluated.verdict.passed


def _waits(record: AdapterRecord) -> bool:
    """Returns whether the adapter was never served: it waits for the verdict on its updated base, an approval, or its job's request."""
    return record.stage in (Stage.DRAFT, Stage.STAGING) and record.promoted_at is None


def take_up(platform: Platform) -> list[str]:
    """Continues after passes on updated bases whose run died before it did; returns the ids of those evaluations. A second call changes
    nothing."""
    table, seen = evaluations_table, job_events
    now = platform.clock()
    reported = sa.exists().where(
        seen.c.job_id == table.c.job_id, seen.c.code == PASSED_EVENT, seen.c.data["evaluation_id"].astext == table.c.id
    )
    query = (
        sa.select(table)
        .join(adapters_table, adapters_table.c.id == table.c.adapter_id)
        .where(
            table.c.kind == evaluations.BASE_UPDATE, table.c.state == evaluations.SUCCEEDED, table.c.outcome == PASSED,
            table.c.finished_at.between(now - LOOKED_BACK, now - SETTLED), ~reported,
            adapters_table.c.stage.in_((Stage.DRAFT.value, Stage.STAGING.value)), adapters_table.c.promoted_at.is_(None),
        )
    )  # fmt: skip
    with platform.engine.connect() as conn:
        left = many(conn, query, Evaluation)
    for ended in left:
        _go_on(platform, ended)
    return [ended.id for ended in left]


def _go_on(platform: Platform, ended: Evaluation) -> None:
    """After a pass on a base that was updated during training: promotes the adapter if its job requested that, or records the next step.

    If the base was updated again meanwhile, orders the evaluation on the current bytes, once: its verdict stands.
    """
    record = adapters.get_adapter(platform, ended.tenant_id, ended.adapter_id)
    if not (ended.state == evaluations.SUCCEEDED and ended.kind == evaluations.BASE_UPDATE and _waits(record)):
        return
    present = platform.models.card(record.base_model).digest
    if ended.base_digest != present:
        if not _was_ordered(platform, record.id, present):
            evaluations.request(platform, record.tenant_id, record.id, kind=evaluations.BASE_UPDATE, base_digest=present)
    elif ended.outcome == PASSED and record.approval != promotions.REJECTED:
        level, message = _promoted(platform, record)
        data = {"adapter_id": record.id, "evaluation_id": ended.id, "base_digest": present}
        event = Event(code=PASSED_EVENT, level=level, message=message, data=data)
        with platform.engine.begin() as conn:
            write_event(conn, record.job_id, event, now=platform.clock())


def _was_ordered(platform: Platform, adapter_id: str, digest: str) -> bool:
    e = evaluations_table.c
    this = (e.adapter_id == adapter_id) & (e.base_digest == digest) & (e.kind == evaluations.BASE_UPDATE)
    with platform.engine.connect() as conn:
        return bool(conn.scalar(sa.select(sa.exists().where(this))))


def _promoted(platform: Platform, record: AdapterRecord) -> tuple[Level, str]:
    """Promotes it if its job requested that and no approval is pending; returns the tenant's notification."""
    with platform.engine.connect() as conn:
        job = job_row(conn, record.tenant_id, record.job_id)
    text = f"Adapter {record.name} passed its evaluation on the updated base"
    if record.approval == promotions.PENDING:
        return "info", f"{text}; it waits for approval: `ft adapters approve {record.id} --promote`."
    if not job.request.get("auto_promote", True) or job.state == JobState.CANCELLED:
        return "info", f"{text}; its job does not request promotion, so promote it with `ft promote {record.id}`."
    try:
        promotions.promote(platform, record.tenant_id, record.id)
    except FtError as refused:
        return "warn", f"{text}, but is not served yet: {refused.message}. Then: `ft promote {record.id}`."
    return "info", f"{text}, and is promoted."
