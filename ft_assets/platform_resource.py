"""The platform as a Dagster resource for assets, sensors and ops."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg
from sqlalchemy.exc import SQLAlchemyError

from control_plane.billing import ledger
from control_plane.composition import open_platform
from control_plane.jobs import transitions
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.settings import Settings, load
from core.base_models import CHANGED
from core.errors import Conflict, FtError, IntegrityError, InvalidRequest, NotAdmitted
from core.telemetry import correlation, spans
from ft_assets.partitions import JOBS, parse
from resources.dagster.configured_resources import (
    DatabaseResource,
    FleetResource,
    LauncherResource,
    ObjectStoreResource,
    TrackerResource,
)
from resources.dagster.run_tags import TRACE_TAG, page_of_asset, runs_of_job

BEAT_S = 5.0
VALIDATED = "validated_dataset"
"""Has partitions of its own: `dataset` links to its versions."""
STOPPED = ("attempt_stopped", "evaluation_stopped")
"""Codes of errors that end a run whose work was stopped and did not fail."""
warnings.filterwarnings("ignore", category=dg.PreviewWarning)
# Partitioned checks are in preview in Dagster 1.13; without partitions a check has one status over all tenants.


def configured_resources(settings: Settings) -> dict[str, dg.ConfigurableResource[Any]]:
    """Return the resources that `settings` describe, by their names in the code location."""
    return {
        "database": DatabaseResource(url=_hidden("FT_DATABASE_URL", settings.database_url)),
        **_object_store(settings.object_store),
        "launcher": LauncherResource(directory=str(settings.work_dir / "launcher")),
        "tracker": TrackerResource(uri=_hidden("FT_MLFLOW_URI", settings.mlflow_uri)),
        "fleet": FleetResource(urls=list(settings.inference_urls)),
    }


def _hidden(variable: str, value: str) -> str:
    return dg.EnvVar(variable) if value and os.environ.get(variable) == value else value


def _object_store(url: str) -> dict[str, dg.ConfigurableResource[Any]]:
    if not url.startswith("s3://"):
        return {"objects": ObjectStoreResource(url=url)}
    from resources.dagster.s3_store_resource import S3StoreResource, s3  # boto3 and dagster_aws take 50 MiB, and most stores are local

    client = s3()
    return {"s3": client, "objects": S3StoreResource(url=url, s3=client)}


class PlatformResource(dg.ConfigurableResource[None]):
    """The platform that the environment and these resources describe; without a resource, the environment describes that, too."""

    database: DatabaseResource
    objects: ObjectStoreResource
    launcher: LauncherResource
    tracker: TrackerResource
    fleet: FleetResource

    def __init__(self, **given: Any) -> None:
        described = configured_resources(load()) | given
        super().__init__(**{name: described[name] for name in type(self).model_fields})

    def get(self) -> Platform:
        """Return the platform; the process's connections are shared (:func:`control_plane.composition.open_platform`)."""
        settings = replace(
            load(),
            database_url=self.database.url,
            object_store=self.objects.url,
            mlflow_uri=self.tracker.uri,
            inference_urls=tuple(self.fleet.urls),
        )
        return open_platform(settings, client_options=self.objects.client_options())


def check(name: str, *, asset: str, description: str) -> dg.AssetCheckSpec:
    """Returns a check of a job's asset, with a status per job."""
    return dg.AssetCheckSpec(name, asset=asset, partitions_def=JOBS, description=description)


def checked(name: str, find: Callable[[], Sequence[str]]) -> dg.AssetCheckResult:
    """Returns a check's result: passed if `find` finds nothing. It reports and never stops a job; what cannot be read is a finding."""
    try:
        found = list(find())
    except (FtError, OSError) as error:
        found = [f"{type(error).__name__}: {error}"]
    return dg.AssetCheckResult(check_name=name, passed=not found, severity=dg.AssetCheckSeverity.WARN, metadata={"findings": found})


