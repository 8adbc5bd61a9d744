"""The ``adapter`` asset: the registered, versioned result of a job, with its complete lineage."""

import dagster as dg

from control_plane.service import conclusion, evaluation
from ft_assets.partitions import JOBS, parse
from resources.dagster_platform import PlatformResource, owned_by


@dg.asset(partitions_def=JOBS, group_name="adapters", code_version="1", deps=["eval_report", "checkpoint"])
def adapter(context: dg.AssetExecutionContext, platform: PlatformResource) -> dg.MaterializeResult:
    """Registered as a draft, promoted or quarantined; ends the job."""
    tenant, job_id = parse(context.partition_key)
    opened = platform.get()
    with owned_by(opened, tenant, job_id):
        record = conclusion.conclude(opened, tenant, job_id)
    lineage = ("base_model", "base_digest", "dataset_id", "pack_fingerprint", "spec_sha256", "lock_sha256", "commit", "manifest_sha256")
    return dg.MaterializeResult(
        data_version=dg.DataVersion(record["manifest_sha256"]),
        metadata={
            "name": record["name"],
            "stage": str(record["stage"]),
            "eval_passed": record["eval_passed"],
            **{k: record[k] for k in lineage},
            "cost_usd": evaluation.cost_micros(opened, job_id) / 1e6,
            "files": dg.MetadataValue.path(opened.objects.uri(record["object_prefix"])),
            "record": dg.MetadataValue.url(f"{platform.api_url()}/v1/adapters/{record['id']}"),
        },
    )
