"""One scheduling decision: which jobs start, which are stopped, which wait and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from engine.scheduler import preemption
from engine.scheduler.kinds import Kind, Kinds
from engine.scheduler.model import Ahead, Decision, Preempt, Reason, Reservation, Running, Snapshot, Start, Wait, Waiting
from engine.scheduler.node_timeline import NEVER, ROUNDING_S
from engine.scheduler.order import OVERDUE, due_times, factors, forecast, max_queue_waits, ranked
from engine.scheduler.placement import TIE_S, PoolTimeline, ReservationPlan, length
from engine.scheduler.pools import RESERVED_FOR
from engine.scheduler.rules import DEFAULT_RULES, Rules

_Search = tuple[int, str, bool, tuple[str, ...]]
"""What a search for victims depends on beside a job's length: width, tier, whether it is due, pools."""
_Limit = tuple[str, str, bool]
"""What limits the number of reservations: pool, tier, and whether it is that of evaluations."""
PASSES = 3
"""Most passes over the queue in one cycle: when a job with a reservation starts, GPUs kept for it become available to others."""


def schedule(snapshot: Snapshot, *, now: float, rules: Rules = DEFAULT_RULES) -> list[Decision]:
    """Return decisions about every waiting job, and about running jobs that are stopped, in queue order.

    1. Jobs are taken in the order of :func:`.order.order`, which also determines when a job is due.
    2. Pools are tried in the order of :func:`engine.scheduler.pools.in_order`: spot first for jobs that may use it.
    3. A gang starts whole or not at all, on nodes chosen by :class:`.placement.PoolTimeline`.
    4. Nothing starts that would delay a reservation (:class:`.placement.ReservationPlan`). In each pool and tier,
       :attr:`.rules.Rules.promises` blocked jobs have one, those that needed one first, and as many blocked evaluations; jobs that start
       now, and jobs that others are stopped for, do not count.
    5. Running jobs are stopped (:mod:`.preemption`), and their GPUs reserved for the job that needs them, unless it has a reservation that
       starts as early,

       1. for a premium job: jobs of lower tiers;
       2. for a job that is due, or much shorter: jobs of its own tier or a lower one that have run for a while, never premium ones.
    6. A gang that no pool can ever hold waits forever with that reason, and blocks no other job.
    7. Jobs of capped or suspended tenants, and jobs under maintenance, come last; they do not start and block no other job. A cap does not
       bar the evaluation that follows a job's training. A pool under maintenance is skipped as long as another one could hold the job.
    """
    this = _Round(snapshot, now, rules)
    this.walk()
    return this.answer()


def projected_start(snapshot: Snapshot, job_id: str, *, now: float, rules: Rules = DEFAULT_RULES) -> float | None:
    """Return when the waiting job `job_id` starts if jobs take as long as expected and none is added; None: never, or not known."""
    decisions = schedule(snapshot, now=now, rules=replace(rules, slicing=False))
    for decision in decisions:
        if decision.job_id == job_id:
            if isinstance(decision, Start):
                return now
            if isinstance(decision, Wait):
                return decision.expected_start
    return None


