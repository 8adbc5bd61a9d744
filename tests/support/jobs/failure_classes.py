"""Every failure class, each as the classification itself makes it from evidence."""

from __future__ import annotations

from typing import Any

from engine.training.failures import Evidence, ExitEvidence, FailureClass, Outcome, PastAttempt, StopReason, classify_failure


def _made(outcome: Outcome | None = None, *, detail: dict[str, Any] | None = None, **evidence: Any) -> FailureClass:
    exit_ = None if outcome is None else ExitEvidence(outcome=outcome, step=3, total_steps=9, message="it ended", detail=detail or {})
    found = classify_failure(Evidence(phase="exited", exit=exit_, last_step=3, **evidence))
    assert found is not None
    return found


STUCK = [PastAttempt(code="internal", committed_step=3, last_step=3)] * 3
CLASSES: list[FailureClass] = [
    *(_made(outcome) for outcome in Outcome if outcome is not Outcome.SUCCEEDED),
    _made(Outcome.INTERNAL, detail={"code": "base_model_unavailable"}),
    _made(stop_reason=StopReason.CANCEL),
    _made(stop_reason=StopReason.PAUSE),
    _made(stop_reason=StopReason.STALLED),
    _made(),
    _made(Outcome.INTERNAL, history=STUCK),
]
