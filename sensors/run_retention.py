"""Deletes Dagster runs that ended long ago, with their events and the output of their steps; runs daily."""

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import takewhile

import dagster as dg

from control_plane.adapters.stage_changes import jobs_with_live_adapters
from control_plane.platform.context import Platform
from ft_assets.partitions import DATASETS
from ft_assets.platform_resource import PlatformResource
from resources.dagster.dagster_records import delete_run

ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
PAGE = 500
LIMIT_S = 900.0
"""Time limit of a day's deletions; the next day continues. A run takes about 10 ms, and 500 jobs have 1,500 runs a day."""
MAX_DATASET_KEYS = 10_000
"""Partition keys kept, the newest: listing this many takes 0.3 s. Events of older versions stay."""


@dg.op
def delete_old_runs(context: dg.OpExecutionContext, platform: PlatformResource) -> None:
    """Deletes runs that ended more than FT_RUN_DAYS ago, and the oldest of too many partition keys of datasets."""
    until, deleted = time.monotonic() + LIMIT_S, 0
    for run_id in takewhile(lambda _: time.monotonic() < until, old_runs(platform.get(), context.instance)):
        delete_run(context.instance, run_id)
        deleted += 1
    keys = context.instance.get_dynamic_partitions(str(DATASETS.name))[:-MAX_DATASET_KEYS]
    for key in keys:
        context.instance.delete_dynamic_partition(str(DATASETS.name), key)
    context.add_output_metadata({"runs_deleted": deleted, "dataset_keys_deleted": len(keys)})


def old_runs(platform: Platform, instance: dg.DagsterInstance) -> Iterator[str]:
    """Yield runs to delete, oldest first. Successful runs of jobs whose adapter is not archived stay: a run takes with it what it
    materialized."""
    old, last_kept = dg.RunsFilter(statuses=ENDED, updated_before=platform.clock() - timedelta(days=platform.settings.run_days)), None
    while runs := [r.dagster_run for r in instance.get_run_records(old, limit=PAGE, ascending=True, cursor=last_kept)]:
        job_of = {run.run_id: run.tags.get("dagster/partition", "").rpartition(":")[2] for run in runs}
        live = jobs_with_live_adapters(platform, set(job_of.values()))
        for run in runs:
            if run.status is dg.DagsterRunStatus.SUCCESS and job_of[run.run_id] in live:
                last_kept = run.run_id
            else:
                yield run.run_id


@dg.job(executor_def=dg.in_process_executor)
def run_retention() -> None:
    """Delete runs that ended long ago."""
    delete_old_runs()


daily_run_retention = dg.ScheduleDefinition(job=run_retention, cron_schedule="20 3 * * *", default_status=dg.DefaultScheduleStatus.RUNNING)
