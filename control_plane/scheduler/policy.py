"""One round of the queue: who starts, who gives way, who waits and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from control_plane.pools import RESERVED_FOR, Pool, in_order, may_use_spot
from control_plane.scheduler import explain, preemption
from control_plane.scheduler.due import due_times
from control_plane.scheduler.forecast import forecast
from control_plane.scheduler.model import Ahead, Decision, Preempt, Promise, Reason, Running, Snapshot, Start, Wait, Waiting
from control_plane.scheduler.order import factors, order, overdue
from control_plane.scheduler.placement import PoolRooms
from control_plane.scheduler.promises import TIE_S, Promises, length
from control_plane.scheduler.rules import DEFAULT, Rules

PASSES = 3
"""Times that the queue is walked in a round: a promised job that starts elsewhere gives back what others were refused for."""


def schedule(snapshot: Snapshot, *, now: float, rules: Rules = DEFAULT) -> list[Decision]:
    """Decisions about every waiting job, and about running ones that give way, in the queue's order.

    1. The order is that of :func:`control_plane.scheduler.order.order`; when a job is due, :mod:`control_plane.scheduler.due` says.
    2. Pools are tried in the order of :func:`control_plane.pools.in_order`: spot first for those that may use it.
    3. A gang starts whole or not at all, on nodes as :class:`control_plane.scheduler.placement.PoolRooms` says.
    4. Nothing starts that would delay a promise (:class:`control_plane.scheduler.promises.Promises`). The first blocked jobs of each pool
       and tier get one: one that is not due, and some that are.
    5. Running jobs are stopped (:mod:`control_plane.scheduler.preemption`), and their GPUs promised to the job that they are stopped for,

       1. for a premium job, jobs of lower tiers;
       2. for a job that is due, or much shorter, jobs of its own tier or a lower one that have run for a while.
    6. A gang that no pool can ever hold waits for ever and says so; it holds up nobody.
    7. Jobs of tenants at their hard cap, or suspended, come after all others, start nowhere and hold up nobody.
    """
    starts: list[Decision] = []
    for _ in range(PASSES - 1):
        this = _Round(snapshot, now, rules)
        if not this.walk():
            return [*starts, *this.answer()]
        starts += this.starts.values()
        snapshot = this.after()
    this = _Round(snapshot, now, rules)
    this.walk()
    return [*starts, *this.answer()]


def projected_start(snapshot: Snapshot, job_id: str, *, now: float, rules: Rules = DEFAULT) -> float | None:
    """When the waiting job `job_id` starts if every job takes as long as is expected and none is added; None: never, or nobody can tell."""
    decisions = schedule(snapshot, now=now, rules=replace(rules, slicing=False))
    for decision in decisions:
        if decision.job_id == job_id:
            if isinstance(decision, Start):
                return now
            if isinstance(decision, Wait):
                return decision.expected_start
    return None


class _Round:
    """One walk over the queue: rooms, promises and what was decided so far."""

    def __init__(self, snapshot: Snapshot, now: float, rules: Rules) -> None:
        self.snapshot, self.now, self.rules = snapshot, now, rules
        self.rooms = {p.name: PoolRooms(p, now) for p in snapshot.pools}
        self._run()
        self._able: dict[tuple[str, str, int, bool], list[Pool]] = {}
        self.barred: dict[str, tuple[Reason, str]] = {
            **{tenant: (Reason.WAITING_FOR_QUOTA, why) for tenant, why in snapshot.capped.items()},
            **{tenant: (Reason.TENANT_SUSPENDED, why) for tenant, why in snapshot.suspended.items()},
        }
        fair = factors(snapshot, rules=rules)
        self.due = due_times(snapshot.waiting, self.rooms, self.names, now=now, rules=rules)
        self.patience: dict[str, float] = {}
        for w in snapshot.waiting:
            self.patience[w.tier] = max(self.patience.get(w.tier, 0.0), self.due[w.job_id] - w.queued_at)
        every = order(snapshot.waiting, now=now, rules=rules, fair=fair, due=self.due)
        self.queue = [w for w in every if w.tenant not in self.barred]
        self.last = [w for w in every if w.tenant in self.barred]
        self.promises = Promises(self.rooms, now)
        self.starts: dict[str, Start] = {}
        self.stops: dict[str, list[Preempt]] = {}
        self.stopped: set[str] = {r.job_id for r in snapshot.running if r.stopping}
        self.stopping_for: dict[str, int] = {}
        for r in snapshot.running:
            if r.stopping and r.stopping_for:
                self.stopping_for[r.stopping_for] = self.stopping_for.get(r.stopping_for, 0) + 1
        self.slots: dict[tuple[str, str], int] = {}
        self._orders: dict[bool, dict[str, list[Running]]] = {}
        self.searches = {True: rules.preemptors, False: rules.preemptors}

    # What runs

    def _run(self) -> None:
        promised = {w.job_id: w.promise.start for w in self.snapshot.waiting if w.promise}
        for r in sorted(self.snapshot.running, key=lambda r: (not r.placement, r.job_id)):
            if r.pool in self.rooms:
                self.rooms[r.pool].run(r.job_id, r.tier, r.num_gpus, r.placement, self._end(r, promised))
        for rooms in self.rooms.values():
            rooms.ready()

    def _end(self, job: Running, promised: Mapping[str, float]) -> float:
        """When it is taken to end: as expected, after the handshake if it is being stopped, a little later if it overruns."""
        end = job.expected_end
        if job.stopping:
            if job.stopping_since is None:
                end = min(end, max(self.now, promised.get(job.stopping_for or "", self.now + self.rules.handshake_s)))
            else:
                end = min(end, job.stopping_since + self.rules.handshake_s)
        if end >= self.now - TIE_S:
            return max(end, self.now)
        return self.now + max(self.rules.overrun_least_s, self.rules.overrun_share * job.expected_s)

    def able(self, job: Waiting) -> list[Pool]:
        """Pools that could ever hold the job, the preferred first."""
        spot = may_use_spot(spot=job.spot, tier=job.tier, expected_s=job.expected_s)
        key = (job.tier, job.job_class, job.num_gpus, spot)
        if key not in self._able:
            pools = in_order(self.snapshot.pools, tier=job.tier, kind=job.job_class, num_gpus=job.num_gpus, spot=spot)
            self._able[key] = [p for p in pools if self.rooms[p.name].could_hold(job.num_gpus, job.tier)]
        return self._able[key]

    def names(self, job: Waiting) -> list[str]:
        """Of the pools that could ever hold the job."""
        return [p.name for p in self.able(job)]

    def _is_due(self, job: Waiting) -> bool:
        return overdue(job, job.waited(self.now), self.due[job.job_id]) >= 0.0

    # The walk

    def walk(self) -> bool:
        """Offer GPUs to each job in order; whether promised nodes were given back that others may have been refused for."""
        promised = [w for w in self.queue if w.promise]
        self.promises.keep(promised, {w.job_id: self.names(w) for w in promised})
        for job in promised:
            if job.job_id in self.promises.of:
                self._count(job)
        again = False
        for job in self.queue:
            pools = self.able(job)
            if not pools:
                continue
            old = self.promises.drop(job)
            start = self._start(job, pools, overtakes=bool(self.promises.of))
            if start is not None:
                again |= old is not None and (old.pool, old.placement) != (start.pool, start.placement)
            elif old is not None:
                self.promises.make(job, old)
                self._preempt(job, pools, old)
            else:
                self._block(job, pools)
        return again

    def _start(self, job: Waiting, pools: Sequence[Pool], *, overtakes: bool) -> Start | None:
        for pool in pools:
            rooms = self.rooms[pool.name]
            placement = rooms.fits_now(job.num_gpus, job.tier, length(job))
            if placement is not None:
                rooms.start(job.job_id, job.tier, placement, length(job))
                backfill = overtakes and job.promise is None
                start = Start(job_id=job.job_id, pool=pool.name, num_gpus=job.num_gpus, placement=placement, backfill=backfill)
                self.starts[job.job_id] = start
                return start
        return None

    def _block(self, job: Waiting, pools: Sequence[Pool]) -> None:
        """A promise for a blocked job, if there is one to give, and GPUs of others, if the rules say so."""
        open_in = [p.name for p in pools if self.slots.get((p.name, job.tier), 0) < self.rules.promises]
        promise = self.promises.plan(job, open_in) if open_in else None
        if promise is not None:
            self.promises.make(job, promise)
            self._count(job)
        self._preempt(job, pools, promise)

    def _count(self, job: Waiting) -> None:
        key = (self.promises.of[job.job_id].pool, job.tier)
        self.slots[key] = self.slots.get(key, 0) + 1

    def _preempt(self, job: Waiting, pools: Sequence[Pool], promise: Promise | None) -> None:
        """Rule 5."""
        premium, due = job.tier == RESERVED_FOR, self._is_due(job)
        if self.stopping_for.get(job.job_id) or job.job_id in self.stops or not (premium or self.rules.slicing):
            return
        if self.searches[premium] <= 0 or (promise and promise.start <= self.now + self.rules.handshake_s + TIE_S):
            return
        self.searches[premium] -= 1
        old = self.promises.drop(job)
        stops = self._cheapest(job, pools, premium=True, due=due) if premium else None
        if stops is None and self.rules.slicing:
            stops = self._cheapest(job, pools, premium=False, due=due)
        if stops is not None:
            self._stop(job, stops)
        elif old is not None:
            self.promises.make(job, old)

    def _cheapest(self, job: Waiting, pools: Sequence[Pool], *, premium: bool, due: bool) -> preemption.Stops | None:
        def yields(victim: Running) -> bool:
            if victim.job_id in self.stopped:
                return False
            if premium:
                return preemption.yields_to_premium(victim, job, now=self.now, rules=self.rules)
            patience = self.patience.get(victim.tier, 0.0)
            return preemption.yields_to_slice(victim, job, due=due, least_patience=patience, now=self.now, rules=self.rules)

        found: list[preemption.Stops] = []
        for pool in pools:
            victims = [v for v in self._preemptees(longest=not premium).get(pool.name, []) if yields(v)]
            stops = preemption.cheapest(job, self.rooms[pool.name], victims, now=self.now, rules=self.rules)
            if stops is not None:
                found.append(stops)
        return min(found, key=preemption.Stops.key, default=None)

    def _preemptees(self, *, longest: bool) -> dict[str, list[Running]]:
        """By pool, those whom the rules protect left out, in the order in which they give way."""
        if longest not in self._orders:
            open_to = [r for r in self.snapshot.running if not preemption.is_protected(r, now=self.now, rules=self.rules)]
            found: dict[str, list[Running]] = {}
            for r in preemption.order_preemptees(open_to, longest=longest, now=self.now, rules=self.rules):
                found.setdefault(r.pool, []).append(r)
            self._orders[longest] = found
        return self._orders[longest]

    def _stop(self, job: Waiting, stops: preemption.Stops) -> None:
        moment = self.now + self.rules.handshake_s
        ids = frozenset(v.job_id for v in stops.victims)
        self.rooms[stops.pool].end_sooner(ids, moment)
        self.promises.make(job, Promise(start=moment, pool=stops.pool, placement=stops.placement, made_at=self.now))
        self.stopped |= ids
        what = f"a {job.tier} job of {job.num_gpus} GPU(s)"
        why = "has the right of way" if job.tier == RESERVED_FOR else "is due" if self._is_due(job) else "is much shorter"
        self.stops[job.job_id] = [
            Preempt(
                job_id=v.job_id,
                for_job=job.job_id,
                lost_s=preemption.lost_s(v, now=self.now, rules=self.rules),
                detail=f"{what} {why}; the job saves a checkpoint, returns to the queue and goes on from there",
            )
            for v in stops.victims
        ]

    # The answer

    def after(self) -> Snapshot:
        """The snapshot after what this walk started; what it promised and stopped is thought over again."""
        started = [
            Running(
                job_id=w.job_id,
                pool=start.pool,
                num_gpus=w.num_gpus,
                expected_end=self.now + length(w),
                tier=w.tier,
                tenant=w.tenant,
                placement=start.placement,
                started_at=self.now,
                expected_s=w.expected_s,
                queued_at=w.queued_at,
                waited_s=w.waited(self.now),
                due_at=self.due[w.job_id],
                preemptions=w.preemptions,
            )
            for w in self.queue
            if (start := self.starts.get(w.job_id))
        ]
        waiting = [replace(w, due_at=self.due[w.job_id]) for w in (*self.queue, *self.last) if w.job_id not in self.starts]
        return replace(self.snapshot, waiting=waiting, running=[*self.snapshot.running, *started])

    def answer(self) -> list[Decision]:
        """Decisions about all jobs, in order."""
        waiting = [w for w in self.queue if w.job_id not in self.starts]
        promised = {job_id: (p.pool, p.start) for job_id, p in self.promises.of.items()}
        guesses = forecast(((w, self.names(w)) for w in waiting), self.rooms, promised, self.now)
        decisions: list[Decision] = []
        before: dict[str, int] = {}
        gpus = position = 0
        for job in [*self.queue, *self.last]:
            if job.job_id in self.starts:
                decisions.append(self.starts[job.job_id])
                continue
            position += 1
            stops = self.stops.get(job.job_id, [])
            decisions += stops
            ahead = Ahead(jobs=dict(before), num_gpus=gpus)
            before[job.tier] = before.get(job.tier, 0) + 1
            gpus += job.num_gpus
            decisions.append(self._wait(job, position, ahead, guesses.get(job.job_id), len(stops)))
        return decisions

    def _wait(self, job: Waiting, position: int, ahead: Ahead, guess: float | None, stops: int) -> Wait:
        promise = self.promises.of.get(job.job_id)
        rooms = [self.rooms[p.name] for p in self.able(job)]
        if job.tenant in self.barred:
            (reason, detail), start = self.barred[job.tenant], None
        elif not rooms:
            (reason, detail), start = explain.never(job), None
        else:
            stopping = stops or self.stopping_for.get(job.job_id, 0)
            reason, detail = explain.why(job, rooms, promise, stopping=stopping)
            start = explain.expected(job, promise, guess, rooms, self.now)
        return Wait(
            job_id=job.job_id,
            position=position,
            reason=reason,
            detail=detail,
            expected_start=start,
            ahead=ahead,
            due_at=self.due[job.job_id],
            promise=promise,
        )
