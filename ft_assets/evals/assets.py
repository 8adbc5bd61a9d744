"""The ``eval_report`` asset: compares the adapter with its base on the same items, with the gate's verdict as an asset check."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from control_plane.evaluations.reports import GATE_RULES, SCORES, Evaluated
from control_plane.platform.context import Platform
from engine.evals import score_table
from ft_assets.evals import step
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource, check, job_metadata, job_step, table

GATE = check("gate", asset="eval_report", description="May the adapter be promoted?")


@dg.asset(partitions_def=JOBS, group_name="evals", code_version="2", deps=["checkpoint", "dataset"], check_specs=[GATE])
def eval_report(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """Scores of base, adapter and last accepted adapter, the check that the adapter is applied, and the verdict."""
    with job_step(context, platform) as (opened, tenant, job_id):
        evaluated = step.evaluate(opened, platform.launcher.open(), tenant, job_id)
    verdict = evaluated.verdict
    return dg.MaterializeResult(
        metadata={**evaluation_metadata(opened, evaluated), **job_metadata(context, opened)},
        check_results=[dg.AssetCheckResult(passed=verdict.passed, check_name="gate", metadata={"reasons": list(verdict.reasons)})],
    )


def evaluation_metadata(platform: Platform, evaluated: Evaluated) -> Mapping[str, Any]:
    """Return the metadata of an evaluation with a report: scores, the gate's rules, advice, and where report and samples are stored."""
    report, tables = evaluated.report, evaluated.tables
    return {
        "scores": dg.MetadataValue.md(score_table(report)),
        "score_table": table(tables.get(SCORES, ())),
        "verdict": dg.MetadataValue.md(evaluated.verdict_markdown),
        "gate_table": table(tables.get(GATE_RULES, ())),
        "advice": dg.MetadataValue.md("\n".join(f"- {a.message}" for a in evaluated.advice) or "none"),
        "adapter_applied": report.adapter_applied,
        "seconds": report.seconds,
        "seconds_by_suite": dg.MetadataValue.json(evaluated.seconds_by_suite),
        "report": dg.MetadataValue.path(platform.objects.uri(evaluated.key)),
        "samples": dg.MetadataValue.path(platform.objects.uri(evaluated.samples_key)),
        **{k.replace("/", "_"): v for k, v in report.metrics.items()},
    }
