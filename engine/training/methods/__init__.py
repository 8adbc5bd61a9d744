"""Training methods. Each is a registered module that declares its rows, trainer, metrics and failure modes.

A module ``<name>.py`` of this package with a ``METHOD`` is a method; other distributions add methods through the entry point group
``ft_platform.methods``. Nothing here imports torch: the objective is named here and imported by the training process.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal

from core.errors import InvalidRequest, did_you_mean
from engine.training import schedules

ENTRY_POINTS = "ft_platform.methods"

PackKind = Literal["windows", "pairs", "judged"]
"""``windows`` of packed examples, ``pairs`` of answers, or single answers ``judged`` good or bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The values that a hyperparameter accepts."""

    kind: Literal["int", "float", "word", "flag", "modules", "schedule"]
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """The lower limit itself is excluded."""
    words: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of `words`."""
    allowed: tuple[int, ...] = ()
    because: str = ""

    @property
    def text(self) -> str:
        if self.kind == "modules":
            return "all-linear, or a list of modules from " + ", ".join(self.words)
        if self.words:
            return "one of " + ", ".join(self.words) + (schedules.OR_POINTS if self.kind == "schedule" else "")
        if self.kind == "flag":
            return "true or false"
        if self.allowed:
            return "one of " + ", ".join(map(str, self.allowed))
        kind = "a whole number" if self.kind == "int" else "a number"
        low = f"above {self.low:g}" if self.above_low else f"at least {self.low:g}"
        return f"{kind} {low}" + (f" and at most {self.high:g}" if self.high < math.inf else "")

    def accepts(self, value: object) -> bool:
        if self.kind == "schedule" and not isinstance(value, str):
            return schedules.is_points(value)
        if self.kind in ("word", "schedule"):
            return isinstance(value, str) and (value in self.words or value in self.aliases)
        if self.kind == "modules":
            return value == "all-linear" or self._names(value)
        if self.kind == "flag":
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):  # isfinite overflows on a huge int
            return False
        if self.kind == "int" and value != int(value):
            return False
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and (not self.allowed or int(value) in self.allowed)

    def plain(self, value: Any) -> Any:
        """Returns an accepted `value` in its canonical form for hashing: 1 and 1.0 are the same number, a list has no order."""
        if self.kind == "int":
            return int(value)
        if self.kind == "float":
            return float(value)
        if self.kind == "modules":
            return tuple(sorted(value)) if isinstance(value, list) else value
        if self.kind == "schedule" and not isinstance(value, str):
            return tuple((float(position), float(factor)) for position, factor in value)
        return self.aliases.get(value, value)

    def suggestion(self, value: object) -> str:
        """Returns ``; did you mean adafactor?`` if `value` is close to one of several words."""
        names = value if isinstance(value, list) else [value]
        wrong = [name for name in names if isinstance(name, str) and name not in self.words]
        return did_you_mean(wrong[0], [*self.words, *self.aliases]) if wrong else ""

    def _names(self, value: object) -> bool:
        """A list of words without repetition; an empty one would train nothing."""
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) for v in value):
            return False
        return set(value) <= set(self.words) and len(set(value)) == len(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A hyperparameter of this method only."""

    default: float | int | str
    source: str
    """Source of the default."""
    limit: Limit
    help: str = ""
    only_with: tuple[str, tuple[str, ...]] | None = None
    """Another setting of the method and its values for which this one has an effect; otherwise it must keep its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    summary: str
    rows: frozenset[str]
    """Kinds of stored rows that it trains on: ``chat``, ``preference``, ``kto``, ``text``."""
    row_help: str
    """The same in words, for the error that refuses other kinds."""
    pack: PackKind
    trainer: str
    """The library's trainer whose data preparation and loss it uses, as ``package.Class``."""
    objective: str
    """``module:function`` that builds its objective (``engine.training.runtime.objectives.Objective``)."""
    every_token: bool = False
    """Learns every token of every row; rows that are too long are split into pieces instead of cut."""
    reward_per_token: bool = False
    """Compares answers by the mean log-probability of their tokens instead of the sum."""
    needs_reference: bool = False
    """Trains against the log-probabilities of the frozen base, which are computed once and stored with the pack."""
    learning_rate_factor: float = 1.0
    """Factor on the recipe's rate, which is SFT's: one factor for both kinds of adapter, because a recipe's rate for LoRA is ten times
    its rate for full parameters, and published preference rates keep that ratio (`learning_rate_source`)."""
    learning_rate_source: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    """Metrics of a step besides loss, learning rate, gradient norm and speed."""


@functools.cache
def registered_methods() -> Mapping[str, Method]:
    """Returns every method by name: the modules of this package, then those of installed distributions."""
    found: dict[str, Method] = {}
    for info in pkgutil.iter_modules(__path__):
        method: Method = importlib.import_module(f"{__name__}.{info.name}").METHOD
        found[method.name] = method
    for entry in entry_points(group=ENTRY_POINTS):
        method = entry.load()
        if method.name in found:
            raise ValueError(f"method {method.name!r} is registered twice: by {entry.value} and by {found[method.name].objective}")
        found[method.name] = method
    return found


def method_named(name: str) -> Method:
    """Returns the method called `name`; ``InvalidRequest`` lists the known ones."""
    known = registered_methods()
    try:
        return known[name]
    except KeyError:
        raise InvalidRequest(
            f"method {name[:80]!r} is not supported; use one of: {', '.join(known)}{did_you_mean(name, known)}",
            code="unsupported_method",
            param="method",
        ) from None