class _Round:
    """State of one decision: node timelines, reservations and the decisions so far."""

    def __init__(self, snapshot: Snapshot, now: float, rules: Rules) -> None:
        self.snapshot, self.now, self.rules = snapshot, now, rules
        self.timelines = {p.name: PoolTimeline(p, now) for p in snapshot.pools}
        self._run()
        self._kinds = Kinds(snapshot, self.timelines)
        self.kinds = {w.job_id: self._kinds.of(w) for w in snapshot.waiting}
        bars = snapshot.suspended or snapshot.closed_to or snapshot.closed or snapshot.capped
        self.blocked = {w.job_id: why for w in snapshot.waiting if (why := self._blocked(w)) is not None} if bars else {}
        """Why jobs may not start now, whatever is free."""
        admissible = [w for w in snapshot.waiting if w.evaluation is None and w.job_id not in self.blocked]
        due = due_times(admissible, self.kinds, self.timelines, now=now, rules=rules)
        self.max_queue_waits = max_queue_waits(admissible, self.kinds, due)
        self.due: dict[str, float | None] = {w.job_id: due.get(w.job_id, w.due_at) for w in snapshot.waiting}
        every = ranked(snapshot.waiting, now=now, rules=rules, fair=factors(snapshot, rules=rules), due=due)
        self.queue = [w for _, w in every if w.job_id not in self.blocked]
        self.last = [w for _, w in every if w.job_id in self.blocked]
        self.overdue = {w.job_id for rank, w in every if rank[1] == OVERDUE}
        self.reservations = ReservationPlan(self.timelines, now)
        self.starts: dict[str, Start] = {}
        self.stops: dict[str, list[Preempt]] = {}
        self.stopped: set[str] = set()
        """Jobs stopped in this cycle."""
        self.stopping_for: dict[str, int] = {}
        self.served: set[str] = set()
        """Jobs for which others have been stopping for less than the handshake: no further victims are sought."""
        for r in snapshot.running:
            if r.stopping and r.stopping_for:
                self.stopping_for[r.stopping_for] = self.stopping_for.get(r.stopping_for, 0) + 1
                if r.stopping_since is None or now < r.stopping_since + rules.handshake_s:
                    self.served.add(r.stopping_for)
        self.slots: dict[_Limit, int] = {}
        """Number of blocked jobs with one of the limited reservations."""
        self.heads: dict[str, _Limit] = {}
        """Those jobs, with what limits them."""
        self.refused: dict[bool, dict[Kind, float]] = {False: {}, True: {}}
        """Shortest duration of a job that was given nothing, by whether it is overdue and by kind: a longer one would be given nothing
        either, until a reservation is dropped or GPUs are to be released."""
        self.failed: dict[_Search, float] = {}
        """Shortest length for which no victims were found: longer jobs find none either."""
        self._orders: dict[bool, dict[str, list[Running]]] = {}
        self._reasons: dict[Kind, tuple[Reason, str]] = {}
        self.searches = {True: rules.preemptors, False: rules.preemptors}

    def _blocked(self, job: Waiting) -> tuple[Reason, str] | None:
        if (suspended := self.snapshot.suspended.get(job.tenant)) is not None:
            return Reason.TENANT_SUSPENDED, suspended
        closed = self.snapshot.closed_to.get(job.tenant) or next((self.snapshot.closed.get(name) for name in self._pools(job)), None)
        if closed is not None:
            return Reason.MAINTENANCE, closed
        capped = self.snapshot.capped.get(job.tenant)
        held_before = job.evaluation is not None and job.evaluation.id is None
        return None if capped is None or held_before else (Reason.WAITING_FOR_QUOTA, capped)

    # Running jobs

    def _run(self) -> None:
        promised = {w.job_id: w.promise.start for w in self.snapshot.waiting if w.promise}
        passed = [w.promise for w in self.snapshot.waiting if w.promise and w.promise.start < self.now - self.rules.handshake_s - TIE_S]
        self._missed = {(p.pool, name) for p in passed for name, _ in p.placement}
        for r in sorted(self.snapshot.running, key=lambda r: (not r.placement, r.job_id)):
            if r.pool in self.timelines:
                self.timelines[r.pool].run(r.job_id, r.tier, r.num_gpus, r.placement, self._end(r, promised))
        for timelines in self.timelines.values():
            timelines.ready()

    def _end(self, job: Running, promised: Mapping[str, float]) -> float:
        """Return the assumed end of a running job: as expected; one handshake after it was asked to stop, or two if that takes longer; a
        little later if it overruns."""
        end, late = job.expected_end, max(self.rules.overrun_least_s, self.rules.overrun_share * job.expected_s)
        if job.stopping:
            late = self.rules.handshake_s
            if job.stopping_since is not None:
                end = min(end, job.stopping_since + self.rules.handshake_s)
            else:
                end = min(end, max(self.now, promised.get(job.stopping_for or "", self.now + self.rules.handshake_s)))
        elif end <= self.now + TIE_S and any((job.pool, name) in self._missed for name, _ in job.placement):
            return self.now + late  # it should have ended already
        return max(end, self.now) if end >= self.now - TIE_S else self.now + late

    def _pools(self, job: Waiting) -> tuple[str, ...]:
        """Return the pools that could ever hold the job, preferred first."""
        return self.kinds[job.job_id].pools

    # Walking the queue

    def walk(self) -> None:
        """Offer GPUs to each job in order; repeat while reservations were released that others may have been refused for."""
        promised = [w for w in self.queue if w.promise]
        self.reservations.keep(promised, {w.job_id: self._pools(w) for w in promised})
        held = [job for job in promised if job.job_id in self.reservations.of]
        for job in held:
            self._count(job)
        for job in held:
            self._sooner(job)
        for i in range(PASSES):
            if not self._offer(again=bool(i)):
                break

    def _offer(self, *, again: bool) -> bool:
        """Offer GPUs to each job in order; returns whether another pass may help."""
        given_back = False
        before: set[str] = set()
        self._forget_failures()
        of = self.reservations.of
        for job in self.queue:
            job_id, kind = job.job_id, self.kinds[job.job_id]
            refused = self.refused[job_id in self.overdue].get(kind, NEVER) <= job.expected_s
            if refused and job_id not in of and job_id not in self.stopping_for:
                continue
            if not kind.pools or job_id in self.starts or job_id in self.stops:
                continue
            if (old := self.reservations.drop(job)) is not None:
                self._forget_refused()
            start = self._start(job, kind, before)
            if start is not None:
                given_back |= self._uncount(job) or (old is not None and (old.pool, old.placement) != (start.pool, start.placement))
                continue
            if old is not None:
                self.reservations.make(job, old)
                if again:
                    self._sooner(job)
                given_back |= self._preempt(job, kind)
            else:
                self._block(job, kind)
            if (now_has := of.get(job_id)) is not None:
                before.add(now_has.pool)
        return given_back

    def _start(self, job: Waiting, kind: Kind, before: Collection[str]) -> Start | None:
        """`before`: pools in which an earlier job in the order holds a reservation."""
        for pool in kind.pools:
            timelines = self.timelines[pool]
            placement = timelines.fits_now(job.num_gpus, job.tier, length(job) - ROUNDING_S)
            if placement is not None:
                timelines.start(job.job_id, job.tier, placement, length(job))
                backfill = pool in before and job.promise is None
                start = Start(
                    job_id=job.job_id, pool=pool, num_gpus=job.num_gpus, placement=placement, backfill=backfill,
                    evaluation=job.evaluation,
                )  # fmt: skip
                self.starts[job.job_id] = start
                return start
        return None

    def _block(self, job: Waiting, kind: Kind) -> None:
        """Reserve GPUs for a blocked job if possible, and stop other jobs for it if the rules allow."""
        pools = self._open(job)
        promise = self.reservations.plan(job, pools)
        if promise is not None:
            self.reservations.make(job, promise)
            self._count(job)
            self._forget_refused()
        self._preempt(job, kind)
        if not pools and job.job_id not in self.stops:
            self.refused[job.job_id in self.overdue][kind] = job.expected_s

    def _forget_failures(self) -> None:
        self.failed.clear()
        self._forget_refused()

    def _forget_refused(self) -> None:
        for shortest in self.refused.values():
            shortest.clear()

    def _open(self, job: Waiting) -> Sequence[str]:
        """Return the pools in which another job of its tier and kind may get a reservation; any pool if others are stopped for it."""
        if job.job_id in self.stopping_for:
            return self._pools(job)
        return [name for name in self._pools(job) if self.slots.get(_limit(job, name), 0) < self.rules.promises]

    def _sooner(self, job: Waiting) -> None:
        """Move its reservation to an earlier start, or make one if it may have one."""
        self._uncount(job)
        own, to = self.reservations.of[job.job_id].pool, self._open(job)
        self.reservations.sooner(job, [name for name in self._pools(job) if name == own or name in to])
        self._count(job)

    def _count(self, job: Waiting) -> None:
        """Count its reservation among the limited ones of its pool and tier, unless it starts now or others are stopped for it."""
        promise = self.reservations.of[job.job_id]
        if job.job_id not in self.stopping_for and promise.start > self.now + TIE_S:
            key = self.heads[job.job_id] = _limit(job, promise.pool)
            self.slots[key] = self.slots.get(key, 0) + 1

    def _uncount(self, job: Waiting) -> bool:
        """Whether its reservation was one of the limited ones; another job may have it from now on."""
        key = self.heads.pop(job.job_id, None)
        if key is not None:
            self.slots[key] -= 1
        return key is not None

    def _preempt(self, job: Waiting, kind: Kind) -> bool:
        """Apply rule 5; returns whether the job released one of the limited reservations of a pool and tier."""
        premium, due, soon = job.tier == RESERVED_FOR, job.job_id in self.overdue, self.rules.handshake_s + TIE_S
        if (
            job.evaluation is not None
            or job.job_id in self.stops
            or job.job_id in self.served
            or not (premium or self.rules.slicing)
            or self.searches[premium] <= 0
        ):
            return False
        promise = self.reservations.of.get(job.job_id)
        if promise is not None and promise.start <= self.now + soon:
            return False
        search = (job.num_gpus, job.tier, due, kind.pools)
        if promise is None and self.failed.get(search, NEVER) <= length(job):
            return False
        old, left = self.reservations.drop(job), self.searches[premium]
        stops = self._cheapest(job, kind, premium=True, due=due) if premium else None
        if stops is None and self.rules.slicing:
            stops = self._cheapest(job, kind, premium=False, due=due)
        self.searches[premium] = max(self.searches[premium], left - 1)
        if stops is not None:
            self._stop(job, stops)
            return self._uncount(job)
        self.failed[search] = min(length(job), self.failed.get(search, NEVER))
        if old is not None:
            self.reservations.make(job, old)
        return False

    def _cheapest(self, job: Waiting, kind: Kind, *, premium: bool, due: bool) -> preemption.Stops | None:
        found: list[preemption.Stops] = []
        looked = False
        for pool in kind.pools:
            victims = [v for v in self._preemptees(premium=premium).get(pool, []) if v.job_id not in self.stopped]
            if not premium:
                victims = [v for v in victims if preemption.makes_room(v, job, due=due, now=self.now, rules=self.rules)]
            looked |= bool(victims)
            stops = preemption.cheapest(job, self.timelines[pool], victims, now=self.now, rules=self.rules)
            if stops is not None:
                found.append(stops)
        self.searches[job.tier == RESERVED_FOR] -= looked
        return min(found, key=preemption.Stops.key, default=None)

    def _preemptees(self, *, premium: bool) -> dict[str, list[Running]]:
        """Return candidates to stop for premium jobs, or for others, by pool, in the order in which they would be stopped."""
        if premium not in self._orders:
            open_to = [r for r in self.snapshot.running if self._is_candidate(r, premium=premium)]
            found: dict[str, list[Running]] = {}
            for r in preemption.order_preemptees(open_to, longest=not premium, now=self.now, rules=self.rules):
                found.setdefault(r.pool, []).append(r)
            self._orders[premium] = found
        return self._orders[premium]

    def _is_candidate(self, job: Running, *, premium: bool) -> bool:
        if job.tier == RESERVED_FOR or preemption.is_protected(job, now=self.now, rules=self.rules):
            return False
        if premium:
            return True
        least_queue_wait = self.max_queue_waits.get(self._kinds.of(job).group, 0.0)
        return preemption.yields_to_slice(job, least_queue_wait=least_queue_wait, now=self.now, rules=self.rules)

    def _stop(self, job: Waiting, stops: preemption.Stops) -> None:
        moment = self.now + self.rules.handshake_s
        ids = frozenset(v.job_id for v in stops.victims)
        self.timelines[stops.pool].end_sooner(ids, moment)
        self.reservations.make(job, Reservation(start=moment, pool=stops.pool, placement=stops.placement, made_at=self.now))
        self.stopped |= ids
        self._forget_failures()
        what = f"a {job.tier} job for {_gpus(job.num_gpus)}"
        why = "takes precedence" if job.tier == RESERVED_FOR else "is due" if job.job_id in self.overdue else "is much shorter"
        self.stops[job.job_id] = [
            Preempt(
                job_id=v.job_id,
                for_job=job.job_id,
                lost_s=preemption.lost_s(v, now=self.now, rules=self.rules),
                detail=f"{what} {why}; the job saves a checkpoint, returns to the queue and resumes from there",
            )
            for v in stops.victims
        ]

    # Decisions

    def answer(self) -> list[Decision]:
        """Return decisions about all jobs, in order. An evaluation that waits has no place in the queue of jobs."""
        waiting = [w for w in self.queue if w.job_id not in self.starts]
        promised = {job_id: (p.pool, p.start) for job_id, p in self.reservations.of.items()}
        guesses = forecast(((w, self.kinds[w.job_id].pools) for w in waiting), self.timelines, promised, self.now)
        decisions: list[Decision] = []
        before: dict[str, int] = {}
        gpus = position = 0
        for job in [*self.queue, *self.last]:
            if job.job_id in self.starts:
                decisions.append(self.starts[job.job_id])
                continue
            if job.evaluation is not None:
                decisions.append(self._wait(job, 0, Ahead(jobs={}, num_gpus=0), guesses.get(job.job_id), 0))
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
        promise = self.reservations.of.get(job.job_id)
        kind, start = self.kinds[job.job_id], None
        if (blocked := self.blocked.get(job.job_id)) is not None:
            reason, detail = blocked
        elif not kind.pools:
            reason, detail = never(job)
        else:
            reason, detail = self._why(job, kind, promise, stops + self.stopping_for.get(job.job_id, 0))
            start = guess if promise is None else max(self.now, promise.start)
        return Wait(
            job_id=job.job_id,
            position=position,
            reason=reason,
            detail=detail,
            expected_start=start,
            ahead=ahead,
            due_at=self.due[job.job_id],
            promise=promise,
            evaluation=job.evaluation,
        )

    def _why(self, job: Waiting, kind: Kind, promise: Reservation | None, stopping: int) -> tuple[Reason, str]:
        """Return the result of :func:`why`, which is the same for all jobs of a kind without a reservation."""
        if promise is None and kind in self._reasons:
            return self._reasons[kind]
        found = why(job, [self.timelines[name] for name in kind.pools], promise, stopping=stopping)
        if promise is None:
            self._reasons[kind] = found
        return found


