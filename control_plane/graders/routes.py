"""``/v1/fine_tuning/alpha/graders``: try a grader on one answer. Graders call no model and run no tenant code."""

from __future__ import annotations

from fastapi import APIRouter

from control_plane.graders import rules as graders
from control_plane.graders.schemas import GraderErrors, GraderRun, GraderRunMetadata, RunGrader, ValidatedGrader, ValidateGrader
from control_plane.http.authentication import Reader
from core.storable_text import check_storable

router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["fine_tuning"])


@router.post("/run", summary="Run a grader")
def run(_: Reader, body: RunGrader) -> GraderRun:
    """Grade one answer. Errors with this item or answer are reported as flags in the response; an invalid grader is refused."""
    check_storable({"grader": body.grader, "item": body.item})
    grader = graders.parse(body.grader)
    done = graders.run(grader, item=body.item, sample=body.model_sample)
    flags = {name: name in done.errors for name in graders.ERRORS}
    return GraderRun(
        reward=done.reward,
        sub_rewards=dict(done.sub_rewards),
        metadata=GraderRunMetadata(
            errors=GraderErrors.model_validate(flags),
            execution_time=done.seconds,
            name=grader.name,
            scores=dict(done.sub_rewards) or {grader.name: done.reward},
            type=grader.type,
        ),
        model_grader_token_usage_per_model={},
    )


@router.post("/validate", summary="Validate a grader")
def validate(_: Reader, body: ValidateGrader) -> ValidatedGrader:
    """Check a grader and return it as it was sent. An invalid grader is refused with the reason."""
    check_storable(body.grader, "grader")
    graders.parse(body.grader)
    return ValidatedGrader(grader=body.grader)
