"""Checks of a dataset. Each is a registered class that declares its options, findings, passes and section of the report.

A module of :data:`SHIPPED` with a ``CHECK`` is a check; other distributions add theirs through the entry point group
``ft_platform.dataset_checks``, each a subclass of :class:`~engine.data.checks.check.Check`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from engine.data.problems import CODES

if TYPE_CHECKING:
    from engine.data.checks.check import Check, Option
    from engine.data.pipeline.options import BlockOptions

ENTRY_POINTS = "ft_platform.dataset_checks"
SHIPPED = (
    "exact_duplicates", "near_duplicates", "contamination.contaminated_rows", "toxicity", "token_limit", "reasoning_rows", "tool_rows",
    "tool_usage", "control_tokens", "pii.personal_data", "quality",
)  # fmt: skip
"""Modules in the order of their options and warnings; :attr:`Check.order` decides which runs first."""


@functools.cache
def registered() -> Mapping[str, type[Check]]:
    """Returns every check by name: the modules of :data:`SHIPPED`, then those of installed distributions."""
    found: dict[str, type[Check]] = {}
    for module in SHIPPED:
        check: type[Check] = importlib.import_module(f"{__name__}.{module}").CHECK
        found[check.name] = check
    for entry in entry_points(group=ENTRY_POINTS):
        check = entry.load()
        taken = {option.name for other in found.values() for option in other.options} & {option.name for option in check.options}
        if check.name in found or taken:
            raise ValueError(f"check {check.name!r} of {entry.value} has the name or an option ({', '.join(taken)}) of another check")
        found[check.name] = check
    return found


def all_options() -> dict[str, Option]:
    """Returns the options of every check by name."""
    return {option.name: option for check in registered().values() for option in check.options}


def all_codes() -> dict[str, str]:
    """Returns every error code of a report with its meaning."""
    return {**CODES, **{finding.code: finding.meaning for check in registered().values() for finding in check.findings}}


def checks_of(options: BlockOptions) -> list[Check]:
    """Returns an instance of every check for one process of a validation."""
    from engine.data.checks.check import Setup

    setup = Setup(options)
    return [check(setup) for check in registered().values()]


def running(checks: list[Check]) -> list[Check]:
    """Returns the checks that the policies do not turn off, in the order in which they run."""
    return sorted((check for check in checks if check.is_on), key=lambda check: check.order)


def section_lines(stats: Mapping[str, Any]) -> list[str]:
    """Returns what each check adds to the text of a report, from the report's `stats`."""
    return [line for check in registered().values() for line in check.lines(stats)]