def _limit(job: Waiting, pool: str) -> _Limit:
    return pool, job.tier, job.evaluation is not None


def never(job: Waiting) -> tuple[Reason, str]:
    if job.evaluation is not None:
        kind = f"of tier {job.tier} and class {job.job_class}"
        on_a_node = f" on a node with {job.num_gpus} GPUs in service" if job.num_gpus > 1 else ""
        return Reason.EXCEEDS_MAX_QUOTA, f"no pool takes a job {kind}{on_a_node}; it starts when an operator has added one"
    most = f"no pool gives that many GPUs to one job of tier {job.tier} and class {job.job_class}"
    return Reason.EXCEEDS_MAX_QUOTA, f"num_gpus is {job.num_gpus}; {most}. Request fewer GPUs or another recipe"


def why(job: Waiting, pools: Sequence[PoolTimeline], promise: Reservation | None, *, stopping: int) -> tuple[Reason, str]:
    """Return reason and detail for a job that some pool could hold.

    1. Others are being stopped for it: ``WaitingForPreemptedWorkloads``.
    2. Too few GPUs are free in its pool: ``WaitingForQuota``.
    3. Enough are free, but kept for premium jobs: ``ReservedForPremium``.
    4. Enough are free, but not close enough together: ``TopologyPlacementFailed``.
    5. Enough are free and together, but reserved for another job: ``WaitingBehindHead``.
    """
    pool = next((p for p in pools if promise and p.pool.name == promise.pool), pools[0])
    gpus = _gpus(job.num_gpus)
    kept = "; it has a reservation" if promise else ""
    if stopping and promise:
        return Reason.WAITING_FOR_PREEMPTED_WORKLOADS, (
            f"{stopping} running {'job is' if stopping == 1 else 'jobs are'} saving checkpoints to release {gpus} of pool {promise.pool}"
        )
    free = pool.idle
    away = pool.pool.total_gpus - pool.pool.num_gpus
    needs = f"needs {gpus} of pool {pool.pool.name}, {free} of {pool.pool.num_gpus} are free"
    needs += f" ({away} more are out of service)" if away else ""
    if free < job.num_gpus:
        return Reason.WAITING_FOR_QUOTA, needs + kept
    if job.tier != RESERVED_FOR and pool.shared.free < job.num_gpus:
        reserved = f"{pool.pool.reserved_gpus} of the pool are reserved for premium jobs"
        return Reason.RESERVED_FOR_PREMIUM, f"{needs}, and {reserved}{kept}"
    if not pool.together(job.num_gpus):
        where = "on one node" if job.num_gpus <= pool.largest else "as whole nodes of one fabric"
        return Reason.TOPOLOGY_PLACEMENT_FAILED, f"{needs}, but not {where}{kept}"
    return Reason.WAITING_BEHIND_HEAD, f"{needs}, but jobs ahead have reserved them and this one would end too late{kept}"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
