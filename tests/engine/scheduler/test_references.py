"""Timelines, placements, stops and forecasts, each against a slow reference that looks at every moment, node and set of victims."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from itertools import chain, combinations

import pytest

from engine.scheduler import Placement, Reservation, Rules, Running, Waiting
from engine.scheduler.node_timeline import NEVER
from engine.scheduler.order import forecast
from engine.scheduler.placement import PoolTimeline
from engine.scheduler.pools import Node, Pool
from engine.scheduler.preemption import Stops, cheapest, lost_s, order_preemptees
from tests.engine.scheduler.queue_cases import NOW, waiting

TIERS = ("premium", "standard", "free")
Held = tuple[str, str, int, float, float]
"""Job, node, GPUs, from, to."""


class Cluster:
    """A pool with what runs and what is promised, as the scheduler has it (`timeline`) and as a plain list (`held`)."""

    def __init__(self, rng: random.Random, *, whole: bool = False, sizes: Sequence[int] = (2, 4, 8), jobs: int = 12) -> None:
        self.rng = rng
        nodes = [Node(name=f"n{i}", num_gpus=rng.choice(sizes), fabric=rng.choice("ab")) for i in range(rng.randint(2, 5))]
        total = sum(n.num_gpus for n in nodes)
        self.pool = Pool(
            name="p", nodes=tuple(nodes), gpu_type="h", max_gpus_per_job=total, reserved_gpus=rng.choice([0, 0, rng.randint(1, total - 1)]),
            packing="whole_node" if whole else "dense",
        )  # fmt: skip
        self.whole, self.nodes = whole, {n.name: n for n in nodes}
        self.largest = max(n.num_gpus for n in nodes)
        self.held: list[Held] = []
        self.tier: dict[str, str] = {}
        self.running: list[Running] = []
        self.timeline = PoolTimeline(self.pool, NOW)
        for i in range(rng.randint(0, jobs)):
            self._run(f"r{i}")
        self.timeline.ready()
        for i in range(rng.randint(0, 6)):
            rng.choice([self._promise, self._promise, self._void, self._start])(f"{i}")

    def _run(self, job_id: str) -> None:
        name, tier = self.rng.choice(sorted(self.nodes)), self.rng.choice(TIERS)
        n, end = self.rng.randint(1, self.nodes[name].num_gpus), NOW + self.rng.randint(1, 40) * 100
        if self.fits(((name, n),), tier, NOW, NEVER):
            self.hold(job_id, tier, ((name, n),), NOW, end)
            self.timeline.run(job_id, tier, n, ((name, n),), end)
            started = NOW - self.rng.randint(1, 50) * 100
            self.running.append(
                Running(
                    job_id=job_id, pool="p", num_gpus=n, expected_end=end, tier=tier, placement=((name, n),), started_at=started,
                    queued_at=started, due_at=NOW + self.rng.choice([-1e5, 1e5]),
                )
            )  # fmt: skip

    def _start(self, number: str) -> None:
        tier, length = self.rng.choice(TIERS), self.rng.randint(1, 20) * 100.0
        placement = self.timeline.fits_now(self.rng.randint(1, self.largest), tier, length)
        if placement is not None:
            self.timeline.start(f"s{number}", tier, placement, length)
            self.hold(f"s{number}", tier, placement, NOW, NOW + length)

    def _void(self, _: str) -> None:
        promised = sorted({job for job, *_ in self.held if job.startswith("c")})
        if promised:
            job_id = self.rng.choice(promised)
            self.timeline.unclaim(job_id, tuple((name, n) for job, name, n, *_ in self.held if job == job_id))
            self.held = [h for h in self.held if h[0] != job_id]

    def _promise(self, number: str) -> None:
        job_id, tier, length = f"c{number}", self.rng.choice(TIERS), self.rng.randint(1, 20) * 100.0
        start, placement = self.timeline.earliest(self.rng.randint(1, self.largest + 2), tier, length, NOW + self.rng.choice([0, 0, 700]))
        if start < NEVER:
            self.timeline.claim(job_id, tier, Reservation(start=start, pool="p", placement=placement, made_at=NOW), length)
            self.hold(job_id, tier, placement, start, start + length)

    def takes(self, name: str, n: int) -> int:
        return self.nodes[name].num_gpus if self.whole else n

    def hold(self, job_id: str, tier: str, placement: Placement, start: float, end: float) -> None:
        self.tier[job_id] = tier
        self.held += [(job_id, name, self.takes(name, n), start, end) for name, n in placement]

    def free(self, name: str, at: float) -> int:
        return self.nodes[name].num_gpus - sum(n for _, node, n, start, end in self.held if node == name and start <= at < end)

    def unreserved(self, at: float) -> int:
        lower = [n for job, _, n, start, end in self.held if self.tier[job] != "premium" and start <= at < end]
        return self.pool.num_gpus - self.pool.reserved_gpus - sum(lower)

    def moments(self, start: float, end: float = NEVER) -> list[float]:
        """At which something begins or ends."""
        return sorted({start} | {t for h in self.held for t in h[3:] if start < t < end})

    def fits(self, placement: Placement, tier: str, start: float, end: float) -> bool:
        """Whether these nodes, and the GPUs that are not reserved, are free at every moment."""
        takes = [(name, self.takes(name, n)) for name, n in placement]
        if any(n > self.nodes[name].num_gpus for name, n in placement):
            return False
        return all(
            all(self.free(name, at) >= n for name, n in takes) and (tier == "premium" or self.unreserved(at) >= sum(n for _, n in takes))
            for at in self.moments(start, end)
        )

    def on_a_node(self, num_gpus: int, tier: str, start: float, length: float) -> list[str]:
        """Nodes on which the gang fits, the fullest first."""
        found = [name for name in self.nodes if self.fits(((name, num_gpus),), tier, start, start + length)]
        return sorted(found, key=lambda name: (self.free_now(name), name))

    def free_now(self, name: str) -> int:
        """What no running job holds, promised or not."""
        return self.nodes[name].num_gpus - sum(n for job, node, n, *_ in self.held if node == name and not job.startswith("c"))

    def once_stopped(self, job_ids: Iterable[str], at: float) -> Cluster:
        """The plain list as it is if these jobs release their GPUs at `at`."""
        other, ids = copy.copy(self), set(job_ids)
        other.held = [(job, name, n, start, min(end, at) if job in ids else end) for job, name, n, start, end in self.held]
        return other


def clusters(num: int, *, whole: bool = False, sizes: Sequence[int] = (2, 4, 8), jobs: int = 12) -> Iterable[tuple[Cluster, random.Random]]:
    for seed in range(num):
        rng = random.Random(seed)
        yield Cluster(rng, whole=whole, sizes=sizes, jobs=jobs), rng


PACKINGS = pytest.mark.parametrize("whole", [False, True], ids=["dense", "whole nodes"])


@PACKINGS
def test_a_gang_that_fits_on_a_node_starts_on_the_fullest_one_that_is_free_for_as_long_as_it_runs(whole: bool) -> None:
    seen = set()
    for cluster, rng in clusters(250, whole=whole):
        for tier in TIERS:
            n, length = rng.randint(1, cluster.largest), rng.randint(1, 45) * 100.0
            fits = cluster.on_a_node(n, tier, NOW, length)
            found = cluster.timeline.fits_now(n, tier, length)
            seen.add(bool(fits))
            if fits and (not whole or tier == "premium" or not cluster.pool.reserved_gpus):
                assert found == ((fits[0], n),)
            else:
                assert found is None or cluster.fits(found, tier, NOW, NOW + length)
    assert seen == {True, False}


@PACKINGS
def test_the_earliest_start_on_a_node_is_the_first_moment_at_which_one_is_free_for_the_whole_length(whole: bool) -> None:
    seen = set()
    for cluster, rng in clusters(250, whole=whole, sizes=(4,) if whole else (2, 4, 8)):
        for tier in TIERS:
            n, length, after = rng.randint(1, cluster.largest), rng.randint(1, 45) * 100.0, NOW + rng.choice([0, 150, 1000])
            first = next((t for t in cluster.moments(after) if cluster.on_a_node(n, tier, t, length)), NEVER)
            start, placement = cluster.timeline.earliest(n, tier, length, after)
            assert start == first
            if start < NEVER:
                assert cluster.fits(placement, tier, start, start + length)
                assert cluster.timeline.when_free(placement, tier, length, after) == start
                seen.add(start > after)
    assert seen == {True, False}


@PACKINGS
def test_a_wide_gang_gets_whole_nodes_of_one_fabric_that_are_free_for_its_whole_length(whole: bool) -> None:
    seen = []
    for cluster, rng in clusters(300, whole=whole, sizes=(2, 4), jobs=4):
        total = cluster.pool.num_gpus
        if total <= cluster.largest + 1:
            continue
        n, length, tier = rng.randint(cluster.largest + 1, total), rng.randint(1, 20) * 100.0, rng.choice(TIERS)
        now = cluster.timeline.fits_now(n, tier, length)
        start, later = cluster.timeline.earliest(n, tier, length, NOW)
        for moment, placement in [(NOW, now)] * (now is not None) + [(start, later)] * (start < NEVER):
            assert placement is not None
            assert sum(k for _, k in placement) == n
            assert len({cluster.nodes[name].fabric for name, _ in placement}) == 1
            assert all(k == cluster.nodes[name].num_gpus for name, k in placement[:-1]), "all but the last are whole"
            assert cluster.fits(placement, tier, moment, moment + length)
        sets = wide(cluster, n)
        if now is None:
            assert not any(cluster.fits(p, tier, NOW, NOW + length) for p in sets)
        first = next((t for t in cluster.moments(NOW) if any(cluster.fits(p, tier, t, t + length) for p in sets)), NEVER)
        assert start >= first
        if all(k == cluster.nodes[name].num_gpus for p in sets for name, k in p):
            assert start == first, "no node is shared, so each moment that counts is one at which a node is free"
        seen.append((now is not None, start > NOW, start == NEVER))
    assert len(set(seen)) == 3


def wide(cluster: Cluster, num_gpus: int) -> list[Placement]:
    """All placements of a wide gang: whole nodes of a fabric, the largest of the chosen first, and what is left on one more."""
    found = list[Placement]()
    for fabric in "ab":
        of = [n for n in cluster.nodes.values() if n.fabric == fabric]
        for chosen in chain.from_iterable(combinations(of, k) for k in range(1, len(of) + 1)):
            left = num_gpus - sum(n.num_gpus for n in chosen)
            placement = tuple((n.name, n.num_gpus) for n in chosen)
            if left == 0:
                found.append(placement)
            found += [(*placement, (n.name, left)) for n in of if n not in chosen and 0 < left <= n.num_gpus]
    return found


RULES = Rules()
MOMENT = NOW + RULES.handshake_s


def stops_on(cluster: Cluster, job: Waiting, name: str, victims: Sequence[Running]) -> Stops | None:
    """Of all sets of victims of a node that suffice, the one that spares those who give way last."""
    here = [v for v in victims if v.placement[0][0] == name]
    placement = ((name, job.num_gpus),)
    suffice = [
        chosen
        for chosen in chain.from_iterable(combinations(here, k) for k in range(len(here) + 1))
        if cluster.once_stopped((v.job_id for v in chosen), MOMENT).fits(placement, "premium", MOMENT, MOMENT + job.expected_s)
    ]
    if not here or not suffice:
        return None
    chosen = min(suffice, key=lambda chosen: [v in chosen for v in reversed(here)])
    return Stops(pool="p", placement=placement, victims=chosen, lost_s=sum(lost_s(v, now=NOW, rules=RULES) for v in chosen))


@PACKINGS
def test_on_one_node_the_cheapest_stops_are_those_of_all_nodes_and_all_sets_of_victims(whole: bool) -> None:
    seen = []
    for cluster, rng in clusters(250, whole=whole):
        victims = order_preemptees([r for r in cluster.running if rng.random() < 0.8], longest=rng.random() < 0.5, now=NOW, rules=RULES)
        job = waiting("j", gpus=rng.randint(1, cluster.largest), tier=rng.choice(TIERS), expected=rng.randint(1, 20) * 100.0)
        found = [s for name in cluster.nodes if (s := stops_on(cluster, job, name, victims)) and s.victims]
        allowed = [
            s
            for s in found
            if cluster.once_stopped((v.job_id for v in s.victims), MOMENT).fits(s.placement, job.tier, MOMENT, MOMENT + job.expected_s)
        ]
        tiers = {"premium": 3, "standard": 2, "free": 1}
        best = min(
            allowed,
            key=lambda s: (
                max(tiers[v.tier] for v in s.victims),
                sum((v.due_at or 0.0) < NOW for v in s.victims),
                s.lost_s,
                len(s.victims),
                s.placement,
            ),
            default=None,
        )
        assert cheapest(job, cluster.timeline, victims, now=NOW, rules=RULES) == best
        seen.append((best is None, len(allowed) > 1, len(allowed) < len(found), whole or (best is not None and len(best.victims) > 1)))
    assert all(map(any, zip(*seen, strict=True)))


@PACKINGS
def test_for_a_wide_gang_stops_empty_nodes_of_one_fabric_and_nobody_is_stopped_needlessly(whole: bool) -> None:
    seen = set()
    for cluster, rng in clusters(300, whole=whole, sizes=(2, 4), jobs=8):
        total = cluster.pool.num_gpus
        victims = order_preemptees([r for r in cluster.running if rng.random() < 0.9], now=NOW, rules=RULES)
        if total <= cluster.largest or not victims:
            continue
        job = waiting("j", gpus=rng.randint(cluster.largest + 1, total), tier="premium", expected=rng.randint(1, 20) * 100.0)
        found = cheapest(job, cluster.timeline, victims, now=NOW, rules=RULES)

        def suffice(stopped: Iterable[Running], placement: Placement, of: Cluster = cluster, end: float = MOMENT + job.expected_s) -> bool:
            return of.once_stopped((v.job_id for v in stopped), MOMENT).fits(placement, "premium", MOMENT, end)

        if found is None:
            emptied = [name for name, node in cluster.nodes.items() if suffice(victims, ((name, node.num_gpus),))]
            possible = [p for p in wide(cluster, job.num_gpus) if all(name in emptied for name, _ in p)]
            assert not possible or any(suffice((), p) for p in possible), "it fits without stops, and would be promised that"
        else:
            assert sum(n for _, n in found.placement) == job.num_gpus
            assert len({cluster.nodes[name].fabric for name, _ in found.placement}) == 1
            assert suffice(found.victims, found.placement)
            assert found.lost_s == pytest.approx(sum(lost_s(v, now=NOW, rules=RULES) for v in found.victims))
            for one in found.victims:
                assert not suffice([v for v in found.victims if v is not one], found.placement)
        seen.add(found is not None)
    assert seen == {True, False}


def free_from(cluster: Cluster, *, lower: bool) -> list[float]:
    """When each GPU is free, or each that is not reserved; what is promised left out."""
    held = [h for h in cluster.held if not h[0].startswith("c") and (not lower or cluster.tier[h[0]] != "premium")]
    total = cluster.pool.num_gpus - (cluster.pool.reserved_gpus if lower else 0)
    return sorted([NOW] * (total - sum(h[2] for h in held)) + [end for _, _, n, _, end in held for _ in range(n)])


@pytest.mark.parametrize("in_turn", [False, True], ids=["in any order", "in turn"])
def test_the_forecast_gives_each_job_the_gpus_of_its_pools_that_are_free_first(in_turn: bool) -> None:
    seen = []
    for cluster, rng in clusters(150):
        other = Cluster(rng)
        pools = {"p": cluster, "q": other}
        every = {name: free_from(c, lower=False) for name, c in pools.items()}
        shared = {name: free_from(c, lower=True) for name, c in pools.items()}
        last = dict.fromkeys(pools, NOW)
        jobs = [
            (
                waiting(f"j{i}", gpus=rng.randint(1, 12), tier=rng.choice(TIERS), expected=rng.randint(1, 20) * 100.0),
                rng.choice([["p"], ["q"], ["p", "q"], ["q", "p"]]),
            )
            for i in range(12)
        ]
        jobs.sort(key=lambda j: TIERS.index(j[0].tier))
        promised = {} if in_turn else {"j3": (rng.choice("pq"), NOW + rng.choice([-50.0, 700.0]))}
        wanted: dict[str, float] = {}
        for job, of in jobs:
            kept, n = promised.get(job.job_id), job.num_gpus
            heaps = {name: [every[name]] + [shared[name]] * (job.tier != "premium") for name in ([kept[0]] if kept else of)}
            can = {
                name: max(last[name] if in_turn else NOW, *(heap[n - 1] for heap in of))
                for name, of in heaps.items()
                if min(map(len, of)) >= n
            }
            if can:
                name = min(can, key=lambda name: can[name])
                start = wanted[job.job_id] = last[name] = max(NOW, kept[1]) if kept else can[name]
                for heap in heaps[name]:
                    heap[:] = sorted(heap[n:] + [start + job.expected_s] * n)
            seen.append((bool(can), len(can) == 2, kept is not None))
        timeline = {name: c.timeline for name, c in pools.items()}
        assert forecast(jobs, timeline, promised, NOW, in_turn=in_turn) == wanted
    assert {True, False} == {s[0] for s in seen} and any(s[1] for s in seen) and (in_turn or any(s[2] for s in seen))
