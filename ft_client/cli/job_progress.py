"""Follows a job: progress bars on a terminal, otherwise a line per change; the job is not affected either way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from core.errors import RateLimited, Unavailable
from ft_client.cli.output import escape, live_bars, say
from ft_client.cli.remedies import in_commands
from ft_client.queue_messages import evaluation_line, waiting_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ft_client import FtClient, Record

POLL_S = 2.5
"""Seconds between looks at a job, of two requests each: two that follow with one key stay below the 120 requests per minute of the free
tier."""
LINES_OF_METRICS, LINE_EVERY_S = 10, 30.0
"""Training without a terminal: a line per tenth of the way, and at least one in this many seconds."""
SHOWN = {"rewards/margins": "margin", "valid_loss": "validation loss"}
"""Metrics shown beside the training loss, once measured."""
WEEK_S = 6 * 86400.0
"""Further ahead, a weekday's name is ambiguous."""
STAGES = ("validating", "queued", "provisioning", "running", "evaluating", "succeeded")


def follow(client: FtClient, job_id: str, *, poll_s: float = POLL_S) -> Record:
    """Show the job until it has ended, and return it; ``Unavailable`` if the platform is away for longer than a wait survives."""
    with job_view() as view, _outage_of(f"the job {job_id}"):
        seen: set[str] = set()

        def show(job: Record) -> None:
            for event in new_events(client, job_id, seen):
                view.event(event)
            view.job(job)

        return client.jobs.wait(job_id, poll_s=poll_s, each=show)


def follow_validation(client: FtClient, file_id: str, *, poll_s: float = POLL_S) -> Record:
    """Show the validation of a large file until it has ended, and return the file; ``Unavailable`` as for :func:`follow`."""
    from ft_client.connection import PASSING

    with live_bars("DownloadColumn", "TimeElapsedColumn", "{task.fields[rows]:,} rows") as bars, _outage_of(f"the file {file_id}"):
        view = ValidationView(bars)

        def show(file: Record) -> None:
            if file["status"] != "uploaded":
                return
            with contextlib.suppress(*PASSING):  # a broken stream is opened again
                for event in client.files.events(file_id):
                    view.show(event)

        return client.files.wait(file_id, poll_s=poll_s, each=show)


@contextlib.contextmanager
def _outage_of(what: str) -> Iterator[None]:
    """Word an outage or a rate limit that lasts as one, so that it does not look like a failure of what is followed."""
    try:
        yield
    except (Unavailable, RateLimited) as error:
        raise Unavailable(f"{what} cannot be followed now, which does not affect it: {error.message}", code="unreachable") from error


class ValidationView:
    """A bar on a terminal, otherwise a line per stage."""

    def __init__(self, bars: Progress | None = None) -> None:
        self._bars, self._stage = bars, ""
        if bars is not None:
            bars.add_task("waiting", total=None, rows=0)

    def show(self, event: Record) -> None:
        """Handle one event of the file's stream."""
        found = event["progress"]
        if found is None:
            return
        if self._bars is not None:
            total = found["total_bytes"] or None
            self._bars.update(self._bars.task_ids[0], description=found["stage"], total=total, completed=found["bytes"], rows=found["rows"])
        elif found["stage"] != self._stage:
            say(f"validating: {found['stage']}")
        self._stage = found["stage"]


def new_events(client: FtClient, job_id: str, seen: set[str]) -> list[Record]:
    """Return events not in `seen`, oldest first, and add them to it."""
    fresh: list[Record] = []
    for event in client.jobs.events(job_id):  # newest first, page after page
        if event["id"] in seen:
            break
        fresh.append(event)
    seen.update(e["id"] for e in fresh)
    return fresh[::-1]


def job_state(job: Mapping[str, Any]) -> str:
    """Return the state of a job, or of a sweep's trial, in words: one whose model failed its gate was trained."""
    if (job.get("error") or {}).get("code") == "gate_failed":
        return "trained, not approved"
    state = str(job.get("state") or job["status"])
    return f"{state}, not approved" if state == "succeeded" and job.get("adapter_id") and not job.get("fine_tuned_model") else state


def reason(job: Mapping[str, Any]) -> str:
    """Return why a job waits: the code and, if there are any, the words; empty for a job that does not wait."""
    return ": ".join(str(job[k]) for k in ("reason", "reason_detail") if job.get(k))


