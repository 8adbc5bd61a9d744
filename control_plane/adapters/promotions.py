"""Promote, roll back, deprecate and approve adapters, and resolve the model of a request.

The desired state is a row, written in one transaction with the stage; serving follows it (:mod:`control_plane.serving.rollout`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.service import find, get_adapter, kept, locked, set_stage, unservable, versions
from control_plane.adapters.tables import Adapter, adapters
from control_plane.evaluations.tables import evaluations
from control_plane.notifications import outbox
from control_plane.platform.context import Platform
from control_plane.serving import accepted_bases, model_routes, node_files, observations, rollout
from control_plane.serving.rollout import LOADED, UNLOADED
from control_plane.serving.tables import deployments
from core.errors import Conflict, Forbidden, InvalidRequest, NotFound
from core.storable_text import printable
from engine.adapters import (
    FULL_MODEL,
    STAGE_TRANSITIONS,
    AdapterRecord,
    PromotionCandidate,
    Refusal,
    Stage,
    base_mismatch,
    check_transition,
    parse_adapter_name,
    promotion_refusals,
    release_step,
)
from engine.evals import QUARANTINED, Finding, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    withdrawn: Adapter
    serving: Adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """Value for ``model`` in a request to the fleet."""

    model: str
    adapter: Adapter | None
    """None for a base model."""


def promote(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Promote an adapter to production and load it on every server; a second call changes nothing.

    All reasons against it are listed at once (``Conflict``, code ``promotion_refused``). An unreachable fleet is not one: the adapter is
    promoted, and `observed` and `detail` show that it is not served yet. Requests to its lineage go to its predecessor until a server was
    seen to answer with this one (:func:`resolve_model`).
    """
    current = get_adapter(platform, tenant, reference)
    requested = rollout.ask(platform)
    candidate = _candidate(platform, current, requested)
    if found := promotion_refusals(candidate):
        raise _refused(current, found)
    with platform.engine.begin() as conn:
        stage = locked(conn, tenant, current.id).stage
        if (mismatch := base_mismatch(_on_present_base(platform, conn, candidate))) is not None:
            raise _refused(current, [mismatch])
        if current.type == FULL_MODEL and (over := _over_limit(conn, tenant, current)) is not None:
            raise _refused(current, [over])
        if stage != Stage.PRODUCTION:
            check_transition(current.id, stage, Stage.PRODUCTION)
            set_stage(conn, current.id, Stage.PRODUCTION, promoted_at=platform.clock())
        rollout.desire(conn, current, LOADED, platform.clock())
    rollout.load(platform, current, requested)
    return get_adapter(platform, tenant, current.id)


def deploy(platform: Platform, tenant: str, reference: str, *, stage: str = Stage.PRODUCTION) -> Adapter:
    """Move an adapter to `stage`: ``production`` promotes it (:func:`promote`), ``staging`` holds it, unserved, for a later promotion.

    A second call changes nothing. A production adapter cannot return to staging: ``Conflict`` names the calls that withdraw it.
    """
    if stage == Stage.PRODUCTION:
        return promote(platform, tenant, reference)
    if stage != Stage.STAGING:
        raise InvalidRequest(
            f"stage {stage[:80]!r} is not one of staging, production; choose one, or leave it out for production",
            code="invalid_stage",
            param="stage",
        )
    with platform.engine.begin() as conn:
        current = locked(conn, tenant, reference)
        if current.stage == Stage.PRODUCTION:
            raise Conflict(
                f"adapter {current.id} is in production, and staging would stop serving it; roll it back or deprecate it instead",
                code="invalid_state",
                param="stage",
            )
        if current.stage != Stage.STAGING:
            check_transition(current.id, current.stage, Stage.STAGING)
            set_stage(conn, current.id, Stage.STAGING)
    return get_adapter(platform, tenant, current.id)


