"""Usage by hour, day or month: ledger entries spread over their time, exact to the micro-dollar.

An entry whose interval crosses a bucket boundary is split by time; the parts are whole micro-dollars and add up to the entry (largest
remainder), whatever the width. Buckets are calendar hours, days and months in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, get_args

from control_plane.billing.metering.rules import milliseconds, moment
from control_plane.billing.rules import Entry
from core.errors import InvalidRequest

Width = Literal["hour", "day", "month"]
WIDTHS: tuple[Width, ...] = get_args(Width)
Dimension = Literal["job_id", "model", "gpu_type", "pricing", "kind", "api_key_id", "tenant"]
OF_OPERATORS: tuple[Dimension, ...] = get_args(Dimension)
DIMENSIONS = OF_OPERATORS[:-1]
"""Dimensions that a tenant can group usage by, beside the keys of jobs' metadata."""


class Bucket(NamedTuple):
    begins: datetime
    ends: datetime


class Part(NamedTuple):
    """The part of one or more entries in one bucket."""

    begins: datetime
    """Start of the bucket."""
    amount_micros: int
    list_micros: int
    gpu_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """A sum of entries, or of parts of them."""

    gpu_ms: int = 0
    """GPU milliseconds of usage, refunded or not."""
    refunded_gpu_ms: int = 0
    amount_micros: int = 0
    """Amount owed over everything."""
    usage_micros: int = 0
    refund_micros: int = 0
    """Refunds; never positive."""
    storage_micros: int = 0
    adjustment_micros: int = 0
    spot_savings_micros: int = 0
    """What unrefunded usage would have cost more on demand."""

    @property
    def gpu_seconds(self) -> float:
        return self.gpu_ms / 1000

    @property
    def refunded_gpu_seconds(self) -> float:
        return self.refunded_gpu_ms / 1000

    def and_(self, other: Total) -> Total:
        return Total(**{name: getattr(self, name) + getattr(other, name) for name in Total.__slots__})

    def plus(self, kind: str, part: Part) -> Total:
        """Return this sum plus `part` of an entry of `kind`."""
        changed: dict[str, int] = {"amount_micros": self.amount_micros + part.amount_micros}
        changed[f"{kind}_micros"] = getattr(self, f"{kind}_micros") + part.amount_micros
        if kind in ("usage", "refund"):
            name = "gpu_ms" if kind == "usage" else "refunded_gpu_ms"
            changed[name] = getattr(self, name) + part.gpu_ms
            changed["spot_savings_micros"] = self.spot_savings_micros + part.list_micros - part.amount_micros
        return Total(**({name: getattr(self, name) for name in Total.__slots__} | changed))


class Line(NamedTuple):
    """A part with its group."""

    key: tuple[str | None, ...]
    kind: str
    part: Part


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSum:
    """What a job used and cost in a month."""

    job_id: str
    gpu_ms: int
    """GPU milliseconds of usage, refunded or not."""
    amount_micros: int

    @property
    def gpu_seconds(self) -> float:
        return self.gpu_ms / 1000


NOTHING = Total()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    bucket: Bucket
    results: Sequence[tuple[Mapping[str, str | None], Total]]
    """By the values of the requested dimensions, in their order; a single group if none were requested."""


def floor(when: datetime, width: Width) -> datetime:
    """Return the start of the bucket that contains `when`."""
    at = when.astimezone(UTC)
    hour = at.replace(minute=0, second=0, microsecond=0)
    return hour if width == "hour" else hour.replace(hour=0) if width == "day" else hour.replace(hour=0, day=1)


def following(begins: datetime, width: Width) -> datetime:
    """Return the start of the next bucket."""
    if width == "month":
        return floor(begins.replace(day=1) + timedelta(days=32), "month")
    return begins + (timedelta(hours=1) if width == "hour" else timedelta(days=1))


def buckets(start: datetime, end: datetime, width: Width) -> Iterator[Bucket]:
    """Return every bucket that overlaps the time from `start` to `end`."""
    begins = floor(start, width)
    while begins < end:
        ends = following(begins, width)
        yield Bucket(begins, ends)
        begins = ends


def apportion(amount: int, weights: Sequence[int]) -> list[int]:
    """Split `amount` into whole parts proportional to `weights`, by largest remainder; ties go to the earlier part.

    With no weight at all, the last part gets everything.
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * (len(weights) - 1) + [amount]
    sign = -1 if amount < 0 else 1
    shares = [divmod(abs(amount) * weight, whole) for weight in weights]
    left = abs(amount) - sum(share for share, _ in shares)
    favoured = set(sorted(range(len(shares)), key=lambda i: (-shares[i][1], i))[:left])
    return [sign * (share + (i in favoured)) for i, (share, _) in enumerate(shares)]


def interval_of(entry: Entry) -> tuple[int, int] | None:
    """Return the milliseconds between which the billed or refunded workload ran; None for an entry of one moment."""
    return (entry.detail["started_ms"], entry.detail["ended_ms"]) if "started_ms" in entry.detail else None


def split(entry: Entry, width: Width) -> list[Part]:
    """Split `entry` by bucket: its interval by time, or all of it in the bucket of its moment."""
    span = interval_of(entry)
    if span is None or span[1] <= span[0]:
        return [Part(floor(entry.occurred_at, width), entry.amount_micros, entry.list_micros, entry.gpu_ms)]
    found = list(buckets(moment(span[0]), moment(span[1]), width))
    weights = [min(span[1], milliseconds(b.ends)) - max(span[0], milliseconds(b.begins)) for b in found]
    columns = (apportion(amount, weights) for amount in (entry.amount_micros, entry.list_micros, entry.gpu_ms))
    return [Part(b.begins, *values) for b, *values in zip(found, *columns, strict=True)]


def grouped(
    lines: Iterable[Line], *, start: datetime, end: datetime, width: Width, by: Sequence[str], most: int | None = None
) -> list[Grouped]:
    """Sum by bucket and by the dimensions in `by`, whose values are the keys of `lines`. Includes empty buckets.

    ``InvalidRequest`` if that gives more than `most` sums.
    """
    edges = list(buckets(start, end, width))
    sums: dict[datetime, dict[tuple[str | None, ...], Total]] = {bucket.begins: {} for bucket in edges}
    count = 0
    for key, kind, part in lines:
        of_bucket = sums.get(part.begins)
        if of_bucket is None:  # part of an entry that crosses the edge of the requested time
            continue
        count += key not in of_bucket
        if most is not None and count > most:
            raise InvalidRequest(
                f"this usage has more than {most} results; ask for less time, a wider bucket or fewer dimensions",
                code="invalid_range",
                param="group_by",
            )
        of_bucket[key] = of_bucket.get(key, NOTHING).plus(kind, part)
    made = []
    for bucket in edges:
        ordered = sorted(sums[bucket.begins].items(), key=lambda item: tuple(v or "" for v in item[0]))
        made.append(Grouped(bucket=bucket, results=[(dict(zip(by, key, strict=True)), total) for key, total in ordered]))
    return made


def total_of(entries: Iterable[Entry]) -> Total:
    """Sum whole entries."""
    total = Total()
    for entry in entries:
        total = total.plus(entry.kind, Part(entry.occurred_at, entry.amount_micros, entry.list_micros, entry.gpu_ms))
    return total
