"""``/v1/fine_tuning/jobs``; the router is also mounted under the alternative spellings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import FollowerDep, PlatformDep, Reader, Writer
from control_plane.http.streams import last_seen, server_sent, text_as_it_comes
from control_plane.http.turns import Download
from control_plane.jobs import job_logs, responses, results, schemas
from control_plane.jobs import service as jobs
from control_plane.jobs.duplicate_requests import Attempt, retried_for
from control_plane.jobs.estimates.routes import estimate
from control_plane.jobs.job_filters import JobFilter
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import comparison
from control_plane.jobs.sweeps import schemas as experiments
from control_plane.platform.context import Platform
from control_plane.platform.transfer import in_pieces
from control_plane.quotas import service as quotas
from core.errors import InvalidRequest

METADATA = re.compile(r"metadata\[(.+)\]")

router = APIRouter(tags=["fine_tuning"])


class Csv(PlainTextResponse):
    media_type = "text/csv"


@router.post("", summary="Create a fine-tuning job")
def create(
    response: Response,
    platform: PlatformDep,
    tenant: Writer,
    body: schemas.CreateJob,
    idempotency_key: parameters.IdempotencyKey = None,
    x_stainless_retry_count: parameters.RetryHeader = None,
    x_stainless_read_timeout: parameters.RetryHeader = None,
) -> schemas.Job:
    """Submit a fine-tuning job. It is validated, queued, trained, evaluated and, if it passes, promoted.

    A request with the same `Idempotency-Key` returns the existing job, and so does an identical body within 60 seconds unless it sets
    `force`. If an earlier job of yours already trained the same thing, that job is returned with `reused` set. A response that repeats an
    earlier one carries the header `idempotent-replayed: true`.
    """
    requested = body.model_dump(exclude_unset=True)
    key = _one_key(idempotency_key, body.idempotency_key)
    since = retried_for(x_stainless_retry_count, x_stainless_read_timeout)
    attempt = Attempt(received_at=platform.clock(), key=key, retried_for=since, twin_meant=bool(body.force))
    submitted = jobs.submit(platform, tenant, JobRequest.from_body(requested), attempt)
    if not (submitted.created or submitted.reused):
        response.headers["idempotent-replayed"] = "true"
    job_id = submitted.job.id
    return responses.job(jobs.get(platform, tenant, job_id), reused=submitted.reused, quota=quotas.of_job(platform, tenant, job_id))


router.add_api_route("/estimate", estimate, methods=["POST"], summary="Estimate a fine-tuning job")
router.add_api_route("/estimate-price", estimate, methods=["POST"], include_in_schema=False)  # Together's name for it


@router.get("", summary="List fine-tuning jobs")
def list_jobs(
    request: Request,
    platform: PlatformDep,
    tenant: Reader,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
    metadata: Annotated[
        str | None,
        Query(description="Return only jobs with a pair (`metadata[KEY]=VALUE`), or only jobs without metadata (`metadata=null`)."),
    ] = None,
    status: Annotated[
        str | None, Query(description="Return only jobs with this `status`, such as `queued`, `running` or `succeeded`.")
    ] = None,
    state: Annotated[
        str | None, Query(description="Return only jobs in this `state`, such as `queued`, `evaluating` or `preempted`.")
    ] = None,
    model: Annotated[
        str | None, Query(description="Return only jobs with this base model, or the job that produced this fine-tuned model.")
    ] = None,
    method: Annotated[str | None, Query(description="Return only jobs with this training method, such as `sft`, `dpo` or `cpt`.")] = None,
    created_after: Annotated[int | None, Query(description="Return only jobs created at this Unix time in seconds or later.")] = None,
    created_before: Annotated[int | None, Query(description="Return only jobs created before this Unix time in seconds.")] = None,
) -> http_schemas.ListOf[schemas.Job]:
    """List your fine-tuning jobs, newest first. Filters are combined: a job must match all of them."""
    narrowed = JobFilter(
        metadata=_metadata_filter(request, metadata),
        without_metadata=metadata == "null",
        status=status,
        state=state,
        model=model,
        method=method,
        created_after=created_after,
        created_before=created_before,
    )
    found = jobs.list_jobs(platform, tenant, after=after, limit=limit, narrowed=narrowed)
    return http_schemas.ListOf(data=[responses.job(v) for v in found.items], has_more=found.has_more)


@router.get("/compare", summary="Compare fine-tuning jobs")
def compare(
    platform: PlatformDep, tenant: Reader, ids: Annotated[str, Query(description="Ids of 2 to 100 jobs, separated by commas.")]
) -> experiments.JobComparison:
    """Compare jobs side by side: the hyperparameters that differ, losses, scores, cost and duration."""
    return comparison.compare(platform, tenant, [i for i in ids.split(",") if i])


@router.get("/{job_id}", summary="Retrieve a fine-tuning job")
def retrieve(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> schemas.Job:
    """Return a fine-tuning job with its progress, its place in the queue and its cost."""
    return responses.job(jobs.get(platform, tenant, job_id))


@router.post("/{job_id}/cancel", summary="Cancel a fine-tuning job")
def cancel(platform: PlatformDep, tenant: Writer, job_id: parameters.JobId) -> schemas.Job:
    """Cancel a job and stop its training. Cancelling a job again changes nothing; one that succeeded or failed is refused."""
    return responses.job(jobs.cancel(platform, tenant, job_id))


@router.post("/{job_id}/pause", summary="Pause a fine-tuning job")
def pause(platform: PlatformDep, tenant: Writer, job_id: parameters.JobId) -> schemas.Job:
    """Pause a job: it saves a checkpoint and releases its GPUs. A job that is still queued just leaves the queue."""
    return responses.job(jobs.pause(platform, tenant, job_id))


@router.post("/{job_id}/resume", summary="Resume a fine-tuning job")
def resume(platform: PlatformDep, tenant: Writer, job_id: parameters.JobId) -> schemas.Job:
    """Queue a paused job again. It continues from its last checkpoint."""
    return responses.job(jobs.resume(platform, tenant, job_id))


@router.get(
    "/{job_id}/events",
    summary="List or stream the events of a job",
    response_model=http_schemas.ListOf[schemas.Event],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
def events(
    platform: PlatformDep,
    tenant: Reader,
    follower: FollowerDep,
    job_id: parameters.JobId,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(1000)] = 20,
    stream: Annotated[
        bool,
        Query(description="Stream all events as server-sent events, oldest first, until the job ends. `after` and `limit` are ignored."),
    ] = False,
    last_event_id: Annotated[
        str | None, Header(description="Id of the last event received from a broken stream, to continue after it. Used only with `stream`.")
    ] = None,
) -> Any:
    """List the events of a job, newest first, or stream them as server-sent events, oldest first, until the job ends.

    A stream ends with `data: [DONE]`. To continue a broken stream, send the last `id` as header `Last-Event-ID`.
    """
    if not stream:
        found = jobs.list_events(platform, tenant, job_id, after=after, limit=limit)
        return http_schemas.ListOf(data=[schemas.Event.of(e) for e in found.items], has_more=found.has_more)
    jobs.get(platform, tenant, job_id)  # fail before the stream starts, not with an empty stream
    return server_sent(lambda since: _events_since(platform, tenant, job_id, since), follower, last_seen(last_event_id), subject=job_id)


@router.get("/{job_id}/checkpoints", summary="List the checkpoints of a job")
def checkpoints(
    platform: PlatformDep,
    tenant: Reader,
    job_id: parameters.JobId,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(1000)] = 10,
) -> http_schemas.ListOf[schemas.Checkpoint]:
    """List the checkpoints of a job that are kept, newest first."""
    found = jobs.list_checkpoints(platform, tenant, job_id, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.checkpoint(r) for r in found.items], has_more=found.has_more)


@router.get("/{job_id}/metrics", summary="List the metrics of a job", response_model=http_schemas.ObjectList)
def metrics(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> Download:
    """List the metrics of every step, in the order they were reported."""
    body = results.listed(platform, jobs.measured_by(platform, tenant, job_id))
    return Download(in_pieces(body), media_type="application/json")


@router.get("/{job_id}/metrics.csv", summary="Download the metrics of a job as CSV", response_class=Csv)
def metrics_csv(platform: PlatformDep, tenant: Reader, job_id: parameters.JobId) -> Download:
    """Download the metrics of a job as CSV, one row per step. Available at any time; once the job succeeded it is also a result file."""
    body = results.table(platform, jobs.measured_by(platform, tenant, job_id))
    headers = {"content-disposition": f'attachment; filename="{job_id}.csv"'}
    return Download(in_pieces(body), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/{job_id}/logs", summary="Read the training log of a job", response_class=PlainTextResponse)
def read_logs(
    platform: PlatformDep,
    tenant: Reader,
    follower: FollowerDep,
    job_id: parameters.JobId,
    attempt: Annotated[int | None, Query(description="Number of the training attempt. Default: the last one.")] = None,
    offset: Annotated[int, Query(ge=0, description="Bytes of the log to skip, such as those already received.")] = 0,
    follow: Annotated[bool, Query(description="Stream the log as it is written, until the attempt ends.")] = False,
) -> Response:
    """Return the training log of an attempt, also while it runs. Credentials are removed.

    The header `x-log-attempt` is the number of the attempt and `x-log-offset` the offset of the first byte returned: the beginning of a log
    over 4 MiB is dropped. To continue a broken stream, send `attempt` and the offset after the last byte received.
    """
    if not follow:
        found = job_logs.read(platform, tenant, job_id, attempt=attempt, offset=offset)
        return PlainTextResponse(found.data, headers=_log_headers(found))
    began = job_logs.since(platform, tenant, job_id, attempt=attempt, offset=offset)
    stream = text_as_it_comes(_growing(platform, tenant, job_id, attempt, offset, began), follower)
    stream.headers.update(_log_headers(began) if began else {})
    return stream


def _log_headers(found: job_logs.Excerpt) -> dict[str, str]:
    return {"x-log-attempt": str(found.attempt), "x-log-offset": str(found.begins)}


def _growing(
    platform: Platform, tenant: str, job_id: str, attempt: int | None, offset: int, first: job_logs.Excerpt | None
) -> Callable[[], tuple[bytes, bool]]:
    """Return a function that returns what one reader has not read of a log yet; it stays with the attempt that it started with."""

    def read() -> tuple[bytes, bool]:
        nonlocal attempt, offset, first
        found, first = first or job_logs.since(platform, tenant, job_id, attempt=attempt, offset=offset), None
        if found is None:
            return b"", False
        attempt, offset = found.attempt, found.ends
        return found.data, found.is_over

    return read


def _events_since(platform: Platform, tenant: str, job_id: str, since: int) -> tuple[list[tuple[int, str]], bool]:
    found, final = jobs.events_since(platform, tenant, job_id, since)
    return [(event.seq, schemas.Event.of(event).model_dump_json()) for event in found], final


def _one_key(header: str | None, field: str | None) -> str | None:
    if header is not None and field is not None and header != field:
        raise InvalidRequest(
            f"Idempotency-Key {header[:80]!r} and idempotency_key {field[:80]!r} differ; send one of them", param="idempotency_key"
        )
    return field if header is None else header


def _metadata_filter(request: Request, bare: str | None) -> Mapping[str, str]:
    if bare not in (None, "null"):
        raise InvalidRequest(f"metadata {bare[:80]!r} is not a filter; write metadata[KEY]=VALUE, or metadata=null", param="metadata")
    return {m[1]: value for name, value in request.query_params.multi_items() if (m := METADATA.fullmatch(name))}