def _refused(record: AdapterRecord, found: Sequence[Refusal]) -> Conflict:
    reasons = "; ".join(f"{r.code}: {r.detail}" for r in found)
    what = "model" if record.type == FULL_MODEL else "adapter"
    return Conflict(f"{what} {record.id} cannot be promoted: {reasons}", code="promotion_refused", param="adapter_id")


MAX_SERVERS = 4
"""Whole models of a tenant that are served at once, because each takes GPUs as long as it is: two lineages, each with the version before
it for a rollback."""


def _over_limit(conn: Connection, tenant: str, record: AdapterRecord) -> Refusal | None:
    """Return why a whole model gets no server; holds a lock until the promotion ends, so that of several at once each counts."""
    conn.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"model_servers:{tenant}", 0))))
    others = sa.and_(adapters.c.tenant_id == tenant, adapters.c.type == FULL_MODEL, adapters.c.id != record.id)
    served = sa.select(adapters.c.name).join(deployments).where(others, deployments.c.desired == LOADED).order_by(adapters.c.promoted_at)
    if len(names := conn.scalars(served).all()) < MAX_SERVERS:
        return None
    return Refusal(
        code="too_many_servers",
        detail=f"{len(names)} other whole models of this tenant are served, limit {MAX_SERVERS}; deprecate one, such as {names[0]}",
    )


def _on_present_base(platform: Platform, conn: Connection, candidate: PromotionCandidate) -> PromotionCandidate:
    """Check `candidate` against the present catalogue and verdicts: a concurrent base update waits for the adapter's locked row, or is
    seen."""
    present, accepted = (
        platform.models.card(candidate.record.base_model).digest,
        accepted_bases.accepted_digests(platform.models, conn, candidate.record),
    )
    served = candidate.served_digests if candidate.from_servers else (present,)
    return replace(candidate, served_digests=served, catalogue_digest=present, accepted_digests=accepted)


def _candidate(platform: Platform, current: AdapterRecord, requested: rollout.FleetState) -> PromotionCandidate:
    reported = {r.base_digest for r in requested.pool(current.base_model) if r.base_digest}
    in_catalogue = platform.models.get(current.base_model).digest
    found = file_refusals(platform, current)
    with platform.engine.connect() as conn:
        accepted = accepted_bases.accepted_digests(platform.models, conn, current)
    return PromotionCandidate(
        record=current, served_digests=sorted(reported or {in_catalogue}), from_servers=bool(reported), accepted_digests=accepted,
        catalogue_digest=in_catalogue, file_refusals=found, starts_servers=platform.servers is not None,
        findings=_findings(platform, current), release_policy=platform.settings.release_policy,
    )  # fmt: skip


def failed_rules(platform: Platform, record: AdapterRecord) -> Sequence[Finding]:
    """Return the findings that quarantined an adapter; none if it is not quarantined, or its report was deleted."""
    return [finding for finding in _findings(platform, record) if finding.blocking and not finding.passed]


def _findings(platform: Platform, record: AdapterRecord) -> Sequence[Finding]:
    try:
        return quarantining_verdict(platform, record).findings if record.stage == Stage.QUARANTINED else ()
    except NotFound:
        return ()


def quarantining_verdict(platform: Platform, record: AdapterRecord) -> Verdict:
    """Return the verdict that quarantined an adapter, or else that of its job's evaluation; ``NotFound`` if its report was deleted."""
    e = evaluations.c
    query = (
        sa.select(e.report_key)
        .where(e.adapter_id == record.id, e.outcome == QUARANTINED, e.eval_config.is_(None), e.report_key.is_not(None))
        .order_by(e.finished_at.desc(), e.id.desc())
        .limit(1)
    )
    with platform.engine.connect() as conn:
        key = conn.execute(query).scalar() or record.eval_report_key
    return Verdict.from_dict(json.loads(platform.objects.get_bytes(key))["verdict"])


def obstacles(platform: Platform, tenant: str, reference: str) -> list[str]:
    """Return why servers cannot load the stored files of an adapter; empty if they can, and for a whole model, whose server checks them."""
    return [f"{r.code}: {r.detail}" for r in file_refusals(platform, get_adapter(platform, tenant, reference))]