def job_metadata(step: dg.AssetExecutionContext, platform: Platform) -> dict[str, Any]:
    """Return the metadata of every asset of a job: its cost so far in US dollars, and links to its runs and to the assets above."""
    _, job_id = parse(step.partition_key)
    above = sorted(key.to_user_string() for key in step.assets_def.asset_deps[step.asset_key] if key.to_user_string() != VALIDATED)
    return {
        "cost_usd": ledger.cost_of_job(platform, job_id) / 1e6,
        "runs_of_job": dg.MetadataValue.url(runs_of_job(job_id)),
        **{f"made_from_{name}": dg.MetadataValue.url(page_of_asset(name, partition=step.partition_key)) for name in above},
    }


def table(rows: Sequence[Mapping[str, str | int | float | bool | None]]) -> dg.TableMetadataValue:
    """Return rows with equal keys as a table; without rows, an empty one."""
    return dg.TableMetadataValue([dg.TableRecord(row) for row in rows], None if rows else dg.TableSchema([]))


@contextlib.contextmanager
def job_step(step: dg.AssetExecutionContext, platform: PlatformResource) -> Iterator[tuple[Platform, str, str]]:
    """Opens the platform for the wrapped work on the partition's job, which is logged, timed and kept alive; yields it, tenant and job."""
    opened, (tenant, job_id) = platform.get(), parse(step.partition_key)
    with watched(step), canceled_if_stopped(step, opened), owned_by(opened, tenant, job_id):
        yield opened, tenant, job_id


@contextlib.contextmanager
def canceled_if_stopped(step: dg.AssetExecutionContext, platform: Platform) -> Iterator[None]:
    """Ends the run as canceled, not as failed, if its attempt or its job was paused, preempted or cancelled meanwhile."""
    try:
        yield
    except Exception as error:
        if not _stopped(platform, error, *parse(step.partition_key)):
            raise
        why = error.message if isinstance(error, FtError) else f"the job was stopped meanwhile: {error}"
        step.instance.report_run_canceling(step.run, message=why)
        raise dg.Failure(description=why, allow_retries=False) from error


def _stopped(platform: Platform, error: Exception, tenant: str, job_id: str) -> bool:
    if isinstance(error, Conflict) and error.code in STOPPED:
        return True
    with contextlib.suppress(SQLAlchemyError, FtError), platform.engine.connect() as conn:
        return job_row(conn, tenant, job_id).state in (JobState.PAUSED, JobState.CANCELLED)
    return False


@contextlib.contextmanager
def watched(step: dg.AssetExecutionContext) -> Iterator[None]:
    """Logs the wrapped work with its tenant and job, and times it as a span of the job's trace."""
    tenant, job_id = parse(step.partition_key)
    parent = step.run.tags.get(TRACE_TAG)
    about = correlation.scope(whole_process=True, tenant=tenant, job=job_id)
    span = spans.span(step.asset_key.to_user_string(), parent=parent, kind="consumer", dagster__run_id=step.run.run_id)
    try:
        with about, spans.whole_process(parent), span:
            yield
    finally:
        spans.flush()  # a run's process may end without notice


@contextlib.contextmanager
def owned_by(platform: Platform, tenant: str, job_id: str) -> Iterator[None]:
    """Sends heartbeats for the job while the wrapped work runs, and attributes its failure.

    An invalid request ends the job and the run, and so does a base model whose files are not those the job was promised; neither is
    retried. Any other error ends only the run: the job keeps its state and gets another run, five at most.
    """
    numbers, done = transitions.run_numbers(platform, job_id), threading.Event()
    beats = threading.Thread(target=_beat, args=(platform, job_id, numbers, done), daemon=True, name=f"beat-{job_id}")
    beats.start()
    try:
        yield
    except (InvalidRequest, NotAdmitted, IntegrityError) as error:
        if isinstance(error, IntegrityError) and error.code != CHANGED:
            raise
        if not isinstance(error, NotAdmitted):
            transitions.fail(platform, tenant, job_id, error)
        raise dg.Failure(description=error.message, metadata={"code": error.code}, allow_retries=False) from error
    finally:
        done.set()
        beats.join()


def _beat(platform: Platform, job_id: str, numbers: transitions.RunNumbers, done: threading.Event) -> None:
    """Records a heartbeat every few seconds; retries while the database is unavailable."""
    while not done.wait(BEAT_S):
        with contextlib.suppress(SQLAlchemyError):
            transitions.record_heartbeat(platform, job_id, numbers)
