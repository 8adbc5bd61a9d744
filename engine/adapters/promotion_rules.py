"""Promotion: all reasons why an adapter may not go to production.

1. ``needs_own_server``: it is an adapter, or the platform can start a server for it. Otherwise it is refused for that reason alone.
2. ``stage``: its stage may become production (a quarantined or archived one may not).
3. ``gate_failed``: its evaluation passed the gate, or a person released it. The refusal names each failed rule; it stands for rule 2.
4. ``needs_approval``: a person has approved it, if its job requires that.
5. ``base_digest_mismatch``: the base that the servers serve is, to the byte, the one it was trained on, or one on which it was evaluated
   again and accepted; and so is the one that the base's id stands for, which servers serve from their next start on. A whole model is
   served without its base.
6. ``manifest_mismatch``: its files are the registered ones.
7. Everything that :func:`engine.adapters.package.verify` finds: the servers can serve it.

And release: all reasons why an adapter that did not pass its gate may not be served anyway.

1. ``stage``: it is quarantined. Otherwise it is refused for that reason alone.
2. ``needs_operator``: the operators of the platform leave releases to tenants.
3. ``gate_failed``: rule ``adapter_applied`` of its evaluation passed: one that changes nothing, or cannot be loaded, answers as its base.
4. ``needs_operator``: its rule ``safety`` passed, or an operator releases it.
5. As 6 and 7 of promotion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from engine.adapters.record import FULL_MODEL, AdapterRecord
from engine.adapters.servability import Refusal
from engine.adapters.stages import STAGE_TRANSITIONS, Stage
from engine.adapters.whole_model import OWN_SERVER
from engine.evals import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionCandidate:
    """Input of promotion: the record, the served bases, and the findings in the files."""

    record: AdapterRecord
    served_digests: Sequence[str]
    """Digests of the base, of every server that reports it; the catalogue's if none does."""
    from_servers: bool
    """Whether the servers reported `served_digests`."""
    accepted_digests: Set[str]
    """Digests on which it may be served: the one that it was trained on, and those on which it was evaluated again and passed."""
    catalogue_digest: str = ""
    """Digest that the base's id stands for: after an update, servers serve the earlier bytes until they are restarted."""
    findings: Sequence[Finding] = ()
    """Those of the verdict that quarantined it; empty if it is not quarantined, or if its report was deleted."""
    release_policy: str = "tenant"
    """Who may release it: see :func:`release_refusals`."""
    starts_servers: bool = False
    """Whether the platform can start a server for a whole model."""
    file_refusals: Sequence[Refusal]
    """Differences from the manifest (``package.check_files``), then what the servers could not serve (``package.verify``)."""


def promotion_refusals(candidate: PromotionCandidate) -> list[Refusal]:
    """Returns why `candidate` may not be promoted, in the order of the rules; empty if it may."""
    if candidate.record.type == FULL_MODEL and not candidate.starts_servers:
        return [OWN_SERVER]
    return [*_record_refusals(candidate), *candidate.file_refusals]


def _record_refusals(candidate: PromotionCandidate) -> Iterator[Refusal]:
    record = candidate.record
    is_gated = record.stage == Stage.QUARANTINED and not record.is_cleared
    if not is_gated and record.stage != Stage.PRODUCTION and Stage.PRODUCTION not in STAGE_TRANSITIONS[record.stage]:
        promotable = sorted(stage for stage, targets in STAGE_TRANSITIONS.items() if Stage.PRODUCTION in targets)
        yield Refusal(code="stage", detail=f"it is {record.stage}; only {', '.join(promotable)} can be promoted")
    if not record.is_cleared:
        failed = [f for f in candidate.findings if f.blocking and not f.passed]
        why = "; ".join(f"rule {f.rule}: {f.sentence}" for f in failed) or "its evaluation did not pass the gate"
        step = release_step(record, candidate.findings, candidate.file_refusals, policy=candidate.release_policy)
        yield Refusal(code="gate_failed", detail=f"{why}. `ft eval {record.job_id}` shows the numbers; {step}")
    if record.approval in ("pending", "rejected"):
        text = "waits for a person's approval" if record.approval == "pending" else "was rejected by a person"
        yield Refusal(code="needs_approval", detail=f"it {text}; approve it with POST /v1/adapters/{record.id}/approve")
    if (mismatch := base_mismatch(candidate)) is not None:
        yield mismatch


