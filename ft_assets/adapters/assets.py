"""The ``adapter`` asset: the registered, versioned result of a job, with its complete lineage; and its later evaluations."""

import dagster as dg

from control_plane.adapters import lineage, promotions
from control_plane.attempts import health
from control_plane.evaluations import reports
from ft_assets.adapters import reevaluation_step
from ft_assets.adapters import step as adapter_step
from ft_assets.evals import step as evaluation_step
from ft_assets.evals.assets import evaluation_metadata
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource, canceled_if_stopped, check, checked, job_metadata, job_step, watched
from resources.dagster.run_tags import page_of_asset

COMPLETE = check("lineage_complete", asset="adapter", description="Does every link back to the uploaded files hold?")
SERVABLE = check("servable", asset="adapter", description="Can the inference servers load its files?")


@dg.asset(
    partitions_def=JOBS, group_name="adapters", code_version="1", deps=["eval_report", "checkpoint"], check_specs=[COMPLETE, SERVABLE]
)
def adapter(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """The adapter, registered as a draft, promoted or quarantined; ends the job."""
    with job_step(context, platform) as (opened, tenant, job_id):
        record = adapter_step.conclude(opened, tenant, job_id)
    evaluation_step.track(opened, tenant, job_id)
    health.flush(opened)
    reported = lineage.of_adapter(opened, tenant, record.id)["adapters"][0]
    digests = ("base_model", "base_digest", "dataset_id", "pack_fingerprint", "spec_sha256", "lock_sha256", "commit", "manifest_sha256")
    return dg.MaterializeResult(
        check_results=[
            checked(COMPLETE.name, lambda: lineage.broken_links(opened, tenant, record.id)),
            checked(SERVABLE.name, lambda: promotions.obstacles(opened, tenant, record.id)),
        ],
        data_version=dg.DataVersion(record.manifest_sha256),
        metadata={
            "name": record.name,
            "stage": str(record.stage),
            "eval_passed": record.eval_passed,
            **{k: getattr(record, k) for k in digests},
            "approval": record.approval,
            "file_sha256": reported["uploads"][0]["sha256"],
            "dataset_content_sha256": reported["dataset"]["content_sha256"],
            **({"dataset_ids": list(record.dataset_ids)} if record.dataset_ids else {}),
            "attempts": len(reported["training"]["attempts"]),
            "adapter_files": dg.MetadataValue.json(dict(reported["files"]["files"])),
            "started_from": [parent["adapter"]["name"] for parent in reported["parents"]],
            "trained_on": dg.MetadataValue.url(page_of_asset("dataset", partition=context.partition_key)),
            "files": dg.MetadataValue.path(opened.objects.uri(record.object_prefix)),
            "adapter_id": record.id,
            **job_metadata(context, opened),
        },
    )


class EvaluationOrder(dg.Config):
    """Id of the ordered evaluation."""

    evaluation_id: str


@dg.asset(partitions_def=JOBS, group_name="adapters", code_version="1", deps=["adapter"])
def adapter_evaluation(context: dg.AssetExecutionContext, config: EvaluationOrder, platform: PlatformResource) -> dg.MaterializeResult:
    """A later verdict on the registered adapter: on other bytes of its base, or with other suites."""
    opened = platform.get()
    with watched(context), canceled_if_stopped(context, opened):
        row = reevaluation_step.run(opened, platform.launcher.open(), config.evaluation_id)
    shown = {k: v for k in ("id", "adapter_id", "kind", "base_digest", "state", "outcome", "runs") if (v := getattr(row, k)) is not None}
    found = evaluation_metadata(opened, reports.load(opened, row.report_key)) if row.report_key else {}
    return dg.MaterializeResult(metadata={**shown, **found, "reasons": list(row.reasons or ()), **job_metadata(context, opened)})
