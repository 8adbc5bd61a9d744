"""One line about a waiting job: its position, what it waits for, when it starts, and what is ahead.

The scheduler is imported only when a waiting job is described, because the command line imports this module at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from core.epoch_time import span_words

SEPARATOR = " · "
SOON_S = 60.0
"""Starts nearer than this read "within a minute"; estimates are no more precise."""
TIERS = ("premium", "standard", "free")


def waiting_line(job: Mapping[str, Any], *, now: float, length: int | None = None, clock: Callable[[float], str] | None = None) -> str:
    """Describe a waiting job in one line; `job` has the API's fields.

    `length`: number of waiting jobs, shown after the position. `clock` formats a time in the reader's time zone; without it only durations
    are shown.
    """
    message = [_place(job, length), waits_for(job), _start(job, now, clock), ahead_words(job.get("ahead"))]
    return SEPARATOR.join(s for s in message if s)


def waits_for(job: Mapping[str, Any]) -> str:
    """Return what keeps the job from its GPUs."""
    from engine.scheduler import Reason

    reserved = job.get("reservation") or {}
    gpus = _gpus(job["num_gpus"]) if job.get("num_gpus") else "its GPUs"
    of_pool = f" of pool {reserved['pool']}" if reserved.get("pool") else ""
    words = {
        None: "to be placed by the next scheduling cycle",
        Reason.WAITING_FOR_QUOTA: f"waits for {gpus}{of_pool}",
        Reason.WAITING_BEHIND_HEAD: f"waits for {gpus}{of_pool}: a job ahead has reserved the next free ones",
        Reason.WAITING_FOR_PREEMPTED_WORKLOADS: f"{gpus}{of_pool} {'is' if job.get('num_gpus') == 1 else 'are'} being freed for it",
        Reason.TOPOLOGY_PLACEMENT_FAILED: f"waits for {gpus}{of_pool} on one node or fabric",
        Reason.RESERVED_FOR_PREMIUM: f"waits for {gpus}{of_pool}: the free ones are reserved for premium jobs",
        Reason.EXCEEDS_MAX_QUOTA: f"can never start: no pool gives {gpus} to one job",
        Reason.TENANT_SUSPENDED: "waits until the tenant's suspension is lifted",
        Reason.MAINTENANCE: f"waits for {gpus}: {job.get('reason_detail') or 'maintenance'}",
    }
    reason = job.get("reason")
    if reason == Reason.WAITING_FOR_QUOTA and job.get("estimated_start") is None and not reserved:
        return str(job.get("reason_detail") or words[reason])  # its tenant's own cap, which released GPUs do not end
    return words.get(reason, str(reason))


def ahead_words(ahead: Mapping[str, Any] | None) -> str:
    """Return the jobs ahead as counts: ``ahead: 1 premium, 2 standard jobs for 24 GPUs``; empty if none are known."""
    counts = {tier: int(n) for tier, n in (ahead or {}).get("jobs", {}).items() if n}
    if not counts:
        return ""
    kinds = by_tier_words(counts)
    gpus = (ahead or {}).get("num_gpus")
    wanted = f" for {_gpus(gpus)}" if gpus else ""
    yours = (ahead or {}).get("yours")
    own = f", {yours} of them yours" if yours else ""
    return f"ahead: {kinds} {'job' if sum(counts.values()) == 1 else 'jobs'}{wanted}{own}"


def _place(job: Mapping[str, Any], length: int | None) -> str:
    position = job.get("position") or job.get("queue_position")
    if position is None:
        return "New"
    return f"Position {position} of {length}" if length and length >= position else f"Position {position}"


def _start(job: Mapping[str, Any], now: float, clock: Callable[[float], str] | None) -> str:
    reserved, start = job.get("reservation"), job.get("estimated_start")
    late = reserved is not None and reserved["start"] < now - SOON_S
    if reserved and not late:
        start = reserved["start"] if start is None else min(start, reserved["start"])
    if start is None:
        from engine.scheduler import Reason

        return "" if job.get("reason") in (None, Reason.EXCEEDS_MAX_QUOTA) else "no start can be estimated"
    surely = "its reservation is late: a running job takes longer" if late else "reserved" if reserved else ""
    if start - now < SOON_S:
        return f"starts within a minute{f' ({surely})' if surely else ''}"
    word, span = "by" if surely == "reserved" else "about", span_words(start - now)
    if clock is None:
        return f"starts in {'at most' if word == 'by' else word} {span}{f' ({surely})' if surely else ''}"
    return f"starts {word} {clock(start)} (in {span}{f', {surely}' if surely else ''})"


def held_for(job: Mapping[str, Any]) -> str:
    """Return the job's state, or what is done with its GPUs once it is trained: ``evaluating``, ``exporting``."""
    return {"evaluate": "evaluating", "export": "exporting"}.get(str(job["kind"]), str(job["state"]))


def evaluation_line(progress: Mapping[str, Any] | None, *, counts: bool = True) -> str:
    """Describe how far an evaluation is: ``base tickets, 12 of 60 requests, 30 s left``; empty before anything is reported."""
    found = progress or {}
    what = " ".join(str(found[k]) for k in ("subject", "suite") if found.get(k)) or str(found.get("phase") or "")
    requests = f"{found.get('done') or 0} of {found['total']} requests" if counts and found.get("total") else ""
    left_s = found.get("eta_s") or 0.0
    left = f"{span_words(left_s)} left" if left_s else ""
    return ", ".join(part for part in (what, requests, left) if part)


def by_tier_words(counts: Mapping[str, int]) -> str:
    """Format counts: ``1 premium, 2 standard``, highest tier first."""
    order = [t for t in TIERS if counts.get(t)] + sorted(t for t in counts if t not in TIERS)
    return ", ".join(f"{counts[tier]} {tier}" for tier in order)


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
