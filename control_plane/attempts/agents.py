"""What the agents of an attempt report and ask for. Their token opens nothing else, and nothing once the attempt is released."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from agent import messages
from agent.messages import (
    Commit,
    Completion,
    Exit,
    Heartbeat,
    HeartbeatAnswer,
    Notice,
    ReadGrants,
    Reported,
    Restored,
    WriteGrant,
    WriteRequest,
)
from control_plane.attempts import checkpoint_retention
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.attempts.exports import export_endings
from control_plane.attempts.tables import agent_tokens, agents
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.jobs import job_logs
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.jobs.tables import Job, job_events, jobs
from control_plane.jobs.transitions import locked, record, record_many, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import PROVISIONING, Event, Level, as_reported, evaluation_event, metrics_event, provisioning_event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.records import record as record_of
from control_plane.platform.secrets import new_secret, sha256_of
from control_plane.queue.tables import reservations
from core import layout
from core.errors import Conflict, Forbidden, IntegrityError, InvalidRequest, NotFound
from core.storable_text import printable, storable
from core.telemetry import correlation
from core.typed_json import from_json
from core.workload import Kind
from engine.training import (
    CHECKPOINT_MANIFEST,
    CheckpointManifest,
    ExitEvidence,
    Outcome,
    StopReason,
    is_sharded,
    merged_manifest,
    parse_manifest,
    part_manifest,
)

NOTICES: Mapping[str, Level] = {
    "checkpoint_upload_failed": "warn", "checkpoint_upload_recovered": "info", "checkpoint_upload_abandoned": "warn",
    "checkpoint_skipped": "warn", "disk_space_freed": "warn",
}  # fmt: skip
"""Events that an agent may write, and their level."""
MAX_COUNT = 2**31 - 1
"""Of steps, heartbeats and notices: what the database's integers hold."""
MAX_TOKENS = MAX_BYTES = 2**53
MAX_ADDRESS = 300
"""Characters of ``host:port``; a name has at most 253 (RFC 1035)."""
SHA256 = re.compile("[0-9a-f]{64}")
MAX_AHEAD_S = 86_400.0
"""How far the clock of a node may be ahead."""
NOT_STORED = "objects_not_stored"
"""Error code of a commit whose objects are not in the store as the manifest lists them."""
MAX_PIECE_BYTES = 1 << 20
HEARTBEAT_CPU_S = 0.0045
"""CPU time of a heartbeat in the API (benchmarks/api_heartbeats_cpu_202611.json)."""
HEARTBEAT_CORES = 0.1
"""What the heartbeats of all running attempts may take of the API, as long as they come every :data:`MAX_HEARTBEAT_S`."""
MAX_HEARTBEAT_S = 15.0
"""One may be missed before an attempt counts as silent (30 s)."""


