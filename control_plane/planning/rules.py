"""Demand and money of a mix, without a simulation.

1. A job's demand counts in the pool that the scheduler tries first for it.
2. Average: submissions a second, times seconds on GPUs, times GPUs.
3. Over the day: jobs that run if each started at once, from the rate of submissions before and the lengths (Poisson arrivals, lognormal
   lengths). Their GPUs have a mean and a standard deviation at each time of the day.
4. Peak: the mean at the busiest time, plus one standard deviation: exceeded one time in six then.
5. Served: the part of the average that the pools can do, wherever jobs may run. If it is not all, the queue grows without end.
6. Cost: every GPU of the pools, used or not, and what is stored after a year. Price: the served GPU time at the price list, by tier.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.billing.prices import MICROS, PriceList
from control_plane.planning.job_mix import DAY_S, JobMix
from control_plane.planning.sized_kind import SizedKind
from core.errors import InvalidRequest
from engine.scheduler import RESERVED_FOR, Pool, equal_nodes, largest_gang, may_use_spot, pools_in_order

SPREAD = 0.5
"""Sigma of the lognormal length around the mean: half of the jobs of a kind are within 0.7 and 1.4 times their median."""
SLOTS = 96
"""Times of the day that demand is computed for: quarters of an hour."""
SLOT_S = DAY_S / SLOTS
LONGEST = 12
"""Lengths are computed up to this multiple of their mean: fewer than one job in a million is longer."""
FLAT_S = 10 * DAY_S
"""From this length on, as many jobs run at each time of the day: the swing of submissions moves their number by less than 2 %."""
COST_SHARE = 0.5
"""Default cost of a GPU-hour as a share of its on-demand price: the lower end of the H100 hours that the price list quotes, 2 of 4 USD."""
MONTH_DAYS, YEAR_DAYS = 30, 365


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """GPUs that jobs would hold if each started at once."""

    average: float
    peak: float
    by_slot: tuple[tuple[float, float], ...]
    """Mean and standard deviation at each quarter of an hour from midnight on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Jobs of one kind, number of GPUs, tier and wish for spot."""

    kind: SizedKind
    gpus: int
    tier: str
    pool: Pool
    able: frozenset[str]
    """Names of the pools that may hold them."""
    jobs_a_day: float

    @property
    def gpu_hours_a_day(self) -> float:
        return self.jobs_a_day * self.kind.gpu_hours


def parts(mix: JobMix, kinds: Sequence[SizedKind], pools: Sequence[Pool]) -> list[Part]:
    """Split the mix (rule 1); ``InvalidRequest`` (``no_pool``) if no pool can ever hold some of its jobs."""
    found = []
    for kind in kinds:
        for gpus in kind.gpus:
            long = kind.gpu_hours * 3600.0 / gpus
            for tier, of_tier in kind.tiers.items():
                for spot, of_spot in ((True, mix.spot / 100), (False, 1.0 - mix.spot / 100)):
                    if tier == RESERVED_FOR:
                        of_spot = 0.0 if spot else 1.0
                    if jobs := mix.jobs_a_day * kind.share * of_tier * of_spot / len(kind.gpus):
                        asks = may_use_spot(spot=spot, tier=tier, expected_s=long)
                        able = _able(pools, kind, gpus=gpus, tier=tier, spot=asks)
                        names = frozenset(pool.name for pool in able)
                        found.append(Part(kind=kind, gpus=gpus, tier=tier, pool=able[0], able=names, jobs_a_day=jobs))
    return found


def _able(pools: Sequence[Pool], kind: SizedKind, *, gpus: int, tier: str, spot: bool) -> list[Pool]:
    if able := pools_in_order(pools, tier=tier, kind=kind.job_class, num_gpus=gpus, spot=spot):
        return able
    most = max((p.widest(tier) for p in pools if p.accepts(kind.job_class)), default=0)
    raise InvalidRequest(
        f"kind {kind.name!r}: no pool gives {gpus} GPUs to a job of tier {tier} and class {kind.job_class}; the most is {most}. Plan with "
        "other pools, or fewer GPUs for a job",
        code="no_pool",
        param="mix",
    )


def demand(mix: JobMix, found: Sequence[Part]) -> Demand:
    """Return the demand of these parts (rules 2 to 4)."""
    rate = mix.rate()
    rates = [rate((slot + 0.5) * SLOT_S) for slot in range(SLOTS)]
    mean, variance = [0.0] * SLOTS, [0.0] * SLOTS
    alike: defaultdict[tuple[int, float], float] = defaultdict(float)
    for part in found:
        alike[part.gpus, part.kind.gpu_hours * 3600.0 / part.gpus] += part.jobs_a_day
    for (gpus, length), jobs_a_day in alike.items():
        running = _running(rates, length, jobs_a_day * length / DAY_S)
        for slot, jobs in enumerate(running):
            mean[slot] += gpus * jobs
            variance[slot] += gpus * gpus * jobs
    by_slot = tuple((m, math.sqrt(v)) for m, v in zip(mean, variance, strict=True))
    return Demand(average=sum(mean) / SLOTS, peak=max((m + s for m, s in by_slot), default=0.0), by_slot=by_slot)


def _running(rates: Sequence[float], length_s: float, average: float) -> list[float]:
    """Return the mean number of running jobs in each slot; `average` over the day."""
    if length_s >= FLAT_S:
        return [average] * SLOTS
    mu = math.log(length_s) - SPREAD**2 / 2
    still = [0.0] * SLOTS  # share of jobs that still run this many slots after their submission, whole days folded into one
    for slot in range(math.ceil(LONGEST * length_s / DAY_S) * SLOTS):
        still[slot % SLOTS] += 0.5 * math.erfc((math.log((slot + 0.5) * SLOT_S) - mu) / (SPREAD * math.sqrt(2.0)))
    found = [sum(rates[slot - ago] * share for ago, share in enumerate(still)) for slot in range(SLOTS)]
    total = sum(found)
    return [average * SLOTS * jobs / total for jobs in found]


def served(found: Sequence[Part], pools: Sequence[Pool]) -> float:
    """Return the share of the average demand that the pools can do (rule 5): a maximum flow from parts to the pools that may hold them.

    Gangs, nodes and reserved GPUs are not considered, so a little less than this is too much already.
    """
    size = {pool.name: pool.total_gpus for pool in pools}
    total = sum(part.gpu_hours_a_day for part in found)
    unions = {frozenset[str]()}
    for able in {part.able for part in found}:
        unions |= {union | able for union in unions}
    cuts = (
        24 * sum(size[name] for name in union) + sum(part.gpu_hours_a_day for part in found if not part.able <= union) for union in unions
    )
    share = min(cuts) / total
    return share if share < 1.0 - 1e-9 else 1.0  # sums of shares are rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Money:
    """Integer micro-dollars for a month of 30 days."""

    served: float
    """Share of the jobs that the pools can do; the price is for these."""
    gpu_cost_micros: int
    storage_cost_micros: int
    price_micros: int
    price_by_tier: Mapping[str, int]

    @property
    def cost_micros(self) -> int:
        return self.gpu_cost_micros + self.storage_cost_micros

    @property
    def margin_micros(self) -> int:
        return self.price_micros - self.cost_micros

    @property
    def margin(self) -> float | None:
        """Share of the price that is left; None if nothing is paid."""
        return self.margin_micros / self.price_micros if self.price_micros else None


def money(found: Sequence[Part], pools: Sequence[Pool], prices: PriceList, *, gpu_cost: Mapping[str, int], stored_gib: float) -> Money:
    """Return cost and price (rule 6). `gpu_cost`: micro-dollars per GPU-hour by pool."""
    by_tier, share = dict[str, int](), served(found, pools)
    for part in found:
        ms = round(share * part.gpu_hours_a_day * MONTH_DAYS * 3_600_000)
        micros = prices.gpu_micros(part.pool.gpu_type, tier=part.tier, pricing=part.pool.pricing, gpu_ms=ms)
        by_tier[part.tier] = by_tier.get(part.tier, 0) + micros
    return Money(
        served=share,
        gpu_cost_micros=sum(p.total_gpus * gpu_cost[p.name] for p in pools) * 24 * MONTH_DAYS,
        storage_cost_micros=round(stored_gib * prices.storage.micros_per_gib_month), price_micros=sum(by_tier.values()),
        price_by_tier=by_tier,
    )  # fmt: skip


def hourly_cost(pool: Pool, prices: PriceList, given_usd: float | None) -> int:
    """Return the cost of a GPU-hour of `pool` in micro-dollars: as given, or a share of its on-demand price."""
    return round((given_usd * MICROS) if given_usd is not None else COST_SHARE * prices.gpu(pool.gpu_type).on_demand)


def resized(pool: Pool, num_gpus: int) -> Pool:
    """Return `pool` with `num_gpus`: nodes as large as its largest, fabrics of as many nodes as its largest, the same share
    outside of fabrics and the same share reserved."""
    if num_gpus == pool.total_gpus:
        return pool
    fabrics, per_node = [n.fabric for n in pool.nodes if n.fabric], max(n.num_gpus for n in pool.nodes)
    outside = num_gpus
    if fabrics:
        alone = sum(n.num_gpus for n in pool.nodes if not n.fabric) * num_gpus / pool.total_gpus
        outside = min(num_gpus, round(alone / per_node) * per_node)
    per_fabric = max(fabrics.count(name) for name in fabrics) if len(set(fabrics)) > 1 else 0
    made = (
        *equal_nodes(num_gpus - outside, per_node=per_node, prefix=f"{pool.name}-planned", fabric="fabric", fabrics_of=per_fabric),
        *equal_nodes(outside, per_node=per_node, prefix=f"{pool.name}-planned-alone"),
    )
    reserved = round(pool.reserved_gpus * num_gpus / pool.total_gpus)
    return replace(pool, nodes=made, reserved_gpus=reserved, max_gpus_per_job=min(pool.max_gpus_per_job, largest_gang(made)))
