"""Promotion: every reason why an adapter may not go to production, at once.

1. ``needs_own_server``: it is an adapter. A whole model is refused for that alone, whatever else may be said of it.
2. ``stage``: its stage may become production (a quarantined or archived one may not).
3. ``gate_failed``: its evaluation passed the gate.
4. ``base_digest_mismatch``: the base being served is, to the byte, the one it was trained on.
5. ``manifest_mismatch``: its files are the ones that were registered.
6. Everything that :func:`ft_assets.adapters.package.verify` finds: the servers can serve it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ft_assets.adapters.package import Refusal
from ft_assets.adapters.record import FULL, AdapterRecord
from ft_assets.adapters.stages import TRANSITIONS, Stage
from ft_assets.adapters.whole_model import OWN_SERVER


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What promotion looks at: the record, what is being served, and what was found in the files."""

    record: AdapterRecord
    served_base_digest: str
    file_refusals: Sequence[Refusal]
    """Differences from the manifest (``package.check_files``)."""
    package_refusals: Sequence[Refusal]
    """What the servers could not serve (``package.verify``)."""


def refusals(candidate: Candidate) -> list[Refusal]:
    """Why `candidate` may not be promoted, in the order of the rules; empty if it may."""
    if candidate.record.type == FULL:
        return [OWN_SERVER]
    return [*_record_refusals(candidate), *candidate.file_refusals, *candidate.package_refusals]


def _record_refusals(candidate: Candidate) -> Iterator[Refusal]:
    record = candidate.record
    if record.stage != Stage.PRODUCTION and Stage.PRODUCTION not in TRANSITIONS[record.stage]:
        yield Refusal(code="stage", detail=f"it is {record.stage}; only {', '.join(_promotable())} can be promoted")
    if not record.eval_passed:
        yield Refusal(code="gate_failed", detail=f"its evaluation did not pass the gate; see the report {record.eval_report_key}")
    if record.base_digest != candidate.served_base_digest:
        yield Refusal(
            code="base_digest_mismatch",
            detail=f"trained on {record.base_model} {record.base_digest[:19]}, but {candidate.served_base_digest[:19]} is served; "
            "evaluate it on the served base, or train again",
        )


def _promotable() -> list[str]:
    return sorted(stage for stage, targets in TRANSITIONS.items() if Stage.PRODUCTION in targets)
