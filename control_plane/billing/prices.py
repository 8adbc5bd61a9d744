"""Price lists: the price of a GPU-hour and of a GiB-month, from when on, and why; from ``prices.yaml`` or the file that ``FT_PRICES``
names.

A list applies from its day on and never changes: new prices are a new list, and what began earlier keeps the old ones.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter

from control_plane.billing.rules import MICROS as MICROS
from control_plane.tenants.rules import TIERS
from core import yaml_files
from engine.scheduler import PRICINGS, Pricing

BUILTIN = Path(__file__).with_name("prices.yaml")
GIB = 1 << 30
MS_PER_HOUR = 3_600_000
MAX_MICROS = 10**12
"""A million dollars an hour; more is probably a typo."""


Micros = Annotated[int, Field(strict=True, ge=0, le=MAX_MICROS)]
Percent = Annotated[int, Field(strict=True, ge=0, le=1000)]
Origin = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(lambda text: " ".join(text.split()))]
"""Where a price comes from, in words."""
EXACTLY = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPrice:
    """Micro-dollars per GPU and hour."""

    __pydantic_config__ = EXACTLY

    on_demand: Annotated[Micros, Field(alias="on_demand_micros_per_hour")]
    spot: Annotated[Micros, Field(alias="spot_micros_per_hour")]
    reserved: Annotated[Micros, Field(alias="reserved_micros_per_hour")]
    origin: Origin

    def __post_init__(self) -> None:
        for pricing in PRICINGS:
            if self.per_hour(pricing) > self.on_demand:
                raise ValueError(f"{pricing} costs more than on demand; what was saved would be less than nothing")

    def per_hour(self, pricing: Pricing) -> int:
        prices: Mapping[Pricing, int] = {"on_demand": self.on_demand, "spot": self.spot, "reserved": self.reserved}
        return prices[pricing]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPrice:
    __pydantic_config__ = EXACTLY

    gpu_percent: Percent
    """Percentage of the GPU-hour price."""
    storage_percent: Percent
    """Percentage of the GiB-month price."""
    storage_allowance_gib: Annotated[int, Field(strict=True, ge=0, le=10**6)]
    """GiB stored free of charge."""
    origin: Origin

    @property
    def storage_allowance_bytes(self) -> int:
        return self.storage_allowance_gib * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePrice:
    __pydantic_config__ = EXACTLY

    micros_per_gib_month: Micros
    origin: Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    """All prices in force at one time."""

    __pydantic_config__ = EXACTLY

    valid_from: Annotated[date, Field(strict=True)]
    gpus: Annotated[Mapping[str, GpuPrice], Field(min_length=1)]
    tiers: Mapping[str, TierPrice]
    storage: StoragePrice

    def __post_init__(self) -> None:
        if set(self.tiers) != set(TIERS):
            raise ValueError(f"tiers has {', '.join(sorted(self.tiers)) or 'none'}; it needs exactly {', '.join(TIERS)}")

    def gpu_micros(self, gpu_type: str, *, tier: str, pricing: Pricing, gpu_ms: int, down: bool = False) -> int:
        """Return the price of `gpu_ms` GPU milliseconds, rounded to the nearest micro-dollar or `down`; ``ValueError`` if the type has
        no price."""
        hourly = self.gpu(gpu_type).per_hour(pricing) * self.tiers[tier].gpu_percent
        exact = hourly * gpu_ms, 100 * MS_PER_HOUR
        return exact[0] // exact[1] if down else half_even(*exact)

    def storage_micros_per_day(self, *, tier: str, stored_bytes: int, days_in_month: int) -> int:
        """Return the price of one day of storage beyond the tier's allowance."""
        of_tier = self.tiers[tier]
        billed = max(0, stored_bytes - of_tier.storage_allowance_bytes)
        return half_even(self.storage.micros_per_gib_month * of_tier.storage_percent * billed, 100 * GIB * days_in_month)

    def gpu(self, gpu_type: str) -> GpuPrice:
        try:
            return self.gpus[gpu_type]
        except KeyError:
            raise ValueError(
                f"the price list of {self.valid_from} has no price for GPUs of type {gpu_type!r}; it has {', '.join(sorted(self.gpus))}. "
                "Add one to the file that FT_PRICES names"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceBook:
    """All lists, oldest first."""

    __pydantic_config__ = EXACTLY

    lists: Annotated[tuple[PriceList, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        for before, after in itertools.pairwise(self.lists):
            if after.valid_from <= before.valid_from:
                raise ValueError(f"the list of {after.valid_from} follows that of {before.valid_from}; lists are ordered by valid_from")

    def at(self, when: datetime) -> PriceList:
        """Return the list in force at `when`; before the first one, the first."""
        since = [datetime.combine(one.valid_from, time(), UTC) for one in self.lists]
        return self.lists[max(0, bisect.bisect_right(since, when) - 1)]


def half_even(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` as a whole number, halves to even; the only rounding of entries."""
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest > denominator or (2 * rest == denominator and whole % 2 == 1))


@cache
def load(path: Path | None = None) -> PriceBook:
    """Return the price book in `path` (default: the built-in one), read once per process. ``ValueError`` names the wrong entry."""
    return yaml_files.read(path or BUILTIN, TypeAdapter(PriceBook), setting="FT_PRICES")


def parse(body: Any, *, origin: str = "prices") -> PriceBook:
    """Build the price book that `body` describes; ``ValueError`` names the place of the first mistake."""
    return yaml_files.parse(body, TypeAdapter(PriceBook), origin=origin)
