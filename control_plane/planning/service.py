"""Plans capacity: what a mix of jobs needs on average and at peak, how long jobs wait on given pools, what that costs and earns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from control_plane.attempts.checkpoint_retention import KEPT_AFTER_END
from control_plane.billing import prices as price_lists
from control_plane.billing.prices import MICROS, PriceList
from control_plane.capacity import configured_pools
from control_plane.capacity.configured_pools import MAX_NODES
from control_plane.planning import kind_sizes, rules, waits
from control_plane.planning.job_mix import DAY_S, JobMix
from control_plane.planning.rules import MONTH_DAYS, YEAR_DAYS, Demand, Money, Part
from control_plane.planning.sized_kind import SizedKind
from control_plane.planning.waits import Limits, Simulated
from control_plane.platform.settings import Settings
from core.errors import InvalidRequest
from engine.scheduler import LOCAL_GPU_TYPE, Pool

MAX_DAYS = 60.0
MAX_GPUS = MAX_NODES * 8
MAX_LAYOUTS = 5
"""Other numbers of GPUs that one plan compares; each is a simulation."""
DEFAULT_LIMITS = Limits()
Layout = Mapping[str, int]
"""GPUs by pool; pools that it does not name stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """One pool; the peaks of pools are at different times, so their sum is more than the peak of all."""

    name: str
    gpu_type: str
    gpus: int
    demand: Demand
    kinds: tuple[str, ...]
    """Kinds whose jobs count here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    checkpoints_gib: float
    """Of running jobs and of those that ended within days; stays the same."""
    growth_gib_per_day: float
    """Datasets, packs and models, kept until tenants delete them."""

    def after(self, days: float) -> float:
        """Return the GiB stored after `days` if nothing is deleted."""
        return self.checkpoints_gib + self.growth_gib_per_day * days


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The mix on one layout of the pools."""

    gpus: Layout
    money: Money
    simulated: Simulated | None
    without_waits: str | None
    """Why nothing is simulated, as a sentence."""

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    kinds: tuple[SizedKind, ...]
    jobs_a_day: float
    total: Demand
    pools: tuple[PoolPlan, ...]
    storage: Storage
    scenarios: tuple[Scenario, ...]
    """The pools as they are, then each of the requested layouts."""
    assumptions: tuple[str, ...]

    @property
    def gpu_hours_a_job(self) -> float:
        return sum(kind.share * kind.gpu_hours for kind in self.kinds)

    @property
    def gpu_hours_a_day(self) -> float:
        return self.jobs_a_day * self.gpu_hours_a_job

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON: GPU-hours, GiB, seconds, integer micro-dollars per month of 30 days."""
        return {
            "jobs_a_day": self.jobs_a_day, "gpu_hours_a_job": self.gpu_hours_a_job, "gpu_hours_a_day": self.gpu_hours_a_day,
            "average_gpus": self.total.average, "peak_gpus": self.total.peak, "gpus_by_hour": _by_hour(self.total),
            "kinds": [asdict(kind) for kind in self.kinds],
            "pools": [
                {"name": p.name, "gpu_type": p.gpu_type, "gpus": p.gpus, "average_gpus": p.demand.average, "peak_gpus": p.demand.peak,
                 "kinds": p.kinds}
                for p in self.pools
            ],
            "storage": asdict(self.storage)
            | {"after_month_gib": self.storage.after(MONTH_DAYS), "after_year_gib": self.storage.after(YEAR_DAYS)},
            "scenarios": [
                {"gpus": dict(s.gpus), "num_gpus": s.num_gpus,
                 "money": asdict(s.money)
                 | {"cost_micros": s.money.cost_micros, "margin_micros": s.money.margin_micros, "margin": s.money.margin},
                 "simulated": None if s.simulated is None else asdict(s.simulated), "without_waits": s.without_waits}
                for s in self.scenarios
            ],
            "assumptions": self.assumptions,
        }  # fmt: skip


def plan(
    settings: Settings, mix: JobMix, *, at: datetime, layouts: Sequence[Layout] = (), gpu_usd_per_hour: float | None = None,
    days: float | None = None, seed: int = 1, limits: Limits = DEFAULT_LIMITS,
) -> CapacityPlan:  # fmt: skip
    """Plan `mix` on the pools of `settings`, as they are and with the GPUs of each of `layouts`, at the prices of `at`.

    Without ``FT_POOLS`` the pool is this machine; a mix that it cannot hold is planned on the planned installation's pools, and the
    assumptions say so. Uses no database. `gpu_usd_per_hour`: what a GPU costs the platform; None: half of its on-demand price. `days`:
    simulated, within `limits`; None: those of `limits`, or fewer if they have too many jobs. Pools that cannot be simulated have no waits,
    and say why.
    Raises ``InvalidRequest`` with the first mistake (``invalid_mix``, ``invalid_plan``, ``invalid_pools``, ``no_pool``).
    """
    _check(days, layouts, gpu_usd_per_hour)
    pools, kinds, found = _laid_out(settings, mix, at)
    prices = price_lists.load(settings.prices_file).at(at)
    storage = _storage(mix, kinds)
    simulated_days = waits.days_within(limits, mix, days)
    gpu_cost = {pool.name: rules.hourly_cost(pool, prices, gpu_usd_per_hour) for pool in pools}

    def scenario(resized: Sequence[Pool]) -> Scenario:
        fits = rules.parts(mix, kinds, resized)
        money = rules.money(fits, resized, prices, gpu_cost=gpu_cost, stored_gib=storage.after(YEAR_DAYS))
        why, simulated = _without_waits(mix, resized, money, limits), None
        if why is None and simulated_days is not None:
            simulated = waits.simulate(mix, kinds, resized, days=simulated_days, seed=seed, limits=limits)
            why = None if simulated else "the simulation reached its limit of work before the end of a day"
        return Scenario(gpus={pool.name: pool.total_gpus for pool in resized}, money=money, simulated=simulated, without_waits=why)

    return CapacityPlan(
        kinds=tuple(kinds),
        jobs_a_day=mix.jobs_a_day,
        total=rules.demand(mix, found),
        pools=tuple(_of_pool(mix, pool, found) for pool in pools),
        storage=storage,
        scenarios=tuple(scenario(resized) for resized in (pools, *(_resized(pools, layout) for layout in layouts))),
        assumptions=_assumptions(
            mix, prices, pools, gpu_usd_per_hour=gpu_usd_per_hour, waits_by=_waits_by(simulated_days, days, limits, seed),
            planned=settings.pools_file is None and pools[0].gpu_type != LOCAL_GPU_TYPE,
        ),
    )  # fmt: skip


def _laid_out(settings: Settings, mix: JobMix, at: datetime) -> tuple[list[Pool], list[SizedKind], list[Part]]:
    """Return the pools, the sizes of the kinds on them, and the parts of the mix."""
    pools = configured_pools.configured(settings, at)
    try:
        kinds = kind_sizes.sized(mix, pools)
        return pools, kinds, rules.parts(mix, kinds, pools)
    except InvalidRequest:
        if settings.pools_file is not None:
            raise
    return _laid_out(replace(settings, pools_file=configured_pools.PLANNED), mix, at)


def _check(days: float | None, layouts: Sequence[Layout], gpu_usd_per_hour: float | None) -> None:
    if days is not None and not waits.LEAST_DAYS <= days <= MAX_DAYS:
        raise InvalidRequest(f"days is {days:g}; simulate {waits.LEAST_DAYS:g} to {MAX_DAYS:g}", code="invalid_plan", param="days")
    if len(layouts) > MAX_LAYOUTS:
        raise InvalidRequest(
            f"{len(layouts)} layouts are given, and a plan compares {MAX_LAYOUTS}; plan the others on their own", code="invalid_plan",
            param="gpus",
        )  # fmt: skip
    if gpu_usd_per_hour is not None and not 0.0 <= gpu_usd_per_hour <= 1000.0:
        raise InvalidRequest(
            f"the cost of a GPU-hour is {gpu_usd_per_hour:g} USD; it can be 0 to 1,000", code="invalid_plan", param="gpu_cost"
        )


def _without_waits(mix: JobMix, pools: Sequence[Pool], money: Money, limits: Limits) -> str | None:
    """Return why a simulation would say nothing or take too long; None if it can run."""
    if money.served < 1.0:
        return f"the GPUs can do {money.served * 100:.3g} % of the mix, so its queue grows without end"
    if (gpus := sum(pool.total_gpus for pool in pools)) > limits.gpus:
        return f"{gpus:,} GPUs are more than the {limits.gpus:,} of a simulation here"
    if waits.days_within(limits, mix, None) is None:
        jobs = mix.jobs_a_day * (waits.LEAST_DAYS + waits.WARM_UP_DAYS)
        return (
            f"{waits.LEAST_DAYS:g} day and the {waits.WARM_UP_DAYS:g} before it have {jobs:,.0f} jobs, more than the {limits.jobs:,} of a "
            "simulation here"
        )
    return None


def _of_pool(mix: JobMix, pool: Pool, found: Sequence[Part]) -> PoolPlan:
    here = [part for part in found if part.pool.name == pool.name]
    names = tuple(dict.fromkeys(part.kind.name for part in here))
    return PoolPlan(name=pool.name, gpu_type=pool.gpu_type, gpus=pool.total_gpus, demand=rules.demand(mix, here), kinds=names)


def _resized(pools: Sequence[Pool], layout: Layout) -> list[Pool]:
    known = {pool.name for pool in pools}
    if unknown := next((name for name in layout if name not in known), None):
        raise InvalidRequest(
            f"pool {unknown[:40]!r} is unknown; the pools are {', '.join(sorted(known))}", code="invalid_plan", param="gpus"
        )
    if wrong := next((f"{name}={gpus}" for name, gpus in layout.items() if not 1 <= gpus <= MAX_GPUS), None):
        raise InvalidRequest(f"{wrong}: a pool has 1 to {MAX_GPUS:,} GPUs", code="invalid_plan", param="gpus")
    return [rules.resized(pool, layout.get(pool.name, pool.total_gpus)) for pool in pools]


def _storage(mix: JobMix, kinds: Sequence[SizedKind]) -> Storage:
    checkpoints = growth = 0.0
    for kind in kinds:
        jobs = mix.jobs_a_day * kind.share
        runs = sum(kind.gpu_hours / gpus for gpus in kind.gpus) / len(kind.gpus) / 24
        checkpoints += jobs * (runs + KEPT_AFTER_END.total_seconds() / DAY_S) * kind.checkpoints_gib
        growth += jobs * kind.kept_gib
    return Storage(checkpoints_gib=checkpoints, growth_gib_per_day=growth)


def _by_hour(demand: Demand) -> list[dict[str, float]]:
    """Return each hour's mean, and the mean plus one standard deviation."""
    each = rules.SLOTS // 24
    hours = [demand.by_slot[hour * each : (hour + 1) * each] for hour in range(24)]
    return [
        {"hour": hour, "average": sum(m for m, _ in slots) / each, "high": sum(m + s for m, s in slots) / each}
        for hour, slots in enumerate(hours)
    ]


