"""A mix of jobs, as operators describe it in YAML or JSON: how many a day, when, of which kinds, and for which tiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter

from control_plane.tenants.rules import TIERS
from core import yaml_files
from core.errors import InvalidRequest
from engine.scheduler import JobClass
from engine.training import GANG_SIZES

PLANNED = Path(__file__).with_name("planned_mix.yaml")
EXACTLY = ConfigDict(extra="forbid")
DAY_S = 86400.0
HOURS = 24
MAX_JOBS_A_DAY = 10_000
"""Twenty times the planned size; beyond it, a simulation takes minutes."""
MAX_KINDS = 20
SUM_WITHIN = 0.01
"""Shares may miss 100 % by this much, because of rounding."""
SWING = 0.8
"""In working hours, the rate of submissions swings by this share around its mean: lowest at midnight, highest at noon."""

Percent = Annotated[float, Field(ge=0, le=100)]
Gpus = Annotated[int, Field(strict=True, ge=1, le=GANG_SIZES[-1])]
Widths = Annotated[
    tuple[Gpus, ...],
    Field(min_length=1, max_length=GANG_SIZES[-1]),
    BeforeValidator(lambda value: [value] if isinstance(value, int) else value),
]


def _arrivals(value: Any) -> str | tuple[float, ...]:
    if value in ("working_hours", "even"):
        return str(value)
    rates = value if isinstance(value, list | tuple) and len(value) == HOURS else ()
    if not rates or not all(isinstance(rate, int | float) and 0 <= rate < math.inf for rate in rates):
        raise ValueError(f"use working_hours, even, or {HOURS} rates of at least 0, from midnight on")
    if not any(rates):
        raise ValueError("all rates are 0; at least one hour needs jobs")
    return tuple(float(rate) for rate in rates)


Arrivals = Annotated[str | tuple[float, ...], PlainValidator(_arrivals)]
Tiers = Mapping[str, Percent]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobKind:
    """Jobs that are alike. Their length is given as `gpu_hours` on `gpus`, or estimated from a `model` and `tokens`."""

    __pydantic_config__ = EXACTLY

    name: Annotated[str, Field(min_length=1, max_length=60)]
    share: Percent
    """Percentage of the jobs."""
    gpu_hours: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Mean GPU-hours of one job, its evaluation included."""
    gpus: Widths | None = None
    """GPUs of one job; of several numbers, each is as likely."""
    job_class: Annotated[JobClass | None, Field(alias="class")] = None
    """None: ``lora``; with a model, the class that follows from it."""
    model: str | None = None
    """A base model by name, such as ``llama-3.1-8b``."""
    tokens: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Tokens of the training data, once through."""
    epochs: Annotated[float, Field(gt=0, le=100)] | None = None
    """None: the recipe's."""
    adapter: Literal["lora", "qlora", "full"] = "lora"
    """With a model: what is trained."""
    tiers: Tiers | None = None
    """Percentage of its jobs by tier. None: those of the mix, without tiers that may not train the class."""
    dataset_gib: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Size of its data. None: by `tokens`, or :data:`control_plane.planning.kind_sizes.DATASET_GIB`."""

    def __post_init__(self) -> None:
        by_model = [name for name in ("model", "tokens") if getattr(self, name) is not None]
        if by_model and self.gpu_hours is not None:
            raise ValueError(f"it has both gpu_hours and {by_model[0]}; write gpu_hours and gpus, or model and tokens")
        if len(by_model) == 1:
            raise ValueError(f"it has {by_model[0]} alone; write model and tokens")
        if not by_model and (self.gpu_hours is None or self.gpus is None):
            raise ValueError("its length is missing; write gpu_hours and gpus, or model and tokens")
        if by_model and self.job_class is not None:
            raise ValueError("it has both model and class; leave out class, which follows from the model and the adapter")
        if by_model and self.gpus is not None and len(self.gpus) > 1:
            raise ValueError("with a model, gpus is one number; leave it out to use what the memory estimate plans")
        if not by_model and (self.epochs is not None or self.adapter != "lora"):
            raise ValueError("epochs and adapter need a model and tokens; write class for a kind with gpu_hours")
        if self.tiers is not None:
            _check_tiers(self.tiers)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMix:
    __pydantic_config__ = EXACTLY

    jobs_a_day: Annotated[float, Field(gt=0, le=MAX_JOBS_A_DAY)]
    kinds: Annotated[tuple[JobKind, ...], Field(min_length=1, max_length=MAX_KINDS)]
    arrivals: Arrivals = "working_hours"
    """When jobs are submitted: mostly around noon, evenly, or relative rates of the 24 hours from midnight."""
    tiers: Tiers = field(default_factory=lambda: {"standard": 100.0})
    """Percentage of jobs by tier."""
    spot: Percent = 0.0
    """Percentage of the jobs below premium that may run on spot GPUs."""

    def __post_init__(self) -> None:
        total = sum(kind.share for kind in self.kinds)
        if abs(total - 100.0) > SUM_WITHIN:
            raise ValueError(f"the shares of its kinds add up to {total:g} %; make them 100")
        names = [kind.name for kind in self.kinds]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two kinds are named {twice}; give each a unique name")
        _check_tiers(self.tiers)

    def rate(self) -> Callable[[float], float]:
        """Return the rate of submissions at a second of the day, relative to its mean."""
        if self.arrivals == "even":
            return lambda _second: 1.0
        if isinstance(self.arrivals, str):
            return lambda second: 1.0 - SWING * math.cos(2.0 * math.pi * second / DAY_S)
        rates, mean = self.arrivals, sum(self.arrivals) / HOURS
        return lambda second: rates[int(second % DAY_S / DAY_S * HOURS)] / mean

    @property
    def highest_rate(self) -> float:
        """The highest rate of a day, relative to its mean."""
        if isinstance(self.arrivals, str):
            return 1.0 if self.arrivals == "even" else 1.0 + SWING
        return max(self.arrivals) / (sum(self.arrivals) / HOURS)


def _check_tiers(tiers: Tiers) -> None:
    if unknown := next((name for name in tiers if name not in TIERS), None):
        raise ValueError(f"tier {unknown[:40]!r} is unknown; the tiers are {', '.join(TIERS)}")
    if abs(sum(tiers.values()) - 100.0) > SUM_WITHIN:
        raise ValueError(f"its tiers add up to {sum(tiers.values()):g} %; make them 100")


@cache
def _adapter() -> TypeAdapter[JobMix]:
    return TypeAdapter(JobMix)


def load(path: Path | None = None) -> JobMix:
    """Return the mix in a file, by default the planned one; ``InvalidRequest`` (``invalid_mix``) names the first mistake."""
    return parse(read(path), origin=str(path or PLANNED.name))


def read(path: Path | None = None) -> Any:
    """Return what a file says, unchecked; ``InvalidRequest`` (``invalid_mix``) if it is not YAML or JSON."""
    try:
        return yaml.load((path or PLANNED).read_text(encoding="utf-8"), yaml_files.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", code="invalid_mix", param="mix") from error


def parse(body: Any, *, origin: str = "mix") -> JobMix:
    """Return the mix that `body` describes; ``InvalidRequest`` (``invalid_mix``) names the first mistake and its place."""
    try:
        return yaml_files.parse(body, _adapter(), origin=origin)
    except ValueError as error:
        raise InvalidRequest(str(error), code="invalid_mix", param="mix") from error
