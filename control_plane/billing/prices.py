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
from typing import Any, Literal, get_args

from control_plane.tenants.rules import TIERS

Pricing = Literal["on_demand", "spot", "reserved"]
PRICINGS: tuple[Pricing, ...] = get_args(Pricing)

BUILTIN = Path(__file__).with_name("prices.yaml")
GIB = 1 << 30
MICROS = 1_000_000
MS_PER_HOUR = 3_600_000
MAX_MICROS = 10**12
"""A million dollars an hour; more is probably a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPrice:
    """Micro-dollars per GPU and hour."""

    on_demand: int
    spot: int
    reserved: int
    origin: str

    def per_hour(self, pricing: Pricing) -> int:
        prices: Mapping[Pricing, int] = {"on_demand": self.on_demand, "spot": self.spot, "reserved": self.reserved}
        return prices[pricing]


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPrice:
    gpu_percent: int
    """Percentage of the GPU-hour price."""
    storage_percent: int
    """Percentage of the GiB-month price."""
    storage_allowance_bytes: int
    """GiB stored free of charge."""
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceList:
    """All prices in force at one time."""

    valid_from: date
    gpus: Mapping[str, GpuPrice]
    tiers: Mapping[str, TierPrice]
    storage_micros_per_gib_month: int
    storage_origin: str

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
        return half_even(self.storage_micros_per_gib_month * of_tier.storage_percent * billed, 100 * GIB * days_in_month)

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

    lists: tuple[PriceList, ...]

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
    import yaml  # imported late: the command line imports this module without reading prices

    file = path or BUILTIN
    try:
        body = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the price lists in {file} cannot be read: {error}; FT_PRICES names that file") from error
    return parse(body, origin=str(file))


def parse(body: Any, *, origin: str = "prices") -> PriceBook:
    """Build the price book that `body` describes; ``ValueError`` names the place of the first mistake."""
    fields = _fields(body, origin, "lists")
    if not isinstance(fields["lists"], list) or not fields["lists"]:
        raise ValueError(f"{origin}: lists is {fields['lists']!r}; it needs at least one price list")
    lists = tuple(_list(one, f"{origin}: lists[{i}]") for i, one in enumerate(fields["lists"]))
    for before, after in itertools.pairwise(lists):
        if after.valid_from <= before.valid_from:
            raise ValueError(
                f"{origin}: the list of {after.valid_from} follows that of {before.valid_from}; lists are ordered by valid_from"
            )
    return PriceBook(lists=lists)


def _list(body: Any, where: str) -> PriceList:
    fields = _fields(body, where, "valid_from", "gpus", "tiers", "storage")
    since = fields["valid_from"]
    if not isinstance(since, date) or isinstance(since, datetime):
        raise ValueError(f"{where}.valid_from is {since!r}; write a day: 2026-01-31")
    gpus, tiers = (_mapping(fields[name], f"{where}.{name}") for name in ("gpus", "tiers"))
    if not gpus:
        raise ValueError(f"{where}.gpus is empty; name the price of at least one type of GPU")
    if set(tiers) != set(TIERS):
        raise ValueError(f"{where}.tiers has {', '.join(sorted(tiers)) or 'none'}; it needs exactly {', '.join(TIERS)}")
    storage = _fields(fields["storage"], f"{where}.storage", "micros_per_gib_month", "origin")
    return PriceList(
        valid_from=since,
        gpus={name: _gpu(one, f"{where}.gpus.{name}") for name, one in gpus.items()},
        tiers={name: _tier(one, f"{where}.tiers.{name}") for name, one in tiers.items()},
        storage_micros_per_gib_month=_whole(storage, "micros_per_gib_month", f"{where}.storage", MAX_MICROS),
        storage_origin=_origin(storage, f"{where}.storage"),
    )


def _gpu(body: Any, where: str) -> GpuPrice:
    names: dict[Pricing, str] = {pricing: f"{pricing}_micros_per_hour" for pricing in PRICINGS}
    fields = _fields(body, where, *names.values(), "origin")
    found = {pricing: _whole(fields, name, where, MAX_MICROS) for pricing, name in names.items()}
    dearer = [pricing for pricing in PRICINGS if found[pricing] > found["on_demand"]]
    if dearer:
        raise ValueError(f"{where}: {dearer[0]} costs more than on demand; what was saved would be less than nothing")
    return GpuPrice(on_demand=found["on_demand"], spot=found["spot"], reserved=found["reserved"], origin=_origin(fields, where))


def _tier(body: Any, where: str) -> TierPrice:
    fields = _fields(body, where, "gpu_percent", "storage_percent", "storage_allowance_gib", "origin")
    return TierPrice(
        gpu_percent=_whole(fields, "gpu_percent", where, 1000),
        storage_percent=_whole(fields, "storage_percent", where, 1000),
        storage_allowance_bytes=_whole(fields, "storage_allowance_gib", where, 10**6) * GIB,
        origin=_origin(fields, where),
    )


def _fields(body: Any, where: str, *names: str) -> Mapping[str, Any]:
    found = _mapping(body, where)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if unknown := [name for name in found if name not in names]:
        raise ValueError(f"{where}: {unknown[0]} is unknown; it has {', '.join(names)}")
    return found


def _mapping(body: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise ValueError(f"{where} is {type(body).__name__}, not a mapping of names")
    return body


def _whole(fields: Mapping[str, Any], name: str, where: str, most: int) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{where}.{name} is {value!r}; it is a whole number in 0..{most}")
    return value


def _origin(fields: Mapping[str, Any], where: str) -> str:
    value = fields["origin"]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}.origin is {value!r}; say in words where the price comes from")
    return " ".join(value.split())
