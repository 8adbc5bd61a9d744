"""From a trained adapter to a verdict and a registered record."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.jobs import JobState
from control_plane.protocols import Launcher, Workload, WorkloadPhase
from control_plane.service import base_models
from control_plane.service.packing import validation_rows
from control_plane.service.platform import Platform
from control_plane.service.preparation import job_row
from control_plane.service.training import fetch_pack, job_dir
from control_plane.service.transfer import download
from control_plane.tables import checkpoints, eval_scores, job_events, jobs, ledger_entries
from ft_assets import layout
from ft_assets.errors import Conflict, FtError
from ft_assets.evals import advice, config, gates, report, suites
from ft_assets.evals.gates import Verdict
from ft_assets.evals.report import EvalReport
from ft_assets.evals.run_file import EvalRun, read_result
from ft_assets.training import methods
from ft_assets.training.checkpoints import manifest_digest, verify

POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    report: EvalReport
    verdict: Verdict
    advice: tuple[str, ...]
    """What to change in the next run; read from the curves."""
    key: str
    """Object key of the stored report."""

    def to_dict(self) -> dict[str, Any]:
        return {"report": self.report.to_dict(), "verdict": self.verdict.to_dict(), "advice": list(self.advice)}


def evaluate(platform: Platform, launcher: Launcher, tenant: str, job_id: str, *, run_name: str) -> Evaluated:
    """Judge the job's adapter next to its base on the same items; the report is stored and returned. May be run again."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    adapter_dir = fetch_final(platform, job_id)
    eval_config = config.parse((job.request or {}).get("eval_config"))
    out_dir = job_dir(platform, job_id) / "evals" / run_name
    shutil.rmtree(out_dir, ignore_errors=True)
    items = suites.holdout_items(validation_rows(platform, tenant, job), limit=eval_config.max_items)
    run = _run_file(platform, tenant, job, adapter_dir, out_dir, items, eval_config)
    result = _run(platform, launcher, job_id, run, run_name)
    _remember_base(platform, job.base_digest, result)
    built = report.build(
        result,
        items,
        method=methods.get(job.method),
        base_model=job.model,
        base_digest=job.base_digest,
        adapter_manifest_sha256=manifest_digest(adapter_dir),
    )
    evaluated = Evaluated(
        report=built,
        verdict=gates.judge(built, eval_config),
        advice=tuple(a.message for a in advice.advise(metric_lines(platform, job_id))),
        key=f"{layout.eval_prefix(tenant, job_id)}/report.json",
    )
    platform.objects.put_bytes(evaluated.key, json.dumps(evaluated.to_dict()).encode())
    return evaluated


