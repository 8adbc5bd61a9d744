"""``/v1/fine_tuning/jobs``: the router is mounted under its other spellings too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import FollowerDep, PlatformDep, Reader, Writer
from control_plane.http.streams import last_seen, server_sent, text_as_it_comes
from control_plane.jobs import job_logs, responses, results, schemas
from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import service as estimates
from control_plane.jobs.idempotency import Attempt, retried_for
from control_plane.jobs.job_filters import JobFilter
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import comparison
from control_plane.jobs.sweeps import schemas as experiments
from control_plane.platform.context import Platform
from control_plane.quotas import service as quotas
from ft_assets.errors import InvalidRequest

METADATA = re.compile(r"metadata\[(.+)\]")

router = APIRouter(tags=["fine_tuning"])


class Csv(PlainTextResponse):
    media_type = "text/csv"


@router.post("")
def create(
    response: Response,
    platform: PlatformDep,
    tenant: Writer,
    body: schemas.CreateJob,
    idempotency_key: Annotated[str | None, Header()] = None,
    x_stainless_retry_count: Annotated[str | None, Header(include_in_schema=False)] = None,
    x_stainless_read_timeout: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> schemas.Job:
    """Submit a job. The same `Idempotency-Key` is the same job; so is an equal body within a minute, unless it says `force`."""
    asked = body.model_dump(exclude_unset=True)
    key = _one_key(idempotency_key, body.idempotency_key)
    since = retried_for(x_stainless_retry_count, x_stainless_read_timeout)
    attempt = Attempt(received_at=platform.clock(), key=key, retried_for=since, twin_meant=bool(body.force))
    submitted = jobs.submit(platform, tenant, JobRequest.from_body(asked), attempt)
    if not (submitted.created or submitted.reused):
        response.headers["idempotent-replayed"] = "true"
    job_id = submitted.job["id"]
    return responses.job(jobs.get(platform, tenant, job_id), reused=submitted.reused, quota=quotas.of_job(platform, tenant, job_id))


@router.post("/estimate")
def estimate(platform: PlatformDep, tenant: Reader, body: schemas.CreateJob) -> schemas.Estimate:
    """What a job with this body would take and cost, without submitting it; where nothing can be said, the code is the reason."""
    request = JobRequest.from_body(body.model_dump(exclude_unset=True))
    return schemas.Estimate(**estimates.estimate(platform, tenant, request))


router.add_api_route("/estimate-price", estimate, methods=["POST"], include_in_schema=False)  # the name that Together gave it


@router.get("")
def list_jobs(
    request: Request,
    platform: PlatformDep,
    tenant: Reader,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(100)] = 20,
    metadata: Annotated[str | None, Query(description="`null`: jobs without any. `metadata[KEY]=VALUE`: those with the pair.")] = None,
    status: Annotated[str | None, Query(description="OpenAI's word: queued, running, succeeded, ...")] = None,
    state: Annotated[str | None, Query(description="Our state: validating, queued, provisioning, evaluating, preempted, ...")] = None,
    model: Annotated[str | None, Query(description="The base model, or the model that came of the job.")] = None,
    method: str | None = None,
    created_after: Annotated[int | None, Query(description="Seconds since 1970, this second included.")] = None,
    created_before: Annotated[int | None, Query(description="Seconds since 1970, this second excluded.")] = None,
) -> http_schemas.ListOf[schemas.Job]:
    """Jobs, newest first, that fit everything that is asked for."""
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


@router.get("/compare")
def compare(
    platform: PlatformDep, tenant: Reader, ids: Annotated[str, Query(description="Ids of 2 to 100 jobs, with commas between.")]
) -> experiments.JobComparison:
    """Jobs side by side: the hyperparameters that differ, losses, scores, cost and duration."""
    return experiments.comparison(comparison.compare(platform, tenant, [i for i in ids.split(",") if i]))


@router.get("/{job_id}")
def retrieve(platform: PlatformDep, tenant: Reader, job_id: str) -> schemas.Job:
    """One job."""
    return responses.job(jobs.get(platform, tenant, job_id))


@router.post("/{job_id}/cancel")
def cancel(platform: PlatformDep, tenant: Writer, job_id: str) -> schemas.Job:
    """End a job that has not ended; its workload is stopped."""
    return responses.job(jobs.cancel(platform, tenant, job_id))


@router.post("/{job_id}/pause")
def pause(platform: PlatformDep, tenant: Writer, job_id: str) -> schemas.Job:
    """Give the GPUs back at the next checkpoint."""
    return responses.job(jobs.pause(platform, tenant, job_id))


@router.post("/{job_id}/resume")
def resume(platform: PlatformDep, tenant: Writer, job_id: str) -> schemas.Job:
    """Queue a paused job again; it goes on from its checkpoint."""
    return responses.job(jobs.resume(platform, tenant, job_id))


@router.get(
    "/{job_id}/events",
    response_model=http_schemas.ListOf[schemas.Event],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
def events(
    platform: PlatformDep,
    tenant: Reader,
    follower: FollowerDep,
    job_id: str,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(1000)] = 20,
    stream: Annotated[bool, Query(description="Server-sent events, oldest first, until the job has ended.")] = False,
    last_event_id: Annotated[str | None, Header(description="Of a stream that broke off: go on behind it.")] = None,
) -> Any:
    """Events, newest first; or all of them, oldest first, as they happen."""
    if not stream:
        found = jobs.list_events(platform, tenant, job_id, after=after, limit=limit)
        return http_schemas.ListOf(data=[responses.event(r) for r in found.items], has_more=found.has_more)
    jobs.get(platform, tenant, job_id)  # a stream that cannot begin is an error, not an empty stream
    return server_sent(lambda since: _events_since(platform, tenant, job_id, since), follower, last_seen(last_event_id))


@router.get("/{job_id}/checkpoints")
def checkpoints(
    platform: PlatformDep,
    tenant: Reader,
    job_id: str,
    after: parameters.After = None,
    limit: Annotated[int, parameters.limit(1000)] = 10,
) -> http_schemas.ListOf[schemas.Checkpoint]:
    """Committed checkpoints, newest first."""
    found = jobs.list_checkpoints(platform, tenant, job_id, after=after, limit=limit)
    return http_schemas.ListOf(data=[responses.checkpoint(r) for r in found.items], has_more=found.has_more)


@router.get("/{job_id}/metrics", response_model=http_schemas.ListOf[dict[str, Any]])
def metrics(platform: PlatformDep, tenant: Reader, job_id: str) -> StreamingResponse:
    """What was measured at each step, in order."""
    body = results.listed(platform, jobs.measured_by(platform, tenant, job_id))
    return StreamingResponse(results.pieces(body), media_type="application/json")


@router.get("/{job_id}/metrics.csv", response_class=Csv)
def metrics_csv(platform: PlatformDep, tenant: Reader, job_id: str) -> StreamingResponse:
    """The same as CSV, one row per step, at any time; a finished job lists it as its result file."""
    body = results.table(platform, jobs.measured_by(platform, tenant, job_id))
    headers = {"content-disposition": f'attachment; filename="{job_id}.csv"'}
    return StreamingResponse(results.pieces(body), media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/{job_id}/logs", response_class=PlainTextResponse)
def read_logs(
    platform: PlatformDep,
    tenant: Reader,
    follower: FollowerDep,
    job_id: str,
    attempt: Annotated[int | None, Query(description="Default: the last one.")] = None,
    offset: Annotated[int, Query(ge=0, description="Bytes that you have: what follows them is answered.")] = 0,
    follow: Annotated[bool, Query(description="Streams what is written as it comes, until the attempt has ended.")] = False,
) -> Response:
    """The training log of an attempt, also while it runs; credentials are taken out.

    The header `x-log-attempt` names the attempt and `x-log-offset` the offset of the first byte: of a log beyond 4 MiB the
    beginning is dropped. A stream that breaks off is taken up with `attempt` and the offset behind its last byte.
    """
    if not follow:
        found = job_logs.read(platform, tenant, job_id, attempt=attempt, offset=offset)
        return PlainTextResponse(found.data, headers=_log_headers(found))
    began = job_logs.since(platform, tenant, job_id, attempt=attempt, offset=offset)
    stream = text_as_it_comes(_Growing(platform, tenant, job_id, attempt=attempt, offset=offset, first=began), follower)
    stream.headers.update(_log_headers(began) if began else {})
    return stream


def _log_headers(found: job_logs.Excerpt) -> dict[str, str]:
    return {"x-log-attempt": str(found.attempt), "x-log-offset": str(found.begins)}


class _Growing:
    """What one reader has not read of a log yet; it stays with the attempt that it began with."""

    def __init__(
        self, platform: Platform, tenant: str, job_id: str, *, attempt: int | None, offset: int, first: job_logs.Excerpt | None
    ) -> None:  # fmt: skip
        self._platform, self._tenant, self._job_id = platform, tenant, job_id
        self._attempt, self._offset, self._found = attempt, offset, first

    def __call__(self) -> tuple[bytes, bool]:
        found = self._found or job_logs.since(self._platform, self._tenant, self._job_id, attempt=self._attempt, offset=self._offset)
        self._found = None
        if found is None:
            return b"", False
        self._attempt, self._offset = found.attempt, found.ends
        return found.data, found.is_over


def _events_since(platform: Platform, tenant: str, job_id: str, since: int) -> tuple[list[tuple[int, str]], bool]:
    rows, final = jobs.events_since(platform, tenant, job_id, since)
    return [(row["seq"], responses.event(row).model_dump_json()) for row in rows], final


def _one_key(header: str | None, field: str | None) -> str | None:
    if header is not None and field is not None and header != field:
        raise InvalidRequest(
            f"Idempotency-Key {header[:80]!r} and idempotency_key {field[:80]!r} differ; send one of them", param="idempotency_key"
        )
    return field if header is None else header


def _metadata_filter(request: Request, bare: str | None) -> Mapping[str, str]:
    if bare not in (None, "null"):
        raise InvalidRequest(f"metadata {bare[:80]!r} is no filter; write metadata[KEY]=VALUE, or metadata=null", param="metadata")
    return {m[1]: value for name, value in request.query_params.multi_items() if (m := METADATA.fullmatch(name))}