_looked: dict[tuple[object, ...], Sequence[Refusal]] = {}
"""Verification results of directories, valid while the file system shows their files as unchanged."""
MAX_LOOKED = 4096


def file_refusals(platform: Platform, record: AdapterRecord) -> Sequence[Refusal]:
    """Return differences from the manifest, and what servers could not serve; reads every byte once. None for a whole model, whose files
    were verified when it was registered, and are compared with the manifest where its server starts."""
    if record.type == FULL_MODEL:
        return ()
    directory = node_files.materialise(platform, record)
    key = (directory, record.manifest_sha256, *node_files.stats(directory))
    if key not in _looked:
        differences = node_files.differences(directory, manifest_sha256=record.manifest_sha256)
        found = [*differences, *unservable(platform, record.base_model, directory)]
        if differences:
            return found  # a disk that failed once may recover
        if len(_looked) >= MAX_LOOKED:
            _looked.clear()
        _looked[key] = found
    return _looked[key]


def rollback(platform: Platform, tenant: str, reference: str) -> RolledBack:
    """Withdraw a production adapter in favor of the one promoted before it in the same lineage, in one call.

    The lineage is tenant, base model and suffix. The earlier adapter is usually still in production and loaded; if not, it is loaded before
    anything changes, and if no ready server then answers with it, nothing changes: ``Conflict`` (``previous_not_served``). A fleet without
    a ready server is not an obstacle, as for a promotion. The commit switches requests over; the withdrawn adapter is unloaded once its
    open requests have ended. A second call changes nothing; ``Conflict`` (``no_previous_adapter``) if there is no earlier adapter.
    """
    brought_back: str | None = None
    while True:
        with platform.engine.begin() as conn:
            current, previous = _to_roll_back(conn, tenant, reference)
            if locked(conn, tenant, previous.id).stage != Stage.PRODUCTION:  # deprecated since it was read: there is another predecessor
                continue
            if previous.id == brought_back or observations.is_served(conn, previous.id):
                _go_back(platform, conn, current, previous)
                break
            observations.forgive(conn, previous.id)
        _bring_back(platform, current, previous)
        brought_back = previous.id  # repeat if another one is promoted in between
    return RolledBack(withdrawn=get_adapter(platform, tenant, current.id), serving=get_adapter(platform, tenant, previous.id))


def _go_back(platform: Platform, conn: Connection, current: AdapterRecord, previous: AdapterRecord) -> None:
    if current.stage == Stage.PRODUCTION:
        set_stage(conn, current.id, Stage.STAGING)
        data = {"stage": Stage.STAGING.value, "job_id": current.job_id, "in_favour_of": previous.id}
        outbox.publish(conn, current.tenant_id, "adapter.rolled_back", current.id, data, now=platform.clock())
        model_routes.tell_of_withdrawal(conn, current, platform.clock())
    wishes = [(previous, LOADED), (current, UNLOADED)]
    for record, desired in sorted(wishes, key=lambda w: w[0].id):  # in a fixed order, so that two rollbacks cannot deadlock
        rollout.desire(conn, record, desired, platform.clock())


def _bring_back(platform: Platform, current: AdapterRecord, previous: AdapterRecord) -> None:
    """Load the earlier adapter; ``Conflict`` if servers are ready and none answers with it, or none serves a base that it is accepted
    on."""
    requested = rollout.ask(platform)
    ready = requested.pool(previous.base_model)
    why = rollout.load(platform, previous, requested)
    whole = previous.type == FULL_MODEL
    if whole and why is None:
        why = f"its server does not run; promote {previous.id} to start it"
    if not (ready or whole) or current.stage != Stage.PRODUCTION:
        return
    with platform.engine.connect() as conn:
        served = observations.is_served(conn, previous.id, None if whole else [r.url for r in ready])
        accepted = accepted_bases.accepted_digests(platform.models, conn, previous)
    reported = {r.base_digest for r in ready if r.base_digest} or {platform.models.get(previous.base_model).digest}
    if served and (whole or reported & accepted):
        return
    if served:
        why = f"base_digest_mismatch: the catalogue's {previous.base_model} is not one that it was accepted on; evaluate it there"
    raise Conflict(
        f"adapter {current.id} stays in production: no server can serve {previous.id}, its predecessor ({why}); "
        "try again, mend that, promote another one, or deprecate this one to stop serving it",
        code="previous_not_served",
        param="adapter_id",
    )