def fetch_final(platform: Platform, job_id: str) -> Path:
    """The job's finished adapter on this machine, verified against its manifest."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.final)).first()
    if row is None:
        raise Conflict(f"job {job_id} has no finished adapter to evaluate; wait until its training has succeeded")
    target = job_dir(platform, job_id) / "final"
    if not (target / "manifest.json").exists() or manifest_digest(target) != row.manifest_sha256:
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, row.object_prefix, target, last="manifest.json")
    verify(target)
    return target


def _run_file(
    platform: Platform,
    tenant: str,
    job: sa.Row[Any],
    adapter_dir: Path,
    out_dir: Path,
    items: list[suites.Item],
    eval_config: config.EvalConfig,
) -> EvalRun:
    _, model_dir = base_models.for_job(platform, job.model, job.base_digest, fresh=True)
    out_dir.mkdir(parents=True)
    suites.write_items(items, out_dir / "holdout.jsonl")
    values: dict[str, Any] = {
        "base_model_dir": model_dir,
        "adapter_dir": adapter_dir,
        "holdout": out_dir / "holdout.jsonl",
        "validation_pack_dir": fetch_pack(platform, tenant, job.pack_fingerprint),
        "max_new_tokens": eval_config.max_new_tokens,
        "max_items": eval_config.max_items,
        "out_dir": out_dir,
    }
    run = EvalRun(**values)
    query = sa.select(eval_scores.c.scores).where(
        eval_scores.c.subject_digest == job.base_digest, eval_scores.c.suite_digest == run.suite_digest()
    )
    with platform.engine.connect() as conn:
        cached = conn.execute(query).scalar_one_or_none()
    return EvalRun(**values, base_scores=cached) if cached else run


def _run(platform: Platform, launcher: Launcher, job_id: str, run: EvalRun, run_name: str) -> Mapping[str, Any]:
    run_file = run.out_dir / "run.json"
    run.write(run_file)
    workload = Workload(name=f"{job_id}-e-{run_name}", module="ft_assets.evals.runner", run_file=run_file, work_dir=run.out_dir)
    launcher.start_or_adopt(workload)
    try:
        while (status := launcher.status(workload.name)).phase in (WorkloadPhase.PENDING, WorkloadPhase.RUNNING):
            if is_cancelled(platform, job_id):
                break
            time.sleep(POLL_S)
    finally:
        status = launcher.stop(workload.name, grace_s=5.0)  # ended already, unless this step is being ended too
    if status.exit_code != 0:
        log = launcher.read_log(workload.name)[-2000:].decode(errors="replace")
        raise FtError(
            f"the evaluation of {job_id} ended with exit code {status.exit_code}; end of its log:\n{log}", code="evaluation_failed"
        )
    return read_result(run.out_dir)


def is_cancelled(platform: Platform, job_id: str) -> bool:
    """Whether somebody cancelled the job meanwhile."""
    with platform.engine.connect() as conn:
        return bool(conn.execute(sa.select(jobs.c.state == JobState.CANCELLED).where(jobs.c.id == job_id)).scalar_one())


def _remember_base(platform: Platform, base_digest: str, result: Mapping[str, Any]) -> None:
    """Cache the base's answers: the next job with the same base and items does not ask the base again."""
    if result.get("base") is None:
        return
    values = {
        "subject_digest": base_digest,
        "suite_digest": result["suite_digest"],
        "scores": result["base"],
        "created_at": platform.clock(),
    }
    with platform.engine.begin() as conn:
        conn.execute(insert(eval_scores).values(values).on_conflict_do_nothing())


def metric_lines(platform: Platform, job_id: str) -> list[dict[str, Any]]:
    """The job's curve as in ``metrics.jsonl``, from its events; of a step that was trained twice, the last."""
    query = sa.select(job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.type == "metrics").order_by(job_events.c.seq)
    with platform.engine.connect() as conn:
        found = [row.data for row in conn.execute(query)]
    lines = {}
    for data in found:
        kind = "eval_loss" if "valid_loss" in data else "loss"
        renamed = {{"train_loss": "loss", "valid_loss": "eval_loss"}.get(k, k): v for k, v in data.items()}
        lines[(kind, data["step"])] = renamed
    return sorted(lines.values(), key=lambda m: (m["step"], "eval_loss" in m))


def load_evaluated(platform: Platform, tenant: str, job_id: str) -> Evaluated:
    """The stored report and verdict of the job's last evaluation."""
    key = f"{layout.eval_prefix(tenant, job_id)}/report.json"
    body = json.loads(platform.objects.get_bytes(key))
    verdict = body["verdict"]
    return Evaluated(
        report=EvalReport.from_dict(body["report"]),
        verdict=Verdict(outcome=verdict["outcome"], findings=tuple(gates.Finding(**f) for f in verdict["findings"])),
        advice=tuple(body.get("advice", ())),
        key=key,
    )


def cost_micros(platform: Platform, job_id: str) -> int:
    """What the job owes so far."""
    query = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0)).where(ledger_entries.c.job_id == job_id)
    with platform.engine.connect() as conn:
        return int(conn.execute(query).scalar_one())
