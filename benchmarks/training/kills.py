"""Random kills of running trainings: whatever is killed, whenever, the job ends with the bytes of one that was left alone.

    python -m benchmarks.training.kills [--count 100] [--seed 1] [--out benchmarks/training_kills_202611.json]

Jobs go through the platform's own parts: queue, launcher, agent, torchrun, API, worker, store and ledger, on a database of their own.
At random moments a random process (a training rank, torchrun, the agent, the launcher's watcher, the platform's step, all of these, the
API, the worker, or the database) gets SIGTERM or SIGKILL; then scheduler, sensors and supervisor do what they do. After each job
everything that must hold is checked, and a breach is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.training.kill_bench import Bench, bench, total_steps
from benchmarks.training.killed_job import VICTIMS, WORK, Kill, KilledJob, Plan
from control_plane.jobs import service as jobs

KILLS_PER_JOB = 4
EPOCHS = 16
SETUP_S = 8.0
METER_TOLERANCE_S = 1.0
"""Between the end of the last process and the metered end, where the watcher lived."""
UNWATCHED_TOLERANCE_S = SETUP_S + 4.0
"""Where the watcher was killed too: it is metered to its last heartbeat, 2 s before its end or more on a busy machine, and to its
start where it had not beaten yet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started here is ended here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = run(given.count, seed=given.seed, epochs=EPOCHS, say=lambda line: print(line, flush=True), out=given.out)
    print(table(result))
    raise SystemExit(1 if result["breaches"] else 0)


def run(count: int, *, seed: int, epochs: int, say: Any = print, out: Path | None = None) -> dict[str, Any]:
    """Kill `count` times and say what it cost; ``breaches`` is empty when everything held."""
    rng = random.Random(seed)
    with bench() as made:
        began = time.monotonic()
        reference = KilledJob(bench=made, plans=[], epochs=epochs)
        reference.run()
        breaches = check(reference, reference)
        _dismiss(reference)
        say(f"reference: {len(reference.metrics)} lines in {time.monotonic() - began:.1f} s; {breaches or 'all checks hold'}")
        kills: list[Kill] = []
        jobs = 0
        while len(kills) < count:
            job, found = _one(made, reference, plan(rng, min(KILLS_PER_JOB, count - len(kills)), total_steps(epochs)), epochs)
            jobs += 1
            kills += job.kills
            breaches += found
            said = "; ".join(f"{k.plan.victim} {k.plan.signum.name} in {k.phase} at {k.step}: lost {k.lost_steps}" for k in job.kills)
            say(f"{time.strftime('%H:%M:%S')} job {jobs}, {len(kills)} kills: {said}{' BREACH ' + '; '.join(found) if found else ''}")
            result: dict[str, Any] = {
                "seed": seed,
                "steps": total_steps(epochs),
                "jobs": jobs,
                "seconds": round(time.monotonic() - began, 1),
            }
            result |= {"breaches": breaches, **summary(kills), "kills": [_as_json(k) for k in kills]}
            if out:
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def plan(rng: random.Random, count: int, steps: int) -> list[Plan]:
    """`count` kills in the order of the steps that they wait for."""
    made = []
    for at in sorted(rng.randrange(0, steps) for _ in range(count)):
        victim, signum = rng.choice(VICTIMS), rng.choice([signal.SIGTERM, signal.SIGKILL])
        when = rng.choices(["setup", "step", "save", "end"], [3, 4, 3, 1])[0]
        if when == "end" and victim in WORK:
            when = "save"
        made.append(Plan(victim=victim, signum=signum, when=when, at=rng.uniform(0, SETUP_S) if when == "setup" else at))
    return sorted(made, key=lambda p: p.when == "end")


def _one(made: Bench, reference: KilledJob, plans: list[Plan], epochs: int) -> tuple[KilledJob, list[str]]:
    job = KilledJob(bench=made, plans=plans, epochs=epochs)
    try:
        job.run()
    except (TimeoutError, RuntimeError, AssertionError) as e:
        return job, [f"{type(e).__name__}: {e}"]
    found = check(job, reference)
    _dismiss(job)
    return job, found


def _dismiss(job: KilledJob) -> None:
    """Cancel a checked job: its evaluation would take the only slot, and nothing here would run it."""
    jobs.cancel(job.platform, job.tenant, job.id)


def check(job: KilledJob, reference: KilledJob) -> list[str]:
    """What does not hold of a finished job, in words."""
    return [f"{job.id}: {words}" for words in (*_results(job, reference), *_losses(job), *_leftovers(job), *_ledger(job), *_events(job))]


def _results(job: KilledJob, reference: KilledJob) -> Iterable[str]:
    if job.adapter != reference.adapter:
        yield "the adapter differs from that of the uninterrupted run"
    if job.metrics != reference.metrics:
        different = [a["step"] for a, b in zip(job.metrics, reference.metrics, strict=False) if a != b][:5]
        yield f"metrics differ: {len(job.metrics)} lines of {len(reference.metrics)}, first at steps {different}"


def _losses(job: KilledJob) -> Iterable[str]:
    for kill in job.kills:
        if kill.lost_steps is not None and kill.bound is not None and not 0 <= kill.lost_steps <= kill.bound:
            yield f"{kill.plan.victim} {kill.plan.signum.name} in {kill.phase} at step {kill.step} lost {kill.lost_steps} steps"


