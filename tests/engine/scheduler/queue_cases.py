"""Small queues for the policy's tests, and a player that takes a queue to its end with exact estimates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.scheduler import DEFAULT_RULES, Decision, Preempt, Reservation, Rules, Running, Snapshot, Start, Wait, Waiting, schedule
from engine.scheduler.pools import Pool, equal_nodes

NOW = 1_000_000.0
HOUR = 3600.0


def pool(
    gpus: int, *, per_node: int | None = None, reserved: int = 0, fabrics_of: int = 0, name: str = "p", widest: int | None = None
) -> Pool:
    of = equal_nodes(gpus, per_node=per_node or gpus, fabrics_of=fabrics_of)
    return Pool(name=name, nodes=of, gpu_type="local", max_gpus_per_job=widest or gpus, reserved_gpus=reserved)


def waiting(
    job_id: str, *, gpus: int = 1, tier: str = "standard", waited: float = 0.0, expected: float = 600.0, promise: Reservation | None = None
) -> Waiting:
    queued = NOW - waited
    return Waiting(
        job_id=job_id, tenant="t", tier=tier, num_gpus=gpus, queued_at=queued, expected_s=expected, waiting_since=queued, promise=promise
    )


def running(
    job_id: str, gpus: int, *, ends_in: float = 60.0, tier: str = "standard", ran: float = 0.0, node: str = "", stops: int = 0
) -> Running:
    return Running(
        job_id=job_id,
        pool="p",
        num_gpus=gpus,
        expected_end=NOW + ends_in,
        tier=tier,
        placement=((node, gpus),) if node else (),
        started_at=NOW - ran,
        expected_s=ran + ends_in,
        queued_at=NOW - ran,
        due_at=NOW + 100 * HOUR,
        preemptions=stops,
    )


def decide(jobs: Sequence[Waiting], held: Sequence[Running], of: Pool, *, rules: Rules = DEFAULT_RULES) -> dict[str, Start | Wait]:
    decisions = schedule(Snapshot(pools=[of], waiting=jobs, running=held), now=NOW, rules=rules)
    return {d.job_id: d for d in decisions if not isinstance(d, Preempt)}


def stopped(jobs: Sequence[Waiting], held: Sequence[Running], of: Pool, *, rules: Rules = DEFAULT_RULES) -> list[tuple[str, str]]:
    """Who gives way, for whom."""
    decisions = schedule(Snapshot(pools=[of], waiting=jobs, running=held), now=NOW, rules=rules)
    return [(d.job_id, d.for_job) for d in decisions if isinstance(d, Preempt)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    submitted: float
    num_gpus: int
    seconds: float
    tier: str = "standard"


@dataclass(kw_only=True, slots=True)
class Played:
    """What happened when a queue was played to its end."""

    started: dict[str, float] = field(default_factory=dict)
    """First start, by job."""
    ended: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    stops: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    """Stops that nobody was asked for."""
    promises: int = 0
    broken: list[str] = field(default_factory=list)


def play(
    jobs: Sequence[Job],
    pools: Sequence[Pool],
    *,
    rules: Rules = DEFAULT_RULES,
    release_s: float = 30.0,
    load_s: float = 120.0,
    drop_every: int = 0,
) -> Played:
    """Take the queue to its end: every estimate is exact, a stopped job releases after `release_s` and loads for `load_s`.

    GPUs are counted node by node after every round; a start later than what was promised is noted. Of the stops, every `drop_every`-th
    is not asked for. What was promised before such a one, or before a release that takes longer than the handshake, is not held against
    anybody.
    """
    player = _Player(jobs, pools, rules, release_s, load_s, drop_every)
    while player.events:
        player.step()
    assert not player.queue and not player.held, (player.queue, player.held)
    return player.played


class _Player:
    def __init__(self, jobs: Sequence[Job], pools: Sequence[Pool], rules: Rules, release_s: float, load_s: float, drop_every: int) -> None:
        self.jobs = {f"j{i:04}": job for i, job in enumerate(jobs)}
        self.pools, self.rules, self.release_s, self.load_s, self.drop_every = pools, rules, release_s, load_s, drop_every
        self.asked = 0
        self.queue: dict[str, Waiting] = {}
        self.held: dict[str, Running] = {}
        self.promised: dict[str, float] = {}
        self.played = Played()
        self.events: list[tuple[float, int, str, float]] = [(job.submitted, 0, job_id, 0.0) for job_id, job in self.jobs.items()]
        heapq.heapify(self.events)

    def step(self) -> None:
        now = self.events[0][0]
        while self.events and self.events[0][0] <= now:
            _, kind, job_id, attempt = heapq.heappop(self.events)
            (self._arrive, self._end, self._release, lambda *_: None)[kind](job_id, attempt, now)
        for d in schedule(
            Snapshot(pools=self.pools, waiting=[*self.queue.values()], running=[*self.held.values()]), now=now, rules=self.rules
        ):
            self._apply(d, now)
        if any(r.stopping_since is not None and now > r.stopping_since + self.rules.handshake_s for r in self.held.values()):
            self.promised.clear()
        self._count()
        if self.queue and not self.events:
            heapq.heappush(self.events, (now + 60.0, 3, "", 0.0))

    def _arrive(self, job_id: str, _: float, now: float) -> None:
        job = self.jobs[job_id]
        self.queue[job_id] = Waiting(
            job_id=job_id, tenant="t", tier=job.tier, num_gpus=job.num_gpus, queued_at=now, expected_s=job.seconds, waiting_since=now
        )

    def _end(self, job_id: str, attempt: float, now: float) -> None:
        if job_id in self.held and self.held[job_id].started_at == attempt:
            self.played.ended[job_id] = now
            del self.held[job_id]

    def _release(self, job_id: str, attempt: float, now: float) -> None:
        r = self.held.get(job_id)
        if r is None or r.started_at != attempt:
            return
        del self.held[job_id]
        left = r.expected_end - now + self.load_s
        self.queue[job_id] = Waiting(
            job_id=job_id, tenant="t", tier=r.tier, num_gpus=r.num_gpus, queued_at=r.queued_at, expected_s=left, waiting_since=now,
            waited_s=r.waited_s, preemptions=r.preemptions + 1, due_at=r.due_at,
        )  # fmt: skip

    def _apply(self, d: Decision, now: float) -> None:
        if isinstance(d, Preempt):
            assert not self.held[d.job_id].stopping
            assert self.held[d.job_id].tier != "premium", "premium jobs give way to nobody"
            self.asked += 1
            if self.drop_every and self.asked % self.drop_every == 0:
                self.promised.clear()
                self.played.dropped += 1
                return
            self.held[d.job_id] = replace(self.held[d.job_id], stopping=True, stopping_for=d.for_job, stopping_since=now)
            self.played.stops[d.job_id] = self.played.stops.get(d.job_id, 0) + 1
            heapq.heappush(self.events, (now + self.release_s, 2, d.job_id, self.held[d.job_id].started_at))
        elif isinstance(d, Wait):
            self.queue[d.job_id] = replace(self.queue[d.job_id], due_at=d.due_at, promise=d.promise)
            if d.promise is not None:
                self.played.promises += 1
                self.promised[d.job_id] = min(d.promise.start, self.promised.get(d.job_id, d.promise.start))
        else:
            self._start(d, now)

    def _start(self, d: Start, now: float) -> None:
        w = self.queue.pop(d.job_id)
        if now > self.promised.pop(d.job_id, now) + 1.0:
            self.played.broken.append(d.job_id)
        self.played.started.setdefault(d.job_id, now)
        self.played.waited[d.job_id] = w.waited(now)
        self.held[d.job_id] = Running(
            job_id=d.job_id, pool=d.pool, num_gpus=w.num_gpus, expected_end=now + w.expected_s, tier=w.tier, tenant=w.tenant,
            placement=d.placement, started_at=now, expected_s=max(w.expected_s, self.jobs[d.job_id].seconds), queued_at=w.queued_at,
            waited_s=w.waited(now), due_at=w.due_at, preemptions=w.preemptions,
        )  # fmt: skip
        heapq.heappush(self.events, (now + w.expected_s, 1, d.job_id, now))

    def _count(self) -> None:
        for of in self.pools:
            here = [r for r in self.held.values() if r.pool == of.name]
            whole = {n.name: n.num_gpus for n in of.nodes}
            sizes = dict(whole)
            fabric = {n.name: n.fabric for n in of.nodes}
            for r in here:
                assert sum(n for _, n in r.placement) == r.num_gpus, "a gang is whole"
                assert len({fabric[name] for name, _ in r.placement}) == 1, "a gang stays inside one fabric"
                assert len(r.placement) == 1 or r.num_gpus > max(whole.values()), "a gang that fits on a node is on one"
                for name, n in r.placement:
                    sizes[name] -= whole[name] if of.packing == "whole_node" else n
            assert min(sizes.values()) >= 0, "no node is overbooked"
            lower = sum(r.num_gpus for r in here if r.tier != "premium")
            assert lower <= of.num_gpus - of.reserved_gpus, "reserved GPUs are kept"
