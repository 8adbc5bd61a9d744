"""Release of models that did not pass their gate: a person decides that one is served anyway."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.engine import Connection

from control_plane.adapters import promotions, service
from control_plane.adapters.promotions import MAX_NOTE_CHARS, PENDING
from control_plane.adapters.service import get_adapter, locked
from control_plane.adapters.tables import Adapter
from control_plane.jobs import results, transitions
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.serving import node_files
from core.errors import Conflict, InvalidRequest, NotFound
from core.storable_text import printable
from engine.adapters import LORA_ADAPTER, AdapterRecord, Refusal, Releasability, Stage, release_refusals
from engine.adapters import releasability as adapter_releasability


def release(platform: Platform, tenant: str, reference: str, *, by: str, reason: str, by_operator: bool = False) -> Adapter:
    """Release a quarantined adapter, so that it is served although it did not pass its gate; its job succeeds.

    All reasons against it are listed at once (``Conflict``, code ``release_refused``). It goes where it would have gone with a pass: it
    waits for approval, becomes a draft, or is promoted, unless it cannot be served now. Releasing it again changes nothing.
    """
    why = _reason(reason)
    current = get_adapter(platform, tenant, reference)
    if current.released_at is not None and current.stage != Stage.QUARANTINED:
        return current
    findings, policy = promotions.quarantining_verdict(platform, current).findings, platform.settings.release_policy
    files = _file_refusals(platform, current)
    if found := release_refusals(current, findings, files, policy=policy, by_operator=by_operator):
        reasons = "; ".join(f"{r.code}: {r.detail}" for r in found)
        raise Conflict(f"model {current.id} cannot be released: {reasons}", code="release_refused", param="adapter_id")
    with platform.engine.begin() as conn:
        job = transitions.locked(conn, current.job_id, tenant_id=tenant)
        record = locked(conn, tenant, current.id)
        if record.stage != Stage.QUARANTINED:  # released by another call meanwhile
            return get_adapter(platform, tenant, current.id)
        needs_approval = (job.request.get("eval_config") or {}).get("approval") == "required"
        _record_release(platform, conn, record, by=by, why=why, approval=PENDING if needs_approval else record.approval)
        has_failed = job.state == JobState.FAILED and (job.error or {}).get("code") == "gate_failed"
        if has_failed or job.state == JobState.SUCCEEDED:  # an experiment
            message = f"Model {record.name} did not pass its gate and was released by {by}: {why}"
            transitions.succeed_by_release(conn, job, message=message, now=platform.clock(), fine_tuned_model=record.name)
    if has_failed:
        results.store(platform, tenant, job.id)
    return get_adapter(platform, tenant, current.id) if needs_approval else _served(platform, job, current)


def releasability(platform: Platform, record: AdapterRecord) -> Releasability:
    """Return who may release a quarantined adapter, by its verdict and the operator's policy. Its files are read by the release alone."""
    try:
        findings = promotions.quarantining_verdict(platform, record).findings
    except NotFound:
        return Releasability(
            by=None, obstacles=[Refusal(code="gate_failed", detail="the report of its evaluation was deleted; train again")]
        )
    return adapter_releasability(record, findings, (), policy=platform.settings.release_policy)


def _reason(reason: str) -> str:
    if not (why := printable(reason).strip()):
        raise InvalidRequest("reason is empty; say why the model is good enough, for the audit log", code="invalid_reason", param="reason")
    if len(why) > MAX_NOTE_CHARS:
        message = f"reason has {len(why)} characters, at most {MAX_NOTE_CHARS} are kept; shorten it"
        raise InvalidRequest(message, code="invalid_reason", param="reason")
    return why


def _file_refusals(platform: Platform, record: AdapterRecord) -> Sequence[Refusal]:
    """Return what is wrong with its files; a whole model's are compared with its base again, which only its registration has done."""
    if record.type == LORA_ADAPTER:
        return promotions.file_refusals(platform, record)
    return service.unservable(platform, record.base_model, node_files.materialise(platform, record))


def _record_release(platform: Platform, conn: Connection, record: AdapterRecord, *, by: str, why: str, approval: str) -> None:
    now = platform.clock()
    service.set_stage(conn, record.id, Stage.DRAFT, released_by=by, released_at=now, release_reason=why, approval=approval)
    if approval == PENDING:
        service.set_stage(conn, record.id, Stage.STAGING)
    released = locked(conn, record.tenant_id, record.id)
    service.tell(conn, released, "adapter.released", now)
    if approval == PENDING:
        service.tell(conn, released, "adapter.approval_pending", now)


def _served(platform: Platform, job: Job, record: AdapterRecord) -> Adapter:
    """Promote a released adapter if its job asks for that; one that may not be served now stays a draft."""
    if record.type == LORA_ADAPTER and job.request.get("auto_promote", True):
        try:
            return promotions.promote(platform, record.tenant_id, record.id)
        except Conflict as refused:
            if refused.code != "promotion_refused":
                raise
    return get_adapter(platform, record.tenant_id, record.id)