def _leftovers(job: KilledJob) -> Iterable[str]:
    deadline = time.monotonic() + 5.0
    while (left := job.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        yield f"left running: {left}"


def _ledger(job: KilledJob) -> Iterable[str]:
    usage = sorted((e for e in job.ledger() if e.kind == "usage"), key=lambda e: e.attempt)
    attempts = job.attempts()
    if [e.attempt for e in usage] != [a.attempt for a in attempts]:
        yield f"usage entries of attempts {[e.attempt for e in usage]}, attempts {[a.attempt for a in attempts]}"
        return
    previous_end = 0.0
    for entry, attempt in zip(usage, attempts, strict=True):
        begin, end = entry.detail["started_ms"] / 1000, entry.detail["ended_ms"] / 1000
        if begin < previous_end:
            yield f"attempt {entry.attempt} is metered from {begin}, the one before until {previous_end}"
        if abs(float(entry.gpu_seconds) - (end - begin)) > 0.01:
            yield f"attempt {entry.attempt} is metered {entry.gpu_seconds} s, it ran {end - begin:.3f} s"
        unwatched = any(k.attempt == attempt.attempt and k.plan.victim in ("watcher", "all") for k in job.kills)
        seen = job.alive_until.get(attempt.attempt, begin)
        if not -(UNWATCHED_TOLERANCE_S if unwatched else METER_TOLERANCE_S) <= end - seen <= METER_TOLERANCE_S:
            yield f"attempt {entry.attempt} is metered until {end - seen:+.2f} s after its last process"
        previous_end = end
    refunds = {e.attempt: float(e.gpu_seconds) for e in job.ledger() if e.kind == "refund"}
    kept_work = False
    for entry, attempt in zip(usage, attempts, strict=True):
        used, refunded = float(entry.gpu_seconds), refunds.get(attempt.attempt, 0.0)
        trained = (attempt.last_step or 0) > (attempt.from_step or 0)
        if attempt.outcome == "preempted" and trained:  # billed up to its last committed step
            right, kept_work = 0 < refunded < used, True
        elif attempt.outcome == "succeeded":  # loads once more if an earlier attempt is billed: that is refunded
            right = 0 < refunded < used if kept_work else refunded == 0
        else:
            right = refunded == used
        if not right:
            yield f"attempt {attempt.attempt} ({attempt.outcome}, trained: {trained}) used {used} s, refunded {refunded} s"


def _events(job: KilledJob) -> Iterable[str]:
    for name in ("train_loss", "valid_loss"):
        steps = [data["step"] for data in job.reported() if name in data]
        wanted = sorted({line["step"] for line in job.metrics if {"train_loss": "loss", "valid_loss": "eval_loss"}[name] in line})
        if steps != wanted:
            again = sorted({s for s in steps if steps.count(s) > 1})
            yield f"{name} events: {len(steps)} for {len(wanted)} steps; twice {again[:8]}, never {sorted(set(wanted) - set(steps))[:8]}"


def summary(kills: list[Kill]) -> dict[str, Any]:
    """Per victim and signal: how many, steps lost, seconds until it went on."""
    found: dict[str, Any] = {}
    for victim in VICTIMS:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            these = [k for k in kills if k.plan.victim == victim and k.plan.signum is signum]
            lost = [k.lost_steps for k in these if k.lost_steps is not None]
            took = [k.recovery_s for k in these if k.recovery_s is not None]
            found[f"{victim} {signum.name}"] = {
                "kills": len(these),
                "phases": {p: sum(k.phase == p for k in these) for p in sorted({k.phase for k in these})},
                "lost_steps_max": max(lost, default=None),
                "lost_steps_mean": round(statistics.mean(lost), 2) if lost else None,
                "recovery_s_median": round(statistics.median(took), 2) if took else None,
                "recovery_s_max": round(max(took), 2) if took else None,
            }
    return {"count": len(kills), "by_victim": found}


def table(result: dict[str, Any]) -> str:
    head = f"{'victim and signal':<18} kills  lost max  mean  recovery s median    max  phases"
    rows = [head]
    for name, f in result["by_victim"].items():
        numbers = [f["lost_steps_max"], f["lost_steps_mean"], f["recovery_s_median"], f["recovery_s_max"]]
        lost, mean, median, most = ("-" if n is None else str(n) for n in numbers)
        phases = ", ".join(f"{p} {n}" for p, n in f["phases"].items())
        rows.append(f"{name:<18} {f['kills']:>5}  {lost:>8}  {mean:>4}  {median:>17}  {most:>5}  {phases}")
    rows.append(f"{result['count']} kills in {result['jobs']} jobs of {result['steps']} steps, {result['seconds']:.0f} s")
    return "\n".join([*rows, *(result["breaches"] or ["everything that was checked held"])])


def _as_json(kill: Kill) -> dict[str, Any]:
    return {
        "victim": kill.plan.victim,
        "signal": kill.plan.signum.name,
        "phase": kill.phase,
        "attempt": kill.attempt,
        "step": kill.step,
        "checkpoint_being_written": kill.writing,
        "outcome": kill.outcome,
        "lost_steps": kill.lost_steps,
        "bound": kill.bound,
        "recovery_s": None if kill.recovery_s is None else round(kill.recovery_s, 2),
    }


if __name__ == "__main__":
    main()
