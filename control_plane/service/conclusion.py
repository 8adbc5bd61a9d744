"""How an evaluated job ends: its adapter registered with its complete lineage, promoted or kept in quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control_plane.jobs import FINAL, JobState
from control_plane.service import adapters, promotions, results
from control_plane.service.evaluation import Evaluated, fetch_final, is_cancelled, load_evaluated
from control_plane.service.platform import Platform
from control_plane.service.preparation import job_row
from control_plane.service.transition import locked, transition
from ft_assets.adapters.record import LORA


def conclude(platform: Platform, tenant: str, job_id: str) -> Mapping[str, Any]:
    """Register the adapter with its complete lineage, promote it if the job asks for that, and end the job.

    1. Gate passed: a draft is registered and, unless ``auto_promote`` is false or it is a whole model, promoted; the job succeeds.
    2. Gate failed: the adapter is kept in quarantine and not served; the job fails with ``gate_failed`` and advice.
    3. A job that has ended already keeps its end; registration is idempotent.
    """
    evaluated = load_evaluated(platform, tenant, job_id)
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    record = adapters.register(
        platform,
        tenant=tenant,
        job_id=job_id,
        directory=fetch_final(platform, job_id),
        report=evaluated.report,
        verdict=evaluated.verdict,
        eval_report_key=evaluated.key,
    )
    if JobState(job.state) in FINAL:
        return record
    if not record["eval_passed"]:
        _end_quarantined(platform, job_id, record, evaluated)
        return record
    if record["type"] == LORA and (job.request or {}).get("auto_promote", True):
        if is_cancelled(platform, job_id):
            return record
        record = promotions.promote(platform, tenant, record["id"])
    if record.get("observed") == "failed":
        message = f"The adapter {record['id']} passed its gate, but no server takes it: {record['detail']}"
        error = {"code": "not_servable", "message": message, "param": None}
        _end(platform, job_id, JobState.FAILED, message, adapter_id=record["id"], error=error)
        return record
    results.store(platform, tenant, job_id)
    message = f"Adapter {record['name']} passed its gate and is in {record['stage']}."
    if record["type"] != LORA:
        message = f"Model {record['name']} passed its gate and is registered; it is not served: {record['detail']}."
    ended = _end(platform, job_id, JobState.SUCCEEDED, message, adapter_id=record["id"], fine_tuned_model=record["name"])
    if not ended and record["stage"] == "production":
        return promotions.deprecate(platform, tenant, record["id"])  # cancelled while it was being promoted: it is not served
    return record


def _end_quarantined(platform: Platform, job_id: str, record: Mapping[str, Any], evaluated: Evaluated) -> None:
    failed = [f"{f.code}: {f.detail}" for f in evaluated.verdict.findings if f.blocking and not f.passed]
    why = "; ".join([*failed, *record.get("refusals", ())])
    advised = " ".join(evaluated.advice) or "Look at the eval report's samples."
    message = f"The adapter did not pass its gate and is kept in quarantine ({record['id']}). {why}. {advised}"
    _end(
        platform,
        job_id,
        JobState.FAILED,
        message,
        adapter_id=record["id"],
        error={"code": "gate_failed", "message": message, "param": None},
    )


def _end(platform: Platform, job_id: str, target: JobState, message: str, **columns: Any) -> bool:
    """Move the job to its end; False when it has ended otherwise meanwhile."""
    with platform.engine.begin() as conn:
        if JobState(locked(conn, job_id)["state"]) in FINAL:
            return False
        transition(conn, job_id, target, message=message, now=platform.clock(), **columns)
        return True
