"""Training methods, each one registered module: which rows it takes, which trainer it builds, what it measures, how it fails.

A module of this package called ``<name>.py`` with a ``METHOD`` is a method; so is what another distribution names under the
entry point group ``ft_platform.methods``. Nothing here imports torch: the objective is named, and imported by the training process.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Literal

from ft_assets.errors import InvalidRequest
from ft_assets.training.hyperparameter_limit import Limit

ENTRY_POINTS = "ft_platform.methods"

PackKind = Literal["windows", "pairs", "judged"]
"""``windows`` of packed examples, ``pairs`` of answers, or single answers ``judged`` good or bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A hyperparameter that only this method has."""

    default: float | int | str
    source: str
    """Where the default comes from."""
    limit: Limit
    help: str = ""
    only_with: tuple[str, tuple[str, ...]] | None = None
    """Another setting of the method and its values with which this one has an effect; with others it keeps its default or is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    summary: str
    rows: frozenset[str]
    """Kinds of stored rows that it trains on: ``chat``, ``preference``, ``kto``, ``text``."""
    row_help: str
    """The same in words, for the error that refuses others."""
    pack: PackKind
    trainer: str
    """The library's trainer whose preparation and loss it uses, as ``package.Class``."""
    objective: str
    """``module:function`` that builds its objective (``ft_assets.training.runtime.objectives.Objective``)."""
    every_token: bool = False
    """Every token of every row is learned, and rows that are too long are split into pieces instead of cut."""
    reward_per_token: bool = False
    """What it prefers by is the mean log-probability of an answer's tokens; else their sum."""
    needs_reference: bool = False
    """Trains against the log-probabilities of the frozen base, computed once and kept with the pack."""
    learning_rate_factor: float = 1.0
    """Of the recipe's rate, which is SFT's: one factor for both kinds of adapter, because a recipe's rate for LoRA is ten times its rate
    for full parameters, and published preference rates keep that ratio (`learning_rate_source`)."""
    learning_rate_source: str = ""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    """What a step reports besides loss, learning rate, gradient norm and speed."""
    failure_modes: tuple[str, ...] = ()
    """What goes wrong with it in practice, each with its sign and its cure."""


@functools.cache
def registered() -> Mapping[str, Method]:
    """Every method by name: the modules of this package, then those of installed distributions."""
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


def get(name: str) -> Method:
    """The method called `name`; ``InvalidRequest`` names the known ones."""
    try:
        return registered()[name]
    except KeyError:
        raise InvalidRequest(
            f"method {name[:80]!r} is not supported; use one of: {', '.join(registered())}", code="unsupported_method", param="method"
        ) from None
