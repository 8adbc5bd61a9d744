"""The ``eval_report`` asset: the adapter next to its base on the same items, and the gate's verdict as an asset check."""

import warnings

import dagster as dg

from control_plane.service import evaluation
from ft_assets.evals.report import markdown_table
from ft_assets.partitions import JOBS, parse
from resources.dagster_platform import PlatformResource, owned_by

warnings.filterwarnings("ignore", category=dg.PreviewWarning)
# A partitioned check is a preview in Dagster 1.13; without it there is one status over all tenants.
GATE = dg.AssetCheckSpec("gate", asset="eval_report", partitions_def=JOBS, description="May the adapter be promoted?")


@dg.asset(partitions_def=JOBS, group_name="evals", code_version="1", deps=["checkpoint", "dataset"], check_specs=[GATE], pool="evaluate")
def eval_report(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """Scores of base and adapter, the proof that the adapter is applied, and the verdict."""
    tenant, job_id = parse(context.partition_key)
    opened = platform.get()
    with owned_by(opened, tenant, job_id):
        evaluated = evaluation.evaluate(opened, platform.launcher(), tenant, job_id, run_name=context.run_id[:8])
    verdict = evaluated.verdict
    findings = "\n".join(f"- {'ok' if f.passed else 'FAILED'} **{f.rule}** ({f.code}): {f.detail}" for f in verdict.findings)
    return dg.MaterializeResult(
        metadata={
            "scores": dg.MetadataValue.md(markdown_table(evaluated.report)),
            "verdict": dg.MetadataValue.md(f"**{verdict.outcome}**\n\n{findings}"),
            "advice": dg.MetadataValue.md("\n".join(f"- {a}" for a in evaluated.advice) or "none"),
            "adapter_applied": evaluated.report.adapter_applied,
            "seconds": evaluated.report.seconds,
            "report": dg.MetadataValue.path(opened.objects.uri(evaluated.key)),
            **{k.replace("/", "_"): v for k, v in evaluated.report.metrics.items()},
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="gate", passed=verdict.passed, severity=dg.AssetCheckSeverity.ERROR, metadata={"reasons": list(verdict.reasons)}
            )
        ],
    )