def base_mismatch(candidate: PromotionCandidate) -> Refusal | None:
    """Returns why it may not be served on the served base, or on the one that servers load at their next start."""
    record, catalogue = candidate.record, candidate.catalogue_digest
    if record.type == FULL_MODEL:
        return None
    wrong = [digest for digest in candidate.served_digests if digest not in candidate.accepted_digests]
    if wrong:
        source = "is served" if candidate.from_servers else "is in the catalogue (the servers do not report what they serve)"
        step = f"evaluate it on the served base (`ft adapters evaluate {record.id}`), or train again"
        if candidate.from_servers and catalogue in candidate.accepted_digests:
            step = "the servers still have the bytes from before the base's update: an operator starts them again"
    elif catalogue and catalogue not in candidate.accepted_digests:
        wrong, source = [catalogue], "is what its base was updated to, which servers serve once they are started again"
        step = f"evaluate it there (`ft adapters evaluate {record.id}`), or train again"
    else:
        return None
    return Refusal(
        code="base_digest_mismatch",
        detail=f"trained on {record.base_model} {record.base_digest[:19]}, but {', '.join(d[:19] for d in wrong)} {source}; {step}",
    )


def release_refusals(
    record: AdapterRecord, findings: Sequence[Finding], files: Sequence[Refusal], *, policy: str, by_operator: bool
) -> list[Refusal]:
    """Returns why `record` may not be released, in the order of the rules; empty if it may.

    `findings`: those of the evaluation that quarantined it. `files`: refusals of ``package.check_files`` and ``package.verify``. `policy`:
    who may release models, ``tenant`` (also operators) or ``operator``.
    """
    if record.stage != Stage.QUARANTINED:
        return [Refusal(code="stage", detail=f"it is {record.stage}, and only a quarantined one needs a release")]
    return [*_of_verdict([f for f in findings if not f.passed], policy=policy, by_operator=by_operator), *files]


@dataclass(frozen=True, kw_only=True, slots=True)
class Releasability:
    """Who may release an adapter that did not pass its gate."""

    by: Literal["tenant", "operator"] | None
    """``tenant``: its admins and operators; None: it cannot be released."""
    obstacles: Sequence[Refusal] = ()
    """Why its tenant may not, or why not even an operator may."""


def releasability(record: AdapterRecord, findings: Sequence[Finding], files: Sequence[Refusal], *, policy: str) -> Releasability:
    """Returns who may release `record`, by :func:`release_refusals`."""
    if not (of_tenant := release_refusals(record, findings, files, policy=policy, by_operator=False)):
        return Releasability(by="tenant")
    if not (of_operator := release_refusals(record, findings, files, policy=policy, by_operator=True)):
        return Releasability(by="operator", obstacles=of_tenant)
    return Releasability(by=None, obstacles=of_operator)


def release_step(record: AdapterRecord, findings: Sequence[Finding], files: Sequence[Refusal], *, policy: str) -> str:
    """Returns who can release `record`, with the command."""
    match releasability(record, findings, files, policy=policy).by:
        case "tenant":
            return f"an admin of the tenant can release it: `ft adapters release {record.id} --reason ...`"
        case "operator":
            return f"an operator can release it: `ft admin adapters release {record.tenant_id} {record.id} --reason ...`"
        case _:
            return "it cannot be released; train again"


def _of_verdict(failed: Sequence[Finding], *, policy: str, by_operator: bool) -> Iterator[Refusal]:
    if policy == "operator" and not by_operator:
        yield Refusal(code="needs_operator", detail="here only operators release models; ask one")
    for finding in failed:
        if finding.rule == "adapter_applied":
            yield Refusal(code="gate_failed", detail=f"{finding.detail}; train again")
        elif finding.rule == "safety" and not by_operator:
            yield Refusal(code="needs_operator", detail=f"{finding.detail}; only an operator may release it")
