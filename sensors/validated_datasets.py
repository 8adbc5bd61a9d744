"""Reports validated dataset versions to Dagster: the API and the worker validate uploads, so no run does."""

import dagster as dg

from control_plane.datasets.registrations import RegisteredDataset, registered
from ft_assets.datasets.assets import validated_dataset
from ft_assets.datasets.report.validation_report import DatasetReport
from ft_assets.partitions import DATASETS, partition_key
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def validated_datasets(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult | dg.SkipReason:
    """Reports each version once, about a minute after its validation; the cursor is the last reported one."""
    opened = platform.get()
    found = registered(opened, after=context.cursor)
    if not found:
        return dg.SkipReason("no dataset was validated")
    keys = [partition_key(version.tenant_id, version.id) for version in found]
    return dg.SensorResult(
        asset_events=[_materialization(version, key, api=opened.settings.public_url) for version, key in zip(found, keys, strict=True)],
        dynamic_partitions_requests=[DATASETS.build_add_request(keys)],
        cursor=found[-1].position,
    )


def _materialization(version: RegisteredDataset, key: str, *, api: str) -> dg.AssetMaterialization:
    counted = version.report["stats"].get("tokens")
    shown = {name: getattr(version, name) for name in ("file_id", "filename", "bytes", "sha256", "name", "version", "format")}
    return dg.AssetMaterialization(
        asset_key=validated_dataset.key,
        partition=key,
        tags={"dagster/data_version": version.content_sha256},
        metadata={
            **{name: value for name, value in shown.items() if value is not None},
            "rows": version.row_count,
            **({"tokens": counted["total"]} if counted else {}),
            "findings": [f"{w['code']}: {w['message']}" for w in version.report["warnings"]],
            "report": dg.MetadataValue.md(DatasetReport.from_dict(version.report).to_markdown()),
            "api": dg.MetadataValue.url(f"{api}/v1/datasets/{version.id}/report"),
            "uri": dg.MetadataValue.path(version.uri),
            "validated_at": dg.MetadataValue.timestamp(version.created_at),
        },
    )
