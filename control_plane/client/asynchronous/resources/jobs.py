"""``client.jobs``: fine-tuning jobs from estimate to evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import (
    Checkpoint,
    CreateJob,
    Estimate,
    EvaluationSample,
    Event,
    Job,
    JobComparison,
    JobCost,
    JobEvaluation,
    Json,
    ListOf,
    PreviewRequest,
)
from control_plane.client.wire import at, given

FINAL = frozenset({"succeeded", "failed", "cancelled"})


class AsyncJobs(AsyncResource):
    """Fine-tuning jobs."""

    async def create(self, **body: Unpack[CreateJob]) -> Job:
        """Submits a job under an ``idempotency_key`` (generated if not given): submitted twice, it is one job."""
        key = body.pop("idempotency_key", None)
        return await self._api.create(Job, at("/v1/fine_tuning/jobs"), key=key, json=body)

    async def estimate(self, **body: Unpack[CreateJob]) -> Estimate:
        """Returns the expected duration and cost of a job with this body, without submitting it; see its ``assumptions``."""
        return await self._api.call(Estimate, "POST", at("/v1/fine_tuning/jobs/estimate"), json=body, repeatable=True)

    async def preview(self, **body: Unpack[PreviewRequest]) -> ListOf[Json]:
        """Returns the first examples exactly as a job would train on them: text, token ids, spans with loss, truncated parts."""
        return await self._api.call(ListOf[Json], "POST", at("/v1/fine_tuning/preview"), json=body, repeatable=True)

    def list(
        self,
        *,
        status: str | None = None,
        state: str | None = None,
        model: str | None = None,
        method: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        metadata: Mapping[str, str] | None = None,
        without_metadata: bool = False,
        limit: int = 20,
        after: str | None = None,
    ) -> AsyncPages[Job]:
        """Lists jobs, newest first, `limit` per page.

        `status` is OpenAI's, `state` the platform's; `metadata` selects jobs with all of its pairs, `without_metadata` those with none of
        them. Times are Unix seconds.
        """
        requested = given(
            status=status,
            state=state,
            model=model,
            method=method,
            created_after=created_after,
            created_before=created_before,
            metadata="null" if without_metadata else None,
            limit=limit,
            after=after,
        )
        pairs = {f"metadata[{name}]": value for name, value in (metadata or {}).items()}
        return self._api.pages(Job, at("/v1/fine_tuning/jobs"), requested | pairs)

    async def retrieve(self, job_id: str) -> Job:
        """Returns one job."""
        return await self._api.call(Job, "GET", at("/v1/fine_tuning/jobs/{job_id}", job_id=job_id))

    async def cancel(self, job_id: str) -> Job:
        """Cancels a job that has not ended; its workload is stopped."""
        return await self._api.call(Job, "POST", at("/v1/fine_tuning/jobs/{job_id}/cancel", job_id=job_id), repeatable=True)

    async def pause(self, job_id: str) -> Job:
        """Releases the GPUs at the next checkpoint."""
        return await self._api.call(Job, "POST", at("/v1/fine_tuning/jobs/{job_id}/pause", job_id=job_id), repeatable=True)

    async def resume(self, job_id: str) -> Job:
        """Queues a paused job again; it continues from its checkpoint."""
        return await self._api.call(Job, "POST", at("/v1/fine_tuning/jobs/{job_id}/resume", job_id=job_id))

    async def wait(self, job_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> Job:
        """Waits until the job has ended and returns it; ``TimeoutError`` after `timeout_s`. Survives a restart of the API."""

        async def look() -> Job:
            return await self.retrieve(job_id)

        return await self._api.wait(look, lambda j: j["status"] in FINAL, what=f"job {job_id}", timeout_s=timeout_s, poll_s=poll_s)

    def events(self, job_id: str, *, limit: int = 100, after: str | None = None) -> AsyncPages[Event]:
        """Lists events so far, newest first; `limit` per page."""
        return self._api.pages(Event, at("/v1/fine_tuning/jobs/{job_id}/events", job_id=job_id), given(limit=limit, after=after))

    def follow(self, job_id: str) -> AsyncIterator[Event]:
        """Yields events as they happen, oldest first, until the job has ended; an interrupted stream resumes."""
        path = at("/v1/fine_tuning/jobs/{job_id}/events", job_id=job_id)
        return self._api.events(Event, path, params=given(stream=True))

    def checkpoints(self, job_id: str, *, limit: int = 100, after: str | None = None) -> AsyncPages[Checkpoint]:
        """Lists committed checkpoints, newest first; `limit` per page."""
        path = at("/v1/fine_tuning/jobs/{job_id}/checkpoints", job_id=job_id)
        return self._api.pages(Checkpoint, path, given(limit=limit, after=after))

    async def logs(self, job_id: str, *, attempt: int | None = None, offset: int = 0) -> str:
        """Returns the training log of an attempt, by default the last one, from byte `offset` on; also while it runs."""
        path = at("/v1/fine_tuning/jobs/{job_id}/logs", job_id=job_id)
        return (await self._api.content(path, params=given(attempt=attempt, offset=offset or None))).decode(errors="replace")

    def follow_logs(self, job_id: str, *, attempt: int | None = None, offset: int = 0) -> AsyncIterator[str]:
        """Yields the log as it is written, until the attempt has ended; an interrupted stream resumes."""
        path = at("/v1/fine_tuning/jobs/{job_id}/logs", job_id=job_id)
        return self._api.growing(path, given(follow=True, attempt=attempt), offset=offset)

    async def cost(self, job_id: str) -> JobCost:
        """Returns the cost of a job, entry by entry; pending refunds; and the cost so far of its running attempt."""
        return await self._api.call(JobCost, "GET", at("/v1/fine_tuning/jobs/{job_id}/cost", job_id=job_id))

    async def metrics(self, job_id: str) -> ListOf[Json]:
        """Returns the metrics of each step, in order."""
        return await self._api.call(ListOf[Json], "GET", at("/v1/fine_tuning/jobs/{job_id}/metrics", job_id=job_id))

    async def metrics_csv(self, job_id: str) -> bytes:
        """Returns the same as CSV: one row per step."""
        return await self._api.content(at("/v1/fine_tuning/jobs/{job_id}/metrics.csv", job_id=job_id))

    async def compare(self, job_ids: Sequence[str]) -> JobComparison:
        """Compares 2 to 100 jobs side by side."""
        return await self._api.call(JobComparison, "GET", at("/v1/fine_tuning/jobs/compare"), params={"ids": ",".join(job_ids)})

    async def evaluation(self, job_id: str) -> JobEvaluation:
        """Returns the evaluation of a job's adapter: ``report``, ``verdict``, ``advice``, and ``next_run``, the advised hyperparameters."""
        return await self._api.call(JobEvaluation, "GET", at("/v1/fine_tuning/jobs/{job_id}/evaluation", job_id=job_id))

    async def evaluation_page(self, job_id: str) -> bytes:
        """Returns the evaluation as a self-contained HTML page."""
        return await self._api.content(at("/v1/fine_tuning/jobs/{job_id}/evaluation", job_id=job_id), accept="text/html")

    def evaluation_samples(
        self, job_id: str, *, suite: str | None = None, only: str | None = None, limit: int = 100, after: str | None = None
    ) -> AsyncPages[EvaluationSample]:
        """Lists every item with the answer of each model; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/fine_tuning/jobs/{job_id}/evaluation/samples", job_id=job_id)
        return self._api.pages(EvaluationSample, path, given(suite=suite, only=only, limit=limit, after=after))