def _to_roll_back(conn: Connection, tenant: str, reference: str) -> tuple[AdapterRecord, AdapterRecord]:
    """Return the adapter, locked, and its predecessor."""
    current = locked(conn, tenant, reference)
    again = current.stage == Stage.STAGING and current.promoted_at is not None
    if current.stage != Stage.PRODUCTION and not again:
        raise Conflict(f"adapter {current.id} is {current.stage}; only a production adapter can be rolled back", param="adapter_id")
    logical = parse_adapter_name(current.name).logical
    earlier = versions(conn, tenant, logical, before=current.promoted_at) if current.promoted_at else []
    if not earlier:
        raise Conflict(
            f"adapter {current.id} has no earlier production adapter of {logical!r} to go back to; "
            "deprecate it to stop serving it, or promote another one",
            code="no_previous_adapter",
            param="adapter_id",
        )
    return current, earlier[0]


def undo_promotion(platform: Platform, before: Adapter, promoted: Adapter) -> None:
    """Undo a promotion that is no longer wanted, unless the adapter was promoted again since.

    It returns to its stage `before`, if that is a legal move; a draft goes to staging.
    """
    with platform.engine.begin() as conn:
        current = locked(conn, before.tenant_id, before.id)
        if current.stage != Stage.PRODUCTION or current.promoted_at != promoted.promoted_at:
            return
        back = before.stage if before.stage in STAGE_TRANSITIONS[Stage.PRODUCTION] else Stage.STAGING
        set_stage(conn, before.id, back, promoted_at=before.promoted_at)
        model_routes.tell_of_withdrawal(conn, before, platform.clock())
        rollout.desire(conn, before, UNLOADED, platform.clock())


def deprecate(platform: Platform, tenant: str, reference: str) -> Adapter:
    """Stop serving an adapter; its files stay for the grace period. A second call changes nothing.

    New requests no longer reach it; it is unloaded once open ones have ended.
    """
    with platform.engine.begin() as conn:
        record = locked(conn, tenant, reference)
        if record.stage != Stage.DEPRECATED:
            check_transition(record.id, record.stage, Stage.DEPRECATED)
            set_stage(conn, record.id, Stage.DEPRECATED, deprecated_at=platform.clock())
            model_routes.tell_of_withdrawal(conn, record, platform.clock())
        rollout.desire(conn, record, UNLOADED, platform.clock())
    return get_adapter(platform, tenant, record.id)


def delete(platform: Platform, tenant: str, model: str) -> None:
    """OpenAI's deletion of a fine-tuned model: :func:`deprecate`, by its model name or id. Deleting again changes nothing.

    A model that was never served (quarantined) is only deleted with all of the tenant's data; ``Conflict`` says so.
    """
    if model in platform.models.ids():
        raise Forbidden(
            f"{model} is a base model of the platform and cannot be deleted; name one of your fine-tuned models (GET /v1/models)",
            code="not_your_model",
            param="model",
        )
    try:
        record = get_adapter(platform, tenant, model)
    except NotFound as e:
        raise NotFound(
            f"no fine-tuned model {model[:120]!r}; list yours with GET /v1/adapters (a logical name: DELETE /v1/model_routes/NAME)",
            code="model_not_found",
            param="model",
        ) from e
    if record.stage != Stage.ARCHIVED:
        deprecate(platform, tenant, record.id)


