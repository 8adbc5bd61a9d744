"""What the database refuses of the registry, said as the errors that callers know: the gap by name, or the rule that was broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sqlalchemy.exc import IntegrityError as Violation

from ft_assets.errors import Conflict, FtError, LineageIncomplete

GAPS: Mapping[str, str] = {
    "fk_adapters_tenant_id_dataset_id": "dataset_id",
    "fk_adapters_job_id": "job_id",
    "fk_adapters_parent_adapter_id": "parent_adapter_id",
    "fk_adapters_parent_checkpoint_id": "parent_checkpoint_id",
    "ck_adapters_rank_and_alpha_present": "rank, alpha",
    "ck_adapters_type_known": "type",
}
OF_FIELD = re.compile(r"ck_adapters_(?P<field>[a-z0-9_]+?)(_present|_sha256_format|_format)")
REFUSALS: Mapping[str, tuple[str, str]] = {
    "ck_adapters_served_passed_gate": ("gate_failed", "its evaluation did not pass the gate"),
    "ck_adapters_production_approved": ("needs_approval", "a person has to approve it first: POST /v1/adapters/{id}/approve"),
    "adapters_record_frozen": ("record_is_final", "its record never changes; register another adapter"),
    "adapters_stage_moves": ("invalid_state", "its stage does not lead there"),
    "adapters_kept": ("record_is_final", "its record is kept for good; only its files can be deleted"),
    "jobs_recorded_frozen": ("record_is_final", "what a registered adapter was trained from never changes"),
}


@contextmanager
def kept(subject: str) -> Iterator[None]:
    """Say ``LineageIncomplete`` or ``Conflict`` where the wrapped statements break a rule of the registry."""
    try:
        yield
    except Violation as violation:
        told = explained(violation, subject)
        if told is None:
            raise
        raise told from violation


def explained(violation: Violation, subject: str) -> FtError | None:
    """The error that a refusal of the database stands for; None where it is none of the registry's."""
    diagnosis = getattr(violation.orig, "diag", None)
    constraint = getattr(diagnosis, "constraint_name", None) or ""
    column = getattr(diagnosis, "column_name", None)
    if constraint in REFUSALS:
        code, why = REFUSALS[constraint]
        said = getattr(diagnosis, "message_primary", "") or ""
        detail = f" ({said})" if constraint.startswith("adapters_") else ""
        return Conflict(f"{subject}: {why}{detail}", code=code, param="adapter_id")
    gap = _gap(constraint, column)
    if gap is None:
        return None
    return LineageIncomplete(f"{subject} cannot be registered without: {gap}; run the step that makes what is missing again")


def _gap(constraint: str, column: str | None) -> str | None:
    if constraint == "adapters_enter" or not constraint:  # of a column that must not be null there is no constraint's name
        return column
    found = OF_FIELD.fullmatch(constraint)
    return GAPS.get(constraint) or (None if found is None else _column(found["field"]))


def _column(field: str) -> str:
    return f"{field}_sha256" if field in ("spec", "lock", "manifest") else field