def _assumptions(
    mix: JobMix, prices: PriceList, pools: Sequence[Pool], *, gpu_usd_per_hour: float | None, waits_by: str, planned: bool
) -> tuple[str, ...]:
    hourly = {pool.gpu_type: rules.hourly_cost(pool, prices, gpu_usd_per_hour) / MICROS for pool in pools}
    cost = ", ".join(f"{usd:g} USD per hour of {gpu_type}" for gpu_type, usd in hourly.items())
    origin = "as given" if gpu_usd_per_hour is not None else "half of the on-demand price; give your own"
    models = ", ".join(f"{job_class} jobs as {name}" for job_class, name in kind_sizes.assumed_models(mix).items())
    own = (
        f"pools: the {sum(pool.total_gpus for pool in pools)} GPUs of the planned installation (deploy/pools.yaml), because this machine "
        "cannot hold every job of the mix; name your pools with --pools or FT_POOLS"
    )
    return (
        *((own,) if planned else ()),
        f"cost: every GPU of the pools for {MONTH_DAYS} days, used or not, at {cost} ({origin}), and what is stored after a year without "
        f"deletions, at {prices.storage.micros_per_gib_month / MICROS:g} USD per GiB-month; no staff, network or CPU nodes",
        f"price: GPU time by the price list of {prices.valid_from}, if tenants submit no less when they wait, for what the pools can "
        "do; storage within allowances",
        "demand: lengths spread lognormally (sigma 0.5); peak is the mean at the busiest time of day plus one standard deviation",
        waits_by,
        *((f"storage of kinds without a model: {models}",) if models else ()),
        "lengths by model: the estimates' cost model and the recipes' defaults, without this installation's history",
    )


def _waits_by(simulated: float | None, wanted: float | None, limits: Limits, seed: int) -> str:
    if simulated is None:
        return "waits: not simulated, because a day of this mix has too many jobs"
    fewer = f", because {limits.days:g} have too many jobs" if wanted is None and simulated < limits.days else ""
    return (
        f"waits: {simulated:g} days simulated{fewer}, with seed {seed}, after {waits.WARM_UP_DAYS:g} days that are not counted; estimates "
        "are exact, no node fails, no tenant reaches a limit"
    )
