"""``client.jobs``: fine-tuning jobs from estimate to evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Page, Pages
from ft_client.record import Record
from ft_client.types import Checkpoint, Estimate, EvaluationSample, Event, Job, JobComparison, JobCost, JobEvaluation
from ft_client.wire import at, given

FINAL = frozenset({"succeeded", "failed", "cancelled"})
STATES = FINAL | {
    "validating", "queued", "provisioning", "running", "evaluating", "pausing", "paused", "preempted", "dead_letter",
}  # fmt: skip
"""What `state` of a job can be; `status` is OpenAI's word."""


class Jobs(Resource):
    """Fine-tuning jobs."""

    def create(self, *, model: str, training_file: str | None = None, **options: Any) -> Job:
        """Submits a job under an ``idempotency_key`` (generated if not given): submitted twice, it is one job.

        Options: `training_files` (a mixture, instead of `training_file`), `validation_file`, `suffix`, `seed`, `metadata`,
        `integrations`, `method`, `hyperparameters`, `eval_config`, `tier`, `spot`, `recipe`, `hardware`, `adapter`, `auto_promote`,
        `warm_start`, `force`.
        """
        key = options.pop("idempotency_key", None)
        body = {"model": model, **given(training_file=training_file), **options}
        return self._api.create(at("/v1/fine_tuning/jobs"), key=key, json=body)

    def estimate(self, *, model: str, training_file: str | None = None, **options: Any) -> Estimate:
        """Returns the expected duration and cost of a job with this body, without submitting it; see its ``assumptions``.

        Options: `training_files` (a mixture, instead of `training_file`), `validation_file`, `suffix`, `seed`, `metadata`,
        `integrations`, `method`, `hyperparameters`, `eval_config`, `tier`, `spot`, `recipe`, `hardware`, `adapter`, `auto_promote`,
        `warm_start`, `force`.
        """
        body = {"model": model, **given(training_file=training_file), **options}
        return self._api.call("POST", at("/v1/fine_tuning/jobs/estimate"), json=body, repeatable=True)

    def preview(self, *, model: str, training_file: str, **options: Any) -> Page[Record]:
        """Returns the first examples exactly as a job would train on them: text, token ids, spans with loss or reasoning, truncated parts.

        Options: `num_examples`, `max_seq_len`.
        """
        return self._api.call(
            "POST", at("/v1/fine_tuning/preview"), json={"model": model, "training_file": training_file, **options}, repeatable=True
        )

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
    ) -> Pages[Job]:
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
        return self._api.pages(at("/v1/fine_tuning/jobs"), requested | pairs)

    def retrieve(self, job_id: str) -> Job:
        """Returns one job."""
        return self._api.call("GET", at("/v1/fine_tuning/jobs/{job_id}", job_id))

    def cancel(self, job_id: str) -> Job:
        """Cancels a job that has not ended; its workload is stopped."""
        return self._api.call("POST", at("/v1/fine_tuning/jobs/{job_id}/cancel", job_id), repeatable=True)

    def pause(self, job_id: str) -> Job:
        """Releases the GPUs at the next checkpoint."""
        return self._api.call("POST", at("/v1/fine_tuning/jobs/{job_id}/pause", job_id), repeatable=True)

    def resume(self, job_id: str) -> Job:
        """Queues a paused job again; it continues from its checkpoint."""
        return self._api.call("POST", at("/v1/fine_tuning/jobs/{job_id}/resume", job_id))

    def wait(self, job_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0, each: Callable[[Job], object] | None = None) -> Job:
        """Waits until the job has ended and returns it; ``TimeoutError`` after `timeout_s`. Survives a restart of the API.

        `each` is called with the job on every look, the last one included.
        """
        return self._api.wait(
            lambda: self.retrieve(job_id),
            lambda j: j["status"] in FINAL,
            what=f"job {job_id}",
            timeout_s=timeout_s,
            poll_s=poll_s,
            each=each,
        )

    def events(self, job_id: str, *, limit: int = 100, after: str | None = None) -> Pages[Event]:
        """Lists events so far, newest first; `limit` per page."""
        return self._api.pages(at("/v1/fine_tuning/jobs/{job_id}/events", job_id), given(limit=limit, after=after))

    def follow(self, job_id: str) -> Iterator[Event]:
        """Yields events as they happen, oldest first, until the job has ended; an interrupted stream resumes."""
        return self._api.events(at("/v1/fine_tuning/jobs/{job_id}/events", job_id), params=given(stream=True))

    def checkpoints(self, job_id: str, *, limit: int = 100, after: str | None = None) -> Pages[Checkpoint]:
        """Lists committed checkpoints, newest first; `limit` per page."""
        return self._api.pages(at("/v1/fine_tuning/jobs/{job_id}/checkpoints", job_id), given(limit=limit, after=after))

    def logs(self, job_id: str, *, attempt: int | None = None, offset: int = 0) -> str:
        """Returns the training log of an attempt, by default the last one, from byte `offset` on; also while it runs."""
        path = at("/v1/fine_tuning/jobs/{job_id}/logs", job_id)
        return (self._api.content(path, params=given(attempt=attempt, offset=offset or None))).decode(errors="replace")

    def follow_logs(self, job_id: str, *, attempt: int | None = None, offset: int = 0) -> Iterator[str]:
        """Yields the log as it is written, until the attempt has ended; an interrupted stream resumes."""
        return self._api.growing(at("/v1/fine_tuning/jobs/{job_id}/logs", job_id), given(follow=True, attempt=attempt), offset=offset)

    def cost(self, job_id: str) -> JobCost:
        """Returns the cost of a job, entry by entry; pending refunds; and the cost so far of its running attempt."""
        return self._api.call("GET", at("/v1/fine_tuning/jobs/{job_id}/cost", job_id))

    def metrics(self, job_id: str) -> Page[Record]:
        """Returns the metrics of each step, in order."""
        return self._api.call("GET", at("/v1/fine_tuning/jobs/{job_id}/metrics", job_id))

    def metrics_csv(self, job_id: str) -> bytes:
        """Returns the same as CSV: one row per step."""
        return self._api.content(at("/v1/fine_tuning/jobs/{job_id}/metrics.csv", job_id))

    def tensorboard(self, job_id: str) -> bytes:
        """Returns the same as an event file of TensorBoard."""
        return self._api.content(at("/v1/fine_tuning/jobs/{job_id}/tensorboard", job_id))

    def compare(self, job_ids: Sequence[str]) -> JobComparison:
        """Compares 2 to 100 jobs side by side."""
        return self._api.call("GET", at("/v1/fine_tuning/jobs/compare"), params={"ids": ",".join(job_ids)})

    def evaluation(self, job_id: str) -> JobEvaluation:
        """Returns the evaluation of a job's adapter: ``report``, ``verdict``, ``advice``, and ``next_run``, the advised hyperparameters."""
        return self._api.call("GET", at("/v1/fine_tuning/jobs/{job_id}/evaluation", job_id))

    def evaluation_page(self, job_id: str) -> bytes:
        """Returns the evaluation as a self-contained HTML page."""
        return self._api.content(at("/v1/fine_tuning/jobs/{job_id}/evaluation", job_id), accept="text/html")

    def evaluation_samples(
        self, job_id: str, *, suite: str | None = None, only: str | None = None, limit: int = 100, after: str | None = None
    ) -> Pages[EvaluationSample]:
        """Lists every item with the answer of each model; `only`: ``changed``, ``worse`` or ``better``."""
        path = at("/v1/fine_tuning/jobs/{job_id}/evaluation/samples", job_id)
        return self._api.pages(path, given(suite=suite, only=only, limit=limit, after=after))