def waiting(job: Mapping[str, Any]) -> str:
    """Return a job's position, what it waits for, its start and what is ahead; else the reason, if there is one."""
    if not job.get("queue_position"):
        return reason(job)
    now, gpus = time.time(), (job.get("hardware") or {}).get("num_gpus")
    return waiting_line({**job, "num_gpus": gpus}, now=now, clock=lambda at: wall_clock(at, now))


def wall_clock(at: float, now: float) -> str:
    """Format ``14:20`` in the reader's time zone; with the day if it is another one."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%a %H:%M" if at - now < WEEK_S else "%Y-%m-%d %H:%M", then)


class JobView:
    """The display of a job."""

    def __init__(self, bars: Progress | None = None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._next_metrics, self._next_line = 0.0, 0.0
        self._waited = ""
        self._newest: dict[str, float] = {}

    def event(self, event: Record) -> None:
        """Handle one event; numbers go into the bars, or are thinned to lines."""
        if event.get("type") == "metrics":
            self._metrics(event)
        elif self._bars is not None:
            self._bars.console.print(escape(f"{_clock(event)}  {in_commands(event['message'])}"))
        else:
            say(f"{_clock(event)}  {event['message']}")

    def _metrics(self, event: Record) -> None:
        data = event.get("data") or {}
        self._newest |= {k: data[k] for k in SHOWN if isinstance(data.get(k), float)}
        if self._bars is not None:
            return
        if "valid_loss" in data:
            say(f"{_clock(event)}  {event['message']}")
            return
        step, total = data.get("step"), data.get("total_steps")
        if not step or not total:
            return
        due = step / total >= self._next_metrics or step == total or time.monotonic() >= self._next_line
        if not due:
            return
        self._next_metrics, self._next_line = step / total + 1 / LINES_OF_METRICS, time.monotonic() + LINE_EVERY_S
        say(f"{_clock(event)}  {event['message']}")

    def job(self, job: Record) -> None:
        """Update the bars; without bars, print why the job waits whenever that changes."""
        state = str(job.get("state") or job["status"])
        if self._bars is None:
            place = f"{job.get('queue_position')} {reason(job)}"  # without the time to its start, which changes every minute
            if (news := waiting(job)) and place != self._waited:
                say(f"{state}: {news}")
            self._waited = place
            return
        if state in STAGES:
            self._close_stages_before(state)
        if state == "running" and job.get("total_steps"):
            news = f"loss {job['loss']:.4f}" if isinstance(job.get("loss"), float) else ""
            speed = job.get("tokens_per_s")
            news += f"  {speed:,.0f} tokens/s" if speed else ""
            news += "".join(f"  {name} {self._newest[key]:.4f}" for key, name in SHOWN.items() if key in self._newest)
            self._bar("training", job.get("step") or 0, job["total_steps"], news)
        elif state == "evaluating" and (found := job.get("evaluation")):
            self._bar(NAMES[state], found["done"], found["total"], evaluation_line(found, counts=False))
        elif state in NAMES:
            self._bar(NAMES[state], None, None, waiting(job))

    def _close_stages_before(self, state: str) -> None:
        """Complete the bars of earlier stages."""
        assert self._bars is not None
        over = {NAMES[s] for s in STAGES[: STAGES.index(state)] if s in NAMES} | ({"training"} if state in STAGES[4:] else set())
        for name in over & set(self._tasks):
            task = self._tasks[name]
            total = self._bars.tasks[self._bars.task_ids.index(task)].total or 1
            self._bars.update(task, total=total, completed=total, news="", count=f"{total:g}/{total:g}" if total > 1 else "")
            self._bars.stop_task(task)

    def _bar(self, name: str, completed: int | None, total: int | None, news: str) -> None:
        assert self._bars is not None
        count = f"{completed or 0}/{total}" if total else ""  # without a known total: a moving bar, no numbers
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, news=news, count=count)
        self._bars.update(self._tasks[name], completed=completed, total=total, news=escape(news), count=count)


NAMES = {"validating": "data", "queued": "queue", "preempted": "queue", "provisioning": "start", "evaluating": "evaluation"}
"""Stages without a step count, by state."""


@contextlib.contextmanager
def job_view() -> Iterator[JobView]:
    with live_bars("{task.fields[count]}", "TimeElapsedColumn", "{task.fields[news]}") as bars:
        yield JobView(bars)


def _clock(event: Record) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["created_at"]))
