"""A cluster on a virtual clock: jobs arrive, a policy decides, GPUs are held and released, and reservations are checked.

The engine trusts no policy. It counts the GPUs of each node itself, so that none is given twice, accepts exactly one Start or Wait for each
waiting job, counts work, saving and loading separately, and judges reservations by what was promised and what then happened.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.scheduler.model import Decision, Placement, Preempt, Reservation, Running, Snapshot, Start, Wait, Waiting
from engine.scheduler.pools import Pool
from engine.scheduler.simulation.costs import Costs
from engine.scheduler.simulation.outcome import Outcome, Record, Span
from engine.scheduler.simulation.reservation_watch import LATE_S, ReservationWatch
from engine.scheduler.simulation.simulated_job import SimulatedJob

Policy = Callable[[Snapshot, float], Sequence[Decision]]
ARRIVAL, END, RELEASE, FAILURE, REPAIR, WAKE = range(6)
HELPFUL = (ARRIVAL, END, RELEASE, REPAIR)
"""Events that may let a waiting job start."""
STUCK_S = 86400.0
"""A policy may wait for a time that only it knows; one that leaves all GPUs idle for a day, with nothing to come, waits forever."""
MAX_FAILURES = 1000
"""Of one job: one that saves checkpoints never gets near it."""


class Estimates(Protocol):
    """Estimates that change while the simulation runs."""

    def expected_s(self, job: SimulatedJob) -> float:
        """Return the expected duration of a job that is submitted now."""

    def left_s(self, job: SimulatedJob, estimate_s: float, *, done_s: float) -> float:
        """Return the expected rest of a job that returns to the queue after `done_s` of work."""

    def remaining_s(self, job: SimulatedJob, estimate_s: float, *, ran_s: float, load_s: float, done_s: float) -> float:
        """Return the expected rest of an attempt that has run for `ran_s`, `load_s` of it before its first step."""

    def ended(self, job: SimulatedJob) -> None:
        """A job ended after its duration."""


@dataclass(slots=True)
class _Attempt:
    pool: str
    placement: Placement
    started: float
    load_s: float
    expected_end: float
    soonest_end: float
    """Earliest expected end since reservations were last excused for it."""
    number: int
    stopping_for: str | None = None
    requested_stop: float | None = None
    told: Running | None = None
    """What the policy saw last: it changes only when a checkpoint is saved and when it is asked to stop."""


@dataclass(slots=True)
class _Live:
    record: Record
    since: float
    done_s: float = 0.0
    attempts: int = 0
    running: _Attempt | None = None
    due_at: float | None = None
    promise: Reservation | None = None
    waiting: Waiting | None = None


class Simulation:
    """One trace on one cluster under one policy; :meth:`run` once."""

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        pools: Sequence[Pool],
        policy: Policy,
        *,
        costs: Costs | None = None,
        estimate_error: float = 1.0,
        estimates: Estimates | None = None,
        seed: int = 0,
        tick_s: float = 900.0,
        max_work: int | None = None,
    ) -> None:
        """`estimate_error` K: every estimate is the duration times ``exp(U(-ln K, ln K))``, unless `estimates` makes it. `tick_s`: longest
        time between decisions while jobs wait, because rules depend on time; 0: decide only when something happened. `max_work`: end after
        the round in which this many jobs and nodes have been considered, each counted in every round; None: end with the last job."""
        self.pools, self.policy, self.costs, self.tick_s = list(pools), policy, costs or Costs(), tick_s
        self.random = random.Random(seed)
        self.estimates = estimates
        spread = math.log(estimate_error)
        self.live = {j.job_id: _Live(Record(j, j.duration_s * math.exp(self.random.uniform(-spread, spread))), j.submit_s) for j in jobs}
        self.outcome = Outcome(records=[one.record for one in self.live.values()], num_gpus=sum(p.num_gpus for p in pools))
        self.sizes = {p.name: {n.name: n.num_gpus for n in p.nodes} for p in pools}
        self.free = {p.name: {n.name: n.num_gpus for n in p.nodes if n.ready} for p in pools}
        self.num_nodes, self.max_work, self.work = sum(len(p.nodes) for p in pools), max_work, 0
        self.queue: dict[str, _Live] = {}
        self.held: dict[str, _Live] = {}
        self.used: dict[str, float] = {}
        self.shared = len({j.tenant for j in jobs}) > 1
        self.now, self.seq, self.left = 0.0, 0, len(jobs)
        self.events: list[tuple[float, int, int, str, int]] = []
        self.helpful = 0
        self.idle_since: float | None = None
        self.reservations = ReservationWatch(pools=self.pools, broken=self.outcome.broken)
        for job in jobs:
            self._at(job.submit_s, ARRIVAL, job.job_id)
        if self.costs.node_mtbf_days < math.inf:
            for pool in self.pools:
                for node in pool.nodes:
                    self._at(self._until_failure(), FAILURE, f"{pool.name}/{node.name}")

    def run(self) -> Outcome:
        handlers = {ARRIVAL: self._arrive, END: self._end, RELEASE: self._release, FAILURE: self._fail, REPAIR: self._repair}
        self.now = self.events[0][0]
        while self.left:
            if not self.events:
                raise self._nothing_happens()
            time = self.events[0][0]
            self._pass(time)
            changed = False
            while self.events and self.events[0][0] <= time:
                _, kind, _, key, number = heapq.heappop(self.events)
                self.helpful -= kind in HELPFUL
                if kind == WAKE:
                    changed = changed or number in (0, self.outcome.rounds)
                else:
                    changed = handlers[kind](key, number) or changed
            if changed:
                self._decide()
            if self.max_work is not None and self.work >= self.max_work and self.left:
                self.outcome.stopped_at = self.now
                break
        self.outcome.slipped = self.reservations.slipped
        return self.outcome

    def _nothing_happens(self) -> RuntimeError:
        return RuntimeError(f"{len(self.queue)} jobs wait and nothing will ever happen: {', '.join(list(self.queue)[:5])}")

    def _at(self, time: float, kind: int, key: str, number: int = 0) -> None:
        self.seq += 1
        self.helpful += kind in HELPFUL
        heapq.heappush(self.events, (time, kind, self.seq, key, number))

    def _pass(self, time: float) -> None:
        """Advance the clock: recent usage decays, and what tenants hold is added."""
        gone = time - self.now
        if gone > 0 and self.shared:
            keep = 0.5 ** (gone / self.costs.use_half_life_s)
            weight = (1 - keep) * self.costs.use_half_life_s / math.log(2)
            self.used = {tenant: value * keep for tenant, value in self.used.items()}
            for one in self.held.values():
                tenant = one.record.job.tenant
                self.used[tenant] = self.used.get(tenant, 0.0) + one.record.job.num_gpus * weight
        self.now = time

    def _arrive(self, key: str, _: int) -> bool:
        one = self.live[key]
        if self.estimates is not None:
            one.record.estimate_s = self.estimates.expected_s(one.record.job)
        self._queue(one)
        return True

    def _queue(self, one: _Live) -> None:
        record = one.record
        one.since, one.running = self.now, None
        again = self.costs.load_s[record.job.job_class] if one.attempts else 0.0
        # Past its estimate, a job is expected to take another tenth of what it has done.
        left = record.estimate_s - one.done_s if record.estimate_s > one.done_s else 0.1 * one.done_s
        if self.estimates is not None:
            left = self.estimates.left_s(record.job, record.estimate_s, done_s=one.done_s)
        one.waiting = Waiting(
            job_id=record.job.job_id,
            tenant=record.job.tenant,
            tier=record.job.tier,
            num_gpus=record.job.num_gpus,
            queued_at=record.job.submit_s,
            expected_s=left + again,
            waiting_since=self.now,
            waited_s=record.waited_s,
            job_class=record.job.job_class,
            spot=record.job.spot,
            preemptions=record.preemptions,
            due_at=one.due_at,
            promise=one.promise,
        )
        self.queue[record.job.job_id] = one

    def _end(self, key: str, number: int) -> bool:
        one = self.live[key]
        attempt = one.running
        if attempt is None or attempt.number != number or attempt.requested_stop is not None:
            return False
        self._free(key, one, attempt)
        one.record.end = self.now
        if self.estimates is not None:
            self.estimates.ended(one.record.job)
        one.running = None
        self.left -= 1
        return True

    def _release(self, key: str, number: int) -> bool:
        """A job that was asked to stop has saved its work until then."""
        one = self.live[key]
        attempt = one.running
        if attempt is None or attempt.number != number or attempt.requested_stop is None:
            return False
        self._free(key, one, attempt)
        one.done_s += max(0.0, attempt.requested_stop - attempt.started - attempt.load_s)
        one.record.preemptions += 1
        one.record.lost_gpu_s += one.record.job.num_gpus * (self.now - attempt.requested_stop)
        self._count_loading(one, attempt, attempt.requested_stop)
        self._queue(one)
        return True

    def _count_loading(self, one: _Live, attempt: _Attempt, until: float) -> None:
        one.record.lost_gpu_s += one.record.job.num_gpus * min(attempt.load_s, until - attempt.started)

    def _free(self, key: str, one: _Live, attempt: _Attempt) -> None:
        if attempt.requested_stop is None and attempt.expected_end < self.now - LATE_S:
            self._disturb(one, attempt)
        free = self.free[attempt.pool]
        sizes = self.sizes[attempt.pool]
        for node, gpus in attempt.placement:
            if node in free:  # a lost one gives nothing back
                free[node] += gpus
                assert free[node] <= sizes[node], f"{node} of {attempt.pool} got more GPUs back than it has"
        del self.held[key]
        if one.record.end is None and attempt.requested_stop is None:
            self._count_loading(one, attempt, self.now)
        self.outcome.log.append((self.now, "release", key, attempt.placement))

    def _until_failure(self) -> float:
        return self.now + self.random.expovariate(1 / (self.costs.node_mtbf_days * 86400))

    def _fail(self, key: str, _: int) -> bool:
        """A node is lost, and with it the work of its jobs since their newest checkpoint."""
        pool, node = key.split("/", 1)
        self.reservations.disturb(pool, {node}, "")
        for job_id, one in list(self.held.items()):
            attempt = one.running
            if attempt is None or attempt.pool != pool or node not in dict(attempt.placement):
                continue
            self._disturb(one, attempt)
            self._free(job_id, one, attempt)
            worked = max(0.0, self.now - attempt.started - attempt.load_s)
            saved = self._saved(one.record.job, worked)
            one.done_s += saved
            one.record.failures += 1
            if one.record.failures > MAX_FAILURES:
                raise RuntimeError(
                    f"{job_id} lost its node {MAX_FAILURES} times and will never end: save checkpoints more often, or let nodes last longer"
                )
            one.record.lost_gpu_s += one.record.job.num_gpus * (worked - saved)
            self._queue(one)
        del self.free[pool][node]
        self._ready(pool, node, False)
        self._at(self.now + self.costs.repair_s, REPAIR, key)
        return True

    def _repair(self, key: str, _: int) -> bool:
        pool, node = key.split("/", 1)
        self._ready(pool, node, True)
        self.free[pool][node] = self.sizes[pool][node]
        if self.costs.node_mtbf_days < math.inf:
            self._at(self._until_failure(), FAILURE, key)
        return True

    def _ready(self, pool: str, node: str, ready: bool) -> None:
        self.pools = [_with_node(p, node, ready) if p.name == pool else p for p in self.pools]

    @staticmethod
    def _saved(job: SimulatedJob, worked: float) -> float:
        return math.floor(worked / job.checkpoint_s) * job.checkpoint_s if job.checkpoint_s else 0.0

    def _running(self, one: _Live, attempt: _Attempt) -> Running:
        job, record = one.record.job, one.record
        saved = self._saved(job, max(0.0, self.now - attempt.started - attempt.load_s))
        saved_at = attempt.started + attempt.load_s + saved if saved else None
        stopping = attempt.requested_stop is not None
        if attempt.told is not None and attempt.told.saved_at == saved_at and attempt.told.stopping == stopping:
            return attempt.told
        attempt.told = Running(
            job_id=job.job_id,
            pool=attempt.pool,
            num_gpus=job.num_gpus,
            expected_end=attempt.expected_end if attempt.requested_stop is None else attempt.requested_stop + self.costs.save_s,
            tier=job.tier,
            tenant=job.tenant,
            placement=attempt.placement,
            started_at=attempt.started,
            expected_s=record.estimate_s,
            saved_at=saved_at,
            job_class=job.job_class,
            queued_at=job.submit_s,
            waited_s=record.waited_s,
            due_at=one.due_at,
            preemptions=record.preemptions,
            spot=job.spot,
            stopping=stopping,
            stopping_for=attempt.stopping_for,
            stopping_since=attempt.requested_stop,
        )
        return attempt.told

    def _follow_pace(self, estimates: Estimates) -> None:
        """Update expected ends by the pace of steps; reservations on the nodes of a job that slows down may slip."""
        for one in self.held.values():
            attempt = one.running
            if attempt is None or attempt.requested_stop is not None:
                continue
            ran, load = self.now - attempt.started, attempt.load_s
            end = self.now + estimates.remaining_s(one.record.job, one.record.estimate_s, ran_s=ran, load_s=load, done_s=one.done_s)
            attempt.soonest_end = min(attempt.soonest_end, end)
            if end > attempt.soonest_end + LATE_S:
                self._disturb(one, attempt)
                attempt.soonest_end = end
            if end != attempt.expected_end:
                attempt.expected_end, attempt.told = end, None

    def _decide(self) -> None:
        if not self.queue:
            self._span(0)
            return
        if self.estimates is not None:
            self._follow_pace(self.estimates)
        waiting = [one.waiting for one in self.queue.values() if one.waiting is not None]
        running = [self._running(one, one.running) for one in self.held.values() if one.running is not None]
        if self.reservations.of:
            for one in self.held.values():
                attempt = one.running
                if attempt is not None and attempt.requested_stop is None and attempt.expected_end < self.now - LATE_S:
                    self._disturb(one, attempt)
        snapshot = Snapshot(pools=self.pools, waiting=waiting, running=running, used=dict(self.used))
        decisions = self.policy(snapshot, self.now)
        self.outcome.rounds += 1
        self.work += len(waiting) + len(running) + self.num_nodes
        told = [d.job_id for d in decisions if not isinstance(d, Preempt)]
        assert sorted(told) == sorted(self.queue), "a policy returns exactly one Start or Wait for each waiting job"
        head: Wait | None = None
        for decision in decisions:
            if isinstance(decision, Start):
                self._start(decision)
            elif isinstance(decision, Preempt):
                self._preempt(decision)
            else:
                self._wait(decision)
                head = decision if head is None or decision.position < head.position else head
        self._span(self._unusable(head))
        if any(not isinstance(d, Wait) for d in decisions):
            self.idle_since = None
        elif not self.held and not self.helpful:
            self.idle_since = self.now if self.idle_since is None else self.idle_since
            if self.now - self.idle_since >= STUCK_S:
                raise self._nothing_happens()
        self._wake_later()

    def _disturb(self, one: _Live, attempt: _Attempt) -> None:
        self.reservations.disturb(attempt.pool, [name for name, _ in attempt.placement], one.record.job.tier)

    def _start(self, decision: Start) -> None:
        one = self.queue.pop(decision.job_id)
        job = one.record.job
        placement = decision.placement
        assert sum(gpus for _, gpus in placement) == job.num_gpus == decision.num_gpus, (
            f"{job.job_id} got {placement} for {job.num_gpus} GPUs"
        )
        free = self.free[decision.pool]
        for node, gpus in placement:
            assert 0 < gpus <= free.get(node, 0), f"{gpus} GPUs of {node} are given to {job.job_id}, {free.get(node, 0)} are free"
            free[node] -= gpus
        one.record.waited_s += self.now - one.since
        self.reservations.judge(job.job_id, self.now, decision.pool, [name for name, _ in placement], job.tier)
        load = self.costs.load_s[job.job_class] if one.attempts else 0.0
        one.attempts += 1
        assert one.waiting is not None
        end = self.now + load + job.duration_s - one.done_s
        expected = self.now + one.waiting.expected_s
        one.running = _Attempt(decision.pool, placement, self.now, load, expected, expected, one.attempts)
        one.waiting = one.promise = None
        if one.record.first_start is None:
            one.record.first_start = self.now
        one.record.backfilled = one.record.backfilled or decision.backfill
        self.held[job.job_id] = one
        self._at(end, END, job.job_id, one.attempts)
        if expected < end - LATE_S:
            self._at(expected + 2 * LATE_S, WAKE, "")
        self.outcome.log.append((self.now, "start", job.job_id, placement))

    def _preempt(self, decision: Preempt) -> None:
        one = self.held[decision.job_id]
        attempt = one.running
        assert attempt is not None and attempt.requested_stop is None, f"{decision.job_id} is asked to stop twice"
        attempt.requested_stop, attempt.stopping_for = self.now, decision.for_job
        self._at(self.now + self.costs.save_s, RELEASE, decision.job_id, attempt.number)

    def _wait(self, decision: Wait) -> None:
        one = self.queue[decision.job_id]
        if decision.promise is not None:
            self.reservations.note(decision.job_id, one.record.job.tier, decision.promise)
        if one.waiting is not None and (one.due_at != decision.due_at or one.promise != decision.promise):
            one.due_at, one.promise = decision.due_at, decision.promise
            one.waiting = _told(one.waiting, decision)

    def _unusable(self, head: Wait | None) -> int:
        free = sum(sum(nodes.values()) for nodes in self.free.values())
        return free if head is not None and free >= self.live[head.job_id].record.job.num_gpus else 0

    def _span(self, unusable: int) -> None:
        free = sum(sum(nodes.values()) for nodes in self.free.values())
        ready = sum(p.num_gpus for p in self.pools)
        queued = sum(one.record.job.num_gpus for one in self.queue.values())
        self.outcome.spans.append(Span(start=self.now, used=ready - free, ready=ready, queued=queued, unusable=unusable))

    def _wake_later(self) -> None:
        """Decide again when a job is due, when a reservation starts, and after a tick."""
        if not self.queue or not self.tick_s:
            return
        wake = self.now + self.tick_s
        for one in self.queue.values():
            for time in (one.due_at, one.promise.start if one.promise else None):
                if time is not None and self.now < time < wake:
                    wake = time
        self._at(max(wake, self.now + LATE_S / 2), WAKE, "", self.outcome.rounds)  # a time shifted by rounding must not spin


def _told(waiting: Waiting, decision: Wait) -> Waiting:
    return replace(waiting, due_at=decision.due_at, promise=decision.promise)


def _with_node(pool: Pool, name: str, ready: bool) -> Pool:
    return replace(pool, nodes=tuple(replace(n, ready=ready) if n.name == name else n for n in pool.nodes))
