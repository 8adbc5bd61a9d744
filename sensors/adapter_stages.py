"""Records promotions, rollbacks and deprecations as events of the adapter's asset, so that its page in Dagster tells the present stage."""

import dagster as dg

from control_plane.adapters.stage_changes import stage_changes
from ft_assets.partitions import partition_key
from ft_assets.platform_resource import PlatformResource


@dg.sensor(minimum_interval_seconds=30, default_status=dg.DefaultSensorStatus.RUNNING)
def adapter_stages(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult:
    """Reports each change once, about a minute after it: the cursor is a line of the audit log."""
    changes, position = stage_changes(platform.get(), after=int(context.cursor or 0))
    events = [
        dg.AssetObservation(
            asset_key="adapter",
            partition=partition_key(change.tenant, change.job_id),
            description=f"{change.before} -> {change.after}",
            metadata={"stage": change.after, "stage_before": change.before, "changed_by": change.actor, "adapter_id": change.adapter_id}
            | {"changed_at": dg.MetadataValue.timestamp(change.at)},
        )
        for change in changes
    ]
    return dg.SensorResult(asset_events=events, cursor=str(position), skip_reason=None if events else "no stage has changed")
