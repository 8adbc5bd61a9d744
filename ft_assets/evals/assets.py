"""The ``eval_report`` asset: compares the adapter with its base on the same items, with the gate's verdict as an asset check."""

import dagster as dg

from ft_assets.evals import step
from ft_assets.evals.scoring.report import markdown_table
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource, check, job_step

GATE = check("gate", asset="eval_report", description="May the adapter be promoted?")


@dg.asset(partitions_def=JOBS, group_name="evals", code_version="2", deps=["checkpoint", "dataset"], check_specs=[GATE])
def eval_report(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """Scores of base, adapter and last accepted adapter, the check that the adapter is applied, and the verdict."""
    with job_step(context, platform) as (opened, tenant, job_id):
        evaluated = step.evaluate(opened, platform.launcher.open(), tenant, job_id)
    verdict, report = evaluated.verdict, evaluated.report
    return dg.MaterializeResult(
        metadata={
            "scores": dg.MetadataValue.md(markdown_table(report)),
            "verdict": dg.MetadataValue.md(evaluated.verdict_markdown),
            "advice": dg.MetadataValue.md("\n".join(f"- {a.message}" for a in evaluated.advice) or "none"),
            "adapter_applied": report.adapter_applied,
            "seconds": report.seconds,
            "seconds_by_suite": dg.MetadataValue.json(evaluated.seconds_by_suite),
            "report": dg.MetadataValue.path(opened.objects.uri(evaluated.key)),
            "samples": dg.MetadataValue.path(opened.objects.uri(evaluated.samples_key)),
            **{k.replace("/", "_"): v for k, v in report.metrics.items()},
        },
        check_results=[dg.AssetCheckResult(passed=verdict.passed, check_name="gate", metadata={"reasons": list(verdict.reasons)})],
    )