def introduce(platform: Platform, held: Claim, *, may_read: Sequence[str]) -> str:
    """Return a new token for the attempt's agents; `may_read` are the object prefixes of its inputs.

    Earlier tokens of the attempt stay valid: of two steps that start it at the same time, either's may be the one that it gets. A second
    description may name inputs that the first one did not have. The steps and validations that earlier attempts reported are not
    reported again: a repeated step is bit-identical.
    """
    earlier = agents.alias()
    this = earlier.c.job_id == held.job_id
    step, validation = (
        sa.select(sa.func.coalesce(sa.func.max(earlier.c[name]), 0)).where(this).scalar_subquery()
        for name in ("reported_step", "reported_validation")
    )
    token = new_secret("")
    attempt = {"job_id": held.job_id, "attempt": held.attempt}
    values = {
        **attempt, "may_read": list(may_read), "reported_step": step, "reported_validation": validation, "beat": 0, "notices": 0,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(
            insert(agents)
            .values([{**values, "node": node} for node in range(held.num_nodes)])
            .on_conflict_do_update(index_elements=["job_id", "attempt", "node"], set_={"may_read": values["may_read"]})
        )
        conn.execute(sa.insert(agent_tokens).values(**attempt, sha256=sha256_of(token)))
    return token


def held_by(platform: Platform, token: str) -> Claim:
    """Return the attempt of the agent with this token; ``Conflict`` with code ``attempt_released`` if it has lost its reservation."""
    r, t = reservations.c, agent_tokens.c
    mine = (r.job_id == t.job_id) & (r.attempt == t.attempt) & r.released_at.is_(None)
    query = sa.select(jobs.c.tenant_id, jobs.c.id, t.attempt).join(jobs, jobs.c.id == t.job_id)
    with platform.engine.connect() as conn:
        row = conn.execute(query.where(t.sha256 == sha256_of(token), sa.exists().where(mine))).one_or_none()
    if row is None:
        raise released()
    held = attempts.claim(platform, row.tenant_id, row.id)
    if held.attempt != row.attempt:
        raise released()
    return held


def check_token(platform: Platform, token: str) -> None:
    """``Conflict`` with code ``attempt_released`` if no agent was ever given this token."""
    with platform.engine.connect() as conn:
        if conn.execute(sa.select(agent_tokens.c.job_id).where(agent_tokens.c.sha256 == sha256_of(token))).one_or_none() is None:
            raise released()


def released() -> Conflict:
    return Conflict("the attempt with this token holds no reservation, so its workload must end", code=messages.FENCED)


def _known_by_token() -> sa.Select[Any]:
    a, leader, r, others = agents.c, agents.alias(), reservations.c, reservations.alias().c
    columns = (jobs.c.tenant_id.label("tenant"), jobs.c.state, attempts.STOP_REQUESTED, a.job_id, a.attempt, a.beat, a.notices)
    gang, every = agents.alias().c, agents.alias().c
    num_running = (
        sa.select(sa.func.count(every.node))
        .where(sa.exists().where(others.job_id == every.job_id, others.attempt == every.attempt, others.released_at.is_(None)))
        .scalar_subquery()
    )
    num_nodes = sa.select(sa.func.count(gang.node)).where(gang.job_id == a.job_id, gang.attempt == a.attempt).scalar_subquery()
    return (
        sa.select(*columns, r.kind, r.evaluation_id, r.export_id, leader.c.reported_step, leader.c.reported_validation)
        .add_columns(num_running.label("num_running"), num_nodes.label("num_nodes"))
        .join(reservations, (r.job_id == a.job_id) & (r.attempt == a.attempt) & r.released_at.is_(None))
        .join(leader, (leader.c.job_id == a.job_id) & (leader.c.attempt == a.attempt) & (leader.c.node == 0))
        .join(jobs, jobs.c.id == a.job_id)
        .join(agent_tokens, (agent_tokens.c.job_id == a.job_id) & (agent_tokens.c.attempt == a.attempt))
        .where(agent_tokens.c.sha256 == sa.bindparam("sha256"), a.node == sa.bindparam("node"))
        # What a heartbeat before this one wrote while this statement waited is read again, but only of locked rows.
        .with_for_update(of=[reservations, agents, leader])
    )


KNOWN = _known_by_token()
"""Made once: a heartbeat spends as much on making it as on running it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An attempt with its reservation, and what its agent reported before."""

    tenant: str
    job_id: str
    attempt: int
    kind: Kind
    evaluation_id: str | None
    export_id: str | None
    state: JobState
    stop: str | None
    """Why its workload is to stop, as long as its result is wanted."""
    beat: int
    notices: int
    reported_step: int
    reported_validation: int
    num_running: int
    """Agents of all attempts that hold a reservation."""
    num_nodes: int
    """Of this attempt."""


def heartbeat(platform: Platform, token: str, beat: Heartbeat) -> HeartbeatAnswer:
    """Store what the agent with this token reports, once however often it is sent, and answer whether the workload is to stop.

    One transaction, and two statements if there is no news and the attempt has one node.
    """
    now = platform.clock()
    _check_beat(beat, now)
    with platform.engine.begin() as conn:
        known = _known(conn, token, beat.node)
        if known is None:
            held = held_by(platform, token)
            raise InvalidRequest(f"attempt {held.attempt} of job {held.job_id} has {held.num_nodes} nodes, and no node {beat.node}")
        correlation.bind(tenant=known.tenant, job=known.job_id, attempt=known.attempt)
        if beat.exit is not None and beat.exit.evidence is not None and beat.exit.error is None:
            _check_evidence(conn, known, beat.exit.evidence)
        if reported := _record_news(conn, known, beat, now) if _has_news(known, beat) else {}:
            conn.execute(sa.update(agents).where(_of(known, 0)).values(reported))
        next_s = heartbeat_interval_s(known.num_running)
        if beat.number > known.beat:  # otherwise it was sent again, or overtaken
            told = max(known.notices, beat.first_notice + len(beat.notices))
            values: dict[str, Any] = {"heartbeat_at": sa.func.clock_timestamp(), "facts": asdict(replace(beat.facts, next_s=next_s))}
            values |= {"beat": beat.number, "notices": told}
            values |= {"address": beat.address} if beat.address else {}
            values |= {"exit": storable(asdict(beat.exit))} if beat.exit is not None else {}
            conn.execute(sa.update(agents).where(_of(known, beat.node)).values(values))
        answer = HeartbeatAnswer(stop=_stop(conn, known), next_s=next_s)
        return answer if known.num_nodes == 1 else _of_gang(conn, known, beat.node, answer)


def heartbeat_interval_s(num_running: int) -> float:
    """Return the seconds between the heartbeats of an attempt, so that those of all take :data:`HEARTBEAT_CORES` of the API."""
    return min(MAX_HEARTBEAT_S, max(messages.HEARTBEAT_S, num_running * HEARTBEAT_CPU_S / HEARTBEAT_CORES))


def _known(conn: Connection, token: str, node: int) -> Known | None:
    """Return the attempt of `token`, which cannot lose its reservation before the transaction ends."""
    row = conn.execute(KNOWN, {"sha256": sha256_of(token), "node": node}).mappings().one_or_none()
    return None if row is None else record_of(Known, row)


def _check_beat(beat: Heartbeat, now: datetime) -> None:
    """Refuse impossible values before they are stored, where later readers would fail on them."""
    facts = beat.facts
    for name, count in {"node": beat.node, "number": beat.number, "first_notice": beat.first_notice, "last_step": facts.last_step}.items():
        _check_count(name, count, most=MAX_COUNT - len(beat.notices))
    for name, at in (("began_at", facts.began_at), ("kept_until", facts.kept_until)):
        _check_number(name, at or 0.0, least=0.0, most=now.timestamp() + MAX_AHEAD_S)
    for name, seconds in (("again_s", facts.again_s), ("silence_s", facts.silence_s)):
        _check_number(name, seconds, least=0.0, most=MAX_COUNT)
    if (end := beat.exit) is not None:
        _check_count("exit_code", end.exit_code or 0, least=-MAX_COUNT)
        if end.stop_reason is not None and end.stop_reason not in set(StopReason):
            raise _impossible("stop_reason", end.stop_reason, f"one of {', '.join(StopReason)}")
        if end.error is not None and not all(isinstance(end.error.get(name), str) for name in ("code", "message")):
            raise _impossible("error", sorted(end.error), "an error with a code and a message")
    if beat.evaluation is not None:
        _check_progress(beat.evaluation)
    if not (beat.address.isascii() and beat.address.isprintable()) or len(beat.address) > MAX_ADDRESS:
        raise _impossible("address", printable(beat.address), f"host:port of at most {MAX_ADDRESS} characters")


def _check_progress(progress: Mapping[str, Any]) -> None:
    """Refuse progress of an evaluation or export that nobody could show."""
    for name in ("phase", "subject", "suite"):
        if not isinstance(progress.get(name) or "", str):
            raise _impossible(name, progress[name], "text")
    for name in ("done", "total"):
        _check_count(name, progress.get(name) or 0)
    for name in ("eta_s", "seconds"):
        _check_number(name, progress.get(name) or 0.0, least=0.0, most=MAX_COUNT)


def _check_evidence(conn: Connection, known: Known, evidence: Mapping[str, Any]) -> None:
    """Refuse the end of a training, evaluation or export that cannot be read, or is of steps that the job does not have."""
    if known.kind is Kind.TRAIN:
        _check_training(evidence, _planned(conn, known.job_id))
        return
    names = ("sha256",) if known.export_id is None else ("sha256", "manifest_sha256")
    for name in names:
        if not isinstance(found := evidence.get(name), str) or not SHA256.fullmatch(found):
            raise _impossible(f"exit.evidence.{name}", found, "a digest of 64 hexadecimal digits")
    if known.export_id is not None:
        _check_count("exit.evidence.bytes", evidence.get("bytes"), most=MAX_BYTES)
        if not isinstance(manifest := evidence.get("manifest"), Mapping):
            raise _impossible("exit.evidence.manifest", manifest, "the manifest of an archive")


def _check_training(evidence: Mapping[str, Any], planned: int | None) -> None:
    try:
        found = from_json(ExitEvidence, evidence)
        named = found.outcome is not None and isinstance(found.detail, Mapping)
    except (TypeError, ValueError, AttributeError):
        named = False
    if not named:
        raise _impossible("exit.evidence", sorted(evidence), "the end of a training")
    for name, step in (("step", found.step), ("total_steps", found.total_steps)):
        _check_count(f"exit.evidence.{name}", step, most=planned)
    _check_count("exit.evidence.trained_tokens", found.trained_tokens, most=MAX_TOKENS)


def _check_lines(lines: Sequence[Mapping[str, Any]], planned: int | None) -> None:
    """Refuse metrics of a step that the job does not have; `planned` are its steps. A loss may be infinite or no number."""
    for line in lines:
        trained = "loss" in line
        _check_count("step", line.get("step"), most=planned)
        if trained:
            _check_count("total_steps", line.get("total_steps"), least=line["step"], most=planned)
        for name in ("time", "step_s", "tokens_per_s", "loss", "eval_loss"):
            value = line.get(name, 0.0)
            is_loss = name.endswith("loss") and (value is None or (isinstance(value, float) and not math.isfinite(value)))
            if not is_loss:
                _check_number(f"{name} of step {line['step']}", value, least=-1e30, most=1e30)


def _planned(conn: Connection, job_id: str) -> int | None:
    """Return the steps of the job, as its preparation counted them."""
    found: int | None = conn.execute(sa.select(jobs.c.total_steps).where(jobs.c.id == job_id)).scalar_one()
    return found


def _check_count(name: str, value: object, *, least: int = 0, most: int | None = None) -> None:
    limit = MAX_COUNT if most is None else most
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= limit:
        raise _impossible(name, value, f"a whole number from {least} to {limit}")


def _check_number(name: str, value: object, *, least: float, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _impossible(name, value, f"a number from {least:g} to {most:g}")


def _impossible(name: str, value: object, needed: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {str(value)[:50]} of the report is not {needed}; correct the agent", code="report_invalid")


def _stop(conn: Connection, known: Known) -> str | None:
    if known.kind is Kind.TRAIN:
        return known.stop
    wanted = attempts.is_wanted(conn, job_id=known.job_id, evaluation_id=known.evaluation_id, export_id=known.export_id)
    return known.stop if wanted else StopReason.CANCEL


def _has_news(known: Known, beat: Heartbeat) -> bool:
    if known.kind is not Kind.TRAIN:
        return beat.evaluation is not None or bool(beat.notices)
    begins = beat.node == 0 and beat.phase in PROVISIONING and known.state is JobState.PROVISIONING
    return known.state not in FINAL and bool(beat.metrics or beat.notices or begins)


def _record_news(conn: Connection, known: Known, beat: Heartbeat, now: datetime) -> dict[str, Any]:
    """Record phases, metrics and notices as events of the job; returns how far its metrics are reported. Of an export: its stage."""
    if known.export_id is not None:
        export_endings.record_stage(conn, known.export_id, beat.evaluation or {})
        return {}
    job = locked(conn, known.job_id)
    _check_lines(beat.metrics, job.total_steps)
    state, untold = job.state, beat.notices[max(0, known.notices - beat.first_notice) :]
    if known.kind is Kind.EVALUATE:
        _record_evaluation(conn, known, job, beat, untold, now)
        return {}
    if state in FINAL:
        return {}
    if beat.node == 0 and beat.phase in PROVISIONING and state is JobState.PROVISIONING:
        _record_provisioning(conn, known, beat.phase, now)
    reported = _record_progress(conn, known, state, beat, now)
    record_many(conn, [(known.job_id, event) for notice in untold if (event := _event(notice))], now=now)
    return reported


def _of_gang(conn: Connection, known: Known, node: int, answer: HeartbeatAnswer) -> HeartbeatAnswer:
    """Tell the agent of one node what it needs to know of the others: where the leader is, and whether one has ended."""
    rows = conn.execute(sa.select(agents.c.node, agents.c.address, agents.c.exit).where(_of(known)).order_by(agents.c.node)).all()
    this = (attempts_table.c.job_id == known.job_id) & (attempts_table.c.attempt == known.attempt)
    from_step = conn.execute(sa.select(attempts_table.c.from_step).where(this)).scalar_one()
    ended = [from_json(Exit, row.exit) for row in rows if row.node != node and row.exit is not None]
    return replace(
        answer,
        leader=rows[0].address if all(row.address for row in rows) else "",
        from_step=from_step or 0,
        peer_failed=any((each.evidence or {}).get("outcome") != Outcome.SUCCEEDED for each in ended),
        alone=len(ended) == len(rows) - 1,
    )


def restored(platform: Platform, held: Claim, found: Restored) -> Reported:
    """Record where the attempt begins, and retire the newer checkpoints, which cannot be used: they would count as the newest."""
    now = platform.clock()
    onward = f"Training continues from step {found.step}." if found.step else "Training starts from the beginning."
    with platform.engine.begin() as conn:
        _must_hold(conn, held)
        planned = _planned(conn, held.job_id)
        for step in (found.step, *(skipped.step for skipped in found.skipped)):
            _check_count("step", step, most=planned)
        first = attempts.of_attempt(held) & attempts_table.c.from_step.is_(None)
        if conn.execute(sa.update(attempts_table).where(first).values(from_step=found.step)).rowcount:  # once, however often it is sent
            for skipped in found.skipped:
                message = f"The checkpoint of step {skipped.step} was not used: {printable(skipped.why)}. {onward}"
                event = Event(code="checkpoint_skipped", level="warn", message=message, data={"step": skipped.step, "used": found.step})
                record(conn, held.job_id, event, now=now)
            checkpoint_retention.retire_newer(conn, platform, held.job_id, found.step)
        row = conn.execute(sa.select(agents.c.reported_step, agents.c.reported_validation).where(_of(held, 0))).one()
    return Reported(step=row.reported_step, validation=row.reported_validation)


def read_urls(platform: Platform, held: Claim, keys: Sequence[str]) -> ReadGrants:
    """Return URLs that read the objects that exist; ``Forbidden`` for one that is no input and no checkpoint of the job."""
    with platform.engine.connect() as conn:
        prefixes = conn.execute(sa.select(agents.c.may_read).where(_of(held, 0))).scalar_one()
    urls = {}
    for key in keys:
        if not key.startswith((*prefixes, f"{layout.job_prefix(held.tenant, held.job_id)}/")):
            raise Forbidden(f"attempt {held.attempt} of job {held.job_id} may not read object {key[:200]!r}", code="not_its_object")
        try:
            urls[key] = platform.objects.read_url(key)
        except NotFound:
            continue
    return ReadGrants(urls=urls)


def write_urls(platform: Platform, held: Claim, request: WriteRequest) -> WriteGrant:
    """Return URLs that write one object of the attempt, and no other bytes than those of the given digests."""
    _check_own(held, request.key)
    return platform.objects.begin_upload(request.key, request.part_sha256, request.upload_id)


def complete_upload(platform: Platform, held: Claim, completion: Completion) -> None:
    _check_own(held, completion.key)
    platform.objects.complete_upload(completion)


def commit(platform: Platform, held: Claim, what: Commit) -> None:
    """Commit a checkpoint or the finished model, whose objects were stored; ``Conflict`` if they are not all there."""
    if held.kind is not Kind.TRAIN:
        raise Forbidden(f"attempt {held.attempt} of job {held.job_id} trains nothing, so it commits nothing", code="not_its_object")
    with platform.engine.connect() as conn:
        _check_count("step", what.step, most=_planned(conn, held.job_id))
    prefix = attempts.final_prefix(held) if what.final else layout.checkpoint_prefix(held.tenant, held.job_id, held.attempt, what.step)
    manifest = _stored(platform, prefix, what.manifest_sha256)
    if held.num_nodes > 1 and is_sharded(held.spec) and not what.final:
        _check_parts(platform, held, prefix, manifest)
    metrics = openai_metrics(what.step, manifest.metrics)
    if not attempts.record_checkpoint(
        platform, held, step=what.step, prefix=prefix, manifest_sha256=what.manifest_sha256, metrics=metrics, final=what.final
    ):
        raise released()
    if not what.final:
        checkpoint_retention.retire_checkpoints(platform, held)


def store_log(platform: Platform, held: Claim, begins: int, data: bytes) -> None:
    """Store the piece of the log that begins at byte `begins`, in place of what was stored there; refused beyond what is stored."""
    job_logs.store_piece(platform.objects, layout.attempt_prefix(held.tenant, held.job_id, held.attempt), begins, data)


def _record_evaluation(conn: Connection, held: Known, job: Job, beat: Heartbeat, untold: Sequence[Notice], now: datetime) -> None:
    """Show the evaluation that follows the training to its tenant: a column while it runs, an event per suite, each once."""
    if held.evaluation_id is not None or job.state is not JobState.EVALUATING:
        return
    progress = from_json(EvaluationProgress, storable(dict(beat.evaluation or {})), ignore_unknown=True)
    if progress.total is None and job.evaluation is not None:
        progress = replace(progress, total=job.evaluation.total)
    if beat.evaluation is not None and progress != job.evaluation:
        values: dict[str, Any] = {"evaluation": asdict(progress)}
        values |= {} if progress.eta_s is None else {"estimated_finish_at": now + timedelta(seconds=progress.eta_s)}
        conn.execute(sa.update(jobs).where(jobs.c.id == held.job_id).values(values))
    for notice in untold:
        if notice.code == messages.MILESTONE:
            record_milestone(conn, held.job_id, _milestone(notice), now)


def _milestone(notice: Notice) -> Event:
    try:
        return evaluation_event(storable(dict(notice.data)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _impossible("notice", storable(dict(notice.data)), "a milestone of an evaluation") from error


def record_milestone(conn: Connection, job_id: str, event: Event, now: datetime) -> None:
    """Record the event of an evaluation's milestone once: an attempt on another node, or another review, passes it again."""
    place = {name: value for name, value in (event.data or {}).items() if name in ("kind", "subject", "suite")}
    before = (job_events.c.job_id == job_id) & (job_events.c.code == event.code) & job_events.c.data.contains(place)
    if not conn.execute(sa.select(sa.exists().where(before))).scalar_one():
        record(conn, job_id, event, now=now)


def openai_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return checkpoint metrics under the names of OpenAI's clients, and the step of the best validation if an early stop returns to it.
    Values that are not finite are left out: JSON has no notation for them."""
    names = {"loss": "train_loss", "eval_loss": "full_valid_loss", "best_step": "best_step"}
    return {"step": step} | {names[k]: v for k, v in metrics.items() if k in names and v is not None and math.isfinite(v)}


def _of(held: Claim | Known, *nodes: int) -> sa.ColumnElement[bool]:
    """Select the agents of the attempt on these nodes; of all of them without `nodes`."""
    attempt = sa.and_(agents.c.job_id == held.job_id, agents.c.attempt == held.attempt)
    return attempt & agents.c.node.in_(nodes) if nodes else attempt


def _must_hold(conn: Connection, held: Claim) -> None:
    if not attempts.holds_in(conn, held):
        raise released()


def _record_provisioning(conn: Connection, held: Known, phase: str, now: datetime) -> None:
    """Report what the attempt does before its first step, each phase once."""
    event = provisioning_event(phase, attempt=held.attempt)
    before = (job_events.c.job_id == held.job_id) & (job_events.c.code == event.code) & (job_events.c.data == dict(event.data or {}))
    if not conn.execute(sa.select(sa.exists().where(before))).scalar_one():
        record(conn, held.job_id, event, now=now)


def _record_progress(conn: Connection, known: Known, state: JobState, beat: Heartbeat, now: datetime) -> dict[str, Any]:
    """Store new metric lines as events and the newest on the job; the first step makes the job ``running``."""
    if not beat.metrics:
        return {}
    steps = [m for m in beat.metrics if "loss" in m]
    validations = [m for m in beat.metrics if "eval_loss" in m]
    if steps:
        _move(conn, known, state, steps, saving=beat.phase == "save", now=now)
    news = [m for m in steps if m["step"] > known.reported_step] + [m for m in validations if m["step"] > known.reported_validation]
    record_many(conn, [(known.job_id, metrics_event(storable(as_reported(m)))) for m in news], now=now)
    return {
        "reported_step": max(known.reported_step, *(m["step"] for m in steps), 0),
        "reported_validation": max(known.reported_validation, *(m["step"] for m in validations), 0),
    }


def _move(conn: Connection, held: Known, state: JobState, steps: Sequence[Mapping[str, Any]], *, saving: bool, now: datetime) -> None:
    last = steps[-1]
    if state is JobState.PROVISIONING:
        first = conn.execute(sa.select(jobs.c.first_step_at).where(jobs.c.id == held.job_id)).scalar_one() or now
        transition(conn, held.job_id, JobState.RUNNING, message=f"Training runs (attempt {held.attempt}).", now=now, first_step_at=first)
    left = last["total_steps"] - last["step"]
    finish = datetime.fromtimestamp(now.timestamp() + left * _seconds_per_step(steps), tz=UTC)
    values = {name: last.get(name) for name in ("step", "loss", "tokens_per_s")}
    values["total_steps"] = sa.func.coalesce(jobs.c.total_steps, last["total_steps"])
    conn.execute(sa.update(jobs).where(jobs.c.id == held.job_id).values(**values, checkpointing=saving, estimated_finish_at=finish))


def _seconds_per_step(steps: Sequence[Mapping[str, Any]]) -> float:
    if len(steps) < 2:
        return float(steps[-1].get("step_s") or 0.0)
    return max(0.0, float(steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1))


def _event(notice: Notice) -> Event | None:
    level = NOTICES.get(notice.code)
    return (
        None if level is None else Event(code=notice.code, level=level, message=printable(notice.message), data=storable(dict(notice.data)))
    )


def reference_prefix(held: Claim) -> str:
    """Return the prefix of the tenant's reference log-probabilities that the attempt needs; empty if it needs none."""
    return layout.reference_prefix(held.tenant, held.spec.reference) if held.spec.reference else ""


def _check_own(held: Claim, key: str) -> None:
    if held.export_id is not None:
        is_own = layout.is_attempts_export(key, tenant=held.tenant, export_id=held.export_id, attempt=held.attempt)
        own = [key.rpartition("/")[0]] if is_own else []
    elif held.kind is Kind.EVALUATE:
        own = [attempts.output_prefix(held)]
    else:
        own = [attempts.checkpoint_prefix(held), attempts.final_prefix(held), reference_prefix(held)]
    if not key.startswith(tuple(f"{prefix}/" for prefix in own if prefix)):
        raise Forbidden(f"attempt {held.attempt} of job {held.job_id} may not write object {key[:200]!r}", code="not_its_object")


def _stored(platform: Platform, prefix: str, manifest_sha256: str) -> CheckpointManifest:
    """Return the manifest of what was stored under `prefix`, whose objects have the sizes that it lists.

    Their bytes were held against their digests on the way: by the bucket, or by the agent that read them back.
    """
    try:
        data = platform.objects.get_bytes(f"{prefix}/{CHECKPOINT_MANIFEST}")
    except NotFound:
        data = b""
    if hashlib.sha256(data).hexdigest() != manifest_sha256:
        raise Conflict(f"{prefix}/{CHECKPOINT_MANIFEST} is not the manifest that was to be committed", code=NOT_STORED)
    manifest = parse_manifest(data, name=f"{prefix}/{CHECKPOINT_MANIFEST}")
    sizes = {info.key.removeprefix(f"{prefix}/"): info.size_bytes for info in platform.objects.list(prefix)}
    wrong = sorted(name for name, part in manifest.files.items() if sizes.get(name) != part.bytes)
    if wrong:
        raise Conflict(f"{prefix}/{wrong[0]} is not stored as its manifest lists it", code=NOT_STORED)
    return manifest


def _check_parts(platform: Platform, held: Claim, prefix: str, whole: CheckpointManifest) -> None:
    """Raise ``Conflict`` unless every node has stored its part, and `whole` lists just what they say they wrote."""
    try:
        data = [(name, platform.objects.get_bytes(f"{prefix}/{name}")) for name in map(part_manifest, range(held.num_nodes))]
        parts = merged_manifest([parse_manifest(part, name=f"{prefix}/{name}") for name, part in data])
    except (NotFound, IntegrityError) as error:
        raise Conflict(f"{prefix} lacks the part of a node: {error.message}", code=NOT_STORED) from error
    if wrong := sorted(name for name in {*parts.files, *whole.files} if parts.files.get(name) != whole.files.get(name)):
        raise Conflict(f"{prefix}/{wrong[0]} is not as the node that wrote it lists it", code=NOT_STORED)