def resolve_model(platform: Platform, tenant: str, name: str, *, affinity: str = "") -> Resolved:
    """Return the fleet's name for the model of a tenant's request, and the servers that have it.

    1. A base model of the catalogue.
    2. A route of the tenant: one of its targets, the same one for the same `affinity`.
    3. An ``ft:`` name without its last part: the newest production adapter of that lineage that a server was seen to answer with; the
       newest if there is none.
    4. An adapter id or full ``ft:`` name: that adapter, if it is in production.
    """
    if name in platform.models.ids():
        return Resolved(model=name, adapter=None)
    with platform.engine.connect() as conn:
        if model_routes.is_name(name) and (route := model_routes.find(conn, tenant, name)) is not None:
            target = model_routes.choose(name, route.targets, affinity=affinity)
            return Resolved(model=target.model, adapter=target.adapter)
        newest = versions(conn, tenant, name)
        adapter = next((a for a in newest if a.served_on != ()), newest[0]) if newest else find(conn, tenant, name)
    if adapter is None:
        raise NotFound(
            f"the model {name[:160]!r} does not exist; use a base model ({', '.join(platform.models.ids())}) or one of your adapters",
            code="model_not_found",
            param="model",
        )
    if adapter.stage == Stage.QUARANTINED:
        step = release_step(adapter, _findings(platform, adapter), (), policy=platform.settings.release_policy)
        raise Forbidden(
            f"model {adapter.id} was trained and is not approved: it did not pass its evaluation; `ft eval {adapter.job_id}` shows why, "
            f"and {step}",
            code="model_not_approved",
            param="model",
        )
    if adapter.stage != Stage.PRODUCTION:
        raise Conflict(f"adapter {adapter.id} is {adapter.stage} and not served; promote it first", code="model_not_served", param="model")
    return Resolved(model=adapter.name, adapter=adapter)


NONE, PENDING, APPROVED, REJECTED = "none", "pending", "approved", "rejected"
MAX_NOTE_CHARS = 2000


def approve(platform: Platform, tenant: str, reference: str, *, by: str, note: str | None = None, and_promote: bool = False) -> Adapter:
    """Approve an adapter for promotion, and promote it if requested. Approving again changes nothing; a rejected adapter can be
    approved."""
    decided = _decide(platform, tenant, reference, APPROVED, by=by, note=note)
    return promote(platform, tenant, decided.id) if and_promote else decided


def reject(platform: Platform, tenant: str, reference: str, *, by: str, note: str | None = None) -> Adapter:
    """Reject an adapter, so that it cannot be promoted; one in production has to be rolled back or deprecated first."""
    return _decide(platform, tenant, reference, REJECTED, by=by, note=note)


def _decide(platform: Platform, tenant: str, reference: str, decision: str, *, by: str, note: str | None) -> Adapter:
    if note is not None and len(note) > MAX_NOTE_CHARS:
        raise InvalidRequest(f"note has {len(note)} characters, at most {MAX_NOTE_CHARS} are kept", code="invalid_note", param="note")
    with platform.engine.begin() as conn:
        record = locked(conn, tenant, reference)
        _check(record, decision)
        if record.approval != decision:
            signed = {"approved_by": by, "approved_at": platform.clock(), "approval_note": None if note is None else printable(note)}
            with kept(f"adapter {record.id}"):
                conn.execute(sa.update(adapters).where(adapters.c.id == record.id).values(approval=decision, **signed))
    return get_adapter(platform, tenant, record.id)


def _check(record: AdapterRecord, decision: str) -> None:
    if record.approval == NONE:
        raise Conflict(
            f"adapter {record.id} needs no approval: its job did not ask for one; promote it, or deprecate it",
            code="approval_not_asked_for",
        )
    if decision == REJECTED and record.stage is Stage.PRODUCTION:
        raise Conflict(
            f"adapter {record.id} is in production; roll it back or deprecate it before you reject it", code="invalid_state", param="stage"
        )
    if decision == APPROVED and record.stage in (Stage.QUARANTINED, Stage.ARCHIVED):
        raise Conflict(
            f"adapter {record.id} is {record.stage} and is not served; there is nothing to approve",
            code="invalid_state",
            param="stage",
        )
