"""A tenant's scored suites: prompts with references, scored by a metric or a grader, in versions that never change.

Jobs name them in ``eval_config.suites``; a job is stored with the versions. Base and adapter answer the items as they answer held-out rows,
and the gate's rule ``suites`` reads the scores.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.engine import Connection

from control_plane.datasets import orphaned_objects
from control_plane.datasets.scored_suites.tables import ScoredSuite, scored_suites
from control_plane.evaluations.tables import evaluations
from control_plane.graders import rules as graders
from control_plane.jobs.tables import jobs, sweeps
from control_plane.platform.context import Platform
from control_plane.platform.records import many, one
from control_plane.sandbox import scratch
from control_plane.tenants.service import find_tenant, refuse_while_deleted
from core import layout
from core.durable_files import sha256_of
from core.errors import InvalidRequest, NotFound, QuotaExceeded
from core.typed_json import from_json
from engine.data import Example, Problem, detect_shape, open_rows, order_problems, to_example
from engine.evals import (
    MAX_SUITE_NAME,
    METRICS,
    SCORED_PREFIX,
    WITHOUT_REFERENCE,
    AnswerReader,
    EvalConfig,
    Item,
    item_of,
    parse_eval_config,
)

MAX_FILE_BYTES = 16 << 20
MAX_ITEMS = 2000
"""More would take longer than all other suites together; 2,000 show a fall of three points."""
MAX_NAMES, MAX_VERSIONS = 50, 500
"""Suites of a tenant, and versions of all of them together."""
REWARD = "reward"
"""Metric of a suite with a grader, whose reward is clipped to 0 to 1."""
MAX_DROP = 0.02
"""Default of a suite's `max_drop`, that of capability suites."""
UNANSWERED = "-"
"""Stands for the answer of a row that has none while the row is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How the answers to a suite are scored, and what the gate demands."""

    metric: str
    grader: Mapping[str, Any] | None = None
    max_drop: float = MAX_DROP
    """Most that the score may fall below the base's."""
    min_score: float | None = None
    """Least score of the adapter."""

    @classmethod
    def of(cls, *, metric: str | None, grader: Mapping[str, Any] | None, max_drop: float | None, min_score: float | None) -> Scoring:
        """Check a request; refuses it by field."""
        if (metric is None) == (grader is None):
            raise _refused("a suite is scored by a metric or by a grader; give one of them", param="metric")
        if grader is not None:
            graders.parse(grader)
        if metric is not None and metric not in METRICS:
            raise _refused(f"metric {metric[:80]!r} is not one of {', '.join(METRICS)}", param="metric")
        for param, value in (("max_drop", max_drop), ("min_score", min_score)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise _refused(f"{param} {value!r} is not a number from 0 to 1", param=param)
        return cls(metric=metric or REWARD, grader=grader, max_drop=MAX_DROP if max_drop is None else max_drop, min_score=min_score)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An item, and the row that a grader reads as ``item``."""

    item: Item
    row: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A suite of an evaluation."""

    suite: ScoredSuite
    entries: Sequence[Entry]

    @property
    def id(self) -> str:
        """Its id in results and reports."""
        return f"{SCORED_PREFIX}{self.suite.name}"

    @property
    def items(self) -> list[Item]:
        return [entry.item for entry in self.entries]


def add(platform: Platform, tenant: str, stream: BinaryIO, *, name: str, filename: str, scoring: Scoring) -> ScoredSuite:
    """Store the rows of a file as the next version of the suite `name`; the newest version if it is the same."""
    layout.checked_id(name, what="name")
    if len(name) > MAX_SUITE_NAME:
        raise _refused(f"name has {len(name)} characters, the limit is {MAX_SUITE_NAME}; choose a shorter one", param="name")
    suite_id = f"scored-{uuid.uuid4().hex[:24]}"
    with scratch.directory(platform.settings.work_dir, tenant) as directory:
        received, items = directory / "received", directory / "items.jsonl"
        _receive(stream, received)
        entries = list(_entries(received, filename, scoring))
        if not entries:
            raise _refused(f"{filename} holds no rows; write one item a line", param="file")
        with items.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"item": entry.item.to_dict(), "row": entry.row}, ensure_ascii=False) + "\n" for entry in entries)
        key = layout.scored_suite_key(tenant, suite_id)
        content = {
            "metric": scoring.metric, "grader": scoring.grader, "max_drop": scoring.max_drop, "min_score": scoring.min_score,
            "sha256": sha256_of(items),
        }  # fmt: skip
        if (same := _newest_if_same(platform, tenant, name, content)) is not None:
            return same
        with orphaned_objects.announced(platform, tenant, key):
            platform.objects.put_file(key, items)
            with platform.engine.begin() as conn:
                find_tenant(conn, tenant, lock=True)  # one at a time
                refuse_while_deleted(conn, tenant)
                version = _next_version(conn, tenant, name)
                orphaned_objects.claim(conn, key)
                values = content | {
                    "id": suite_id, "tenant_id": tenant, "name": name, "version": version, "num_items": len(entries), "object_key": key,
                    "created_at": platform.clock(), "grader": sa.null() if scoring.grader is None else dict(scoring.grader),
                }  # fmt: skip
                return one(conn, sa.insert(scored_suites).values(**values).returning(scored_suites), ScoredSuite)


def _newest_if_same(platform: Platform, tenant: str, name: str, content: Mapping[str, Any]) -> ScoredSuite | None:
    newest = versions(platform, tenant, name)[:1]
    return next((suite for suite in newest if all(getattr(suite, field) == value for field, value in content.items())), None)


def _next_version(conn: Connection, tenant: str, name: str) -> int:
    s = scored_suites.c
    counted = conn.execute(sa.select(s.name, sa.func.count()).where(s.tenant_id == tenant).group_by(s.name))
    names = {row.name: row[1] for row in counted}
    if name not in names and len(names) >= MAX_NAMES:
        raise QuotaExceeded(f"scored suite limit reached ({len(names)}, limit {MAX_NAMES}); remove one first", code="too_many_suites")
    if sum(names.values()) >= MAX_VERSIONS:
        raise QuotaExceeded(
            f"limit of versions of scored suites reached ({MAX_VERSIONS}); remove a suite with old versions", code="too_many_suites"
        )
    newest = conn.execute(sa.select(sa.func.max(s.version)).where(s.tenant_id == tenant, s.name == name)).scalar_one()
    return int(newest or _last_named(conn, tenant, name)) + 1


def _last_named(conn: Connection, tenant: str, name: str) -> int:
    """Return the highest version of a removed suite that a job, a sweep or an evaluation names: no other items get its number."""
    found = [0]
    for table, rules in (
        (jobs, jobs.c.request["eval_config"]), (sweeps, sweeps.c.request["eval_config"]), (evaluations, evaluations.c.eval_config),
    ):  # fmt: skip
        query = sa.select(rules["suites"]).where(table.c.tenant_id == tenant, rules["suites"].is_not(None)).distinct()
        references = [reference.partition("@") for suites in conn.scalars(query) for reference in suites or ()]
        found += [int(version) for of, _, version in references if of == name and version]
    return max(found)


def newest(platform: Platform, tenant: str) -> Sequence[ScoredSuite]:
    """Return the newest version of each suite, by name."""
    s = scored_suites
    query = sa.select(s).where(s.c.tenant_id == tenant).ext(distinct_on(s.c.name)).order_by(s.c.name, s.c.version.desc())
    with platform.engine.connect() as conn:
        return many(conn, query, ScoredSuite)


def versions(platform: Platform, tenant: str, name: str) -> Sequence[ScoredSuite]:
    """Return the versions of a suite, newest first; none for an unknown name."""
    s = scored_suites
    with platform.engine.connect() as conn:
        query = sa.select(s).where(s.c.tenant_id == tenant, s.c.name == name).order_by(s.c.version.desc())
        return many(conn, query, ScoredSuite)


def find(platform: Platform, tenant: str, name: str) -> Sequence[ScoredSuite]:
    """Return the versions of a suite, newest first; ``NotFound`` if there is none."""
    if found := versions(platform, tenant, name):
        return found
    raise _unknown(name)


def remove(platform: Platform, tenant: str, name: str) -> None:
    """Remove a suite with its versions. Evaluations of jobs that name it say that it was not measured."""
    s = scored_suites
    removed = sa.delete(s).where(s.c.tenant_id == tenant, s.c.name == name).returning(s.c.object_key)
    with platform.engine.begin() as conn:
        keys = conn.scalars(removed).all()
        if not keys:
            raise _unknown(name)
        orphaned_objects.release(conn, tenant, keys, now=platform.clock())
    orphaned_objects.try_to_remove(platform, keys)


def pinned(platform: Platform, tenant: str, eval_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return `eval_config` with a version of each suite that it names, the newest unless it names one; refuses an unknown one."""
    named = parse_eval_config(eval_config).suites
    if eval_config is None or not named:
        return eval_config
    found = []
    for reference in named:
        name, _, version = reference.partition("@")
        known = versions(platform, tenant, name)
        chosen = _chosen(known, version)
        if chosen is None:
            has = f"it has version{'s' if len(known) > 1 else ''} {', '.join(str(suite.version) for suite in known[:10])}"
            raise InvalidRequest(
                f"eval_config: no scored suite {reference!r}; {has if known else 'add it with `ft scored-suites add NAME FILE`'}",
                code="invalid_eval_config",
                param="eval_config.suites",
            )
        found.append(chosen.reference)
    return {**eval_config, "suites": found}


def asked(platform: Platform, tenant: str, requested: EvalConfig) -> Sequence[Asked]:
    """Return the suites of an evaluation with their items; a suite that was removed is left out."""
    found = []
    for reference in requested.asked_suites:
        name, _, version = reference.partition("@")
        suite = _chosen(versions(platform, tenant, name), version)
        if suite is not None:
            lines = platform.objects.get_bytes(suite.object_key).decode().split("\n")
            found.append(Asked(suite=suite, entries=[_entry(json.loads(line)) for line in lines if line]))
    return found


def _chosen(known: Sequence[ScoredSuite], version: str) -> ScoredSuite | None:
    return next((suite for suite in known if not version or suite.version == int(version)), None)


def with_scores(result: Mapping[str, Any], suites: Sequence[Asked], *, reader: AnswerReader) -> Mapping[str, Any]:
    """Return a result with the scores of its answers to `suites`, and what the gate demands of each."""
    scored = {name: dict(sections) for name, sections in (result.get("scored") or {}).items()}
    about = dict(result["suites"])
    for one_asked in suites:
        suite, entries, id_ = one_asked.suite, one_asked.entries, one_asked.id
        if id_ not in about:
            continue
        about[id_] = {**about[id_], "max_drop": suite.max_drop, "min_score": suite.min_score}
        for subject, sections in result["subjects"].items():
            if sections and id_ in sections:
                answers = sections[id_]["answers"]
                texts = {e.item.id: reader.text(e.item.id, str(answers[e.item.id]), suite=id_) for e in entries}
                scored.setdefault(subject, {})[id_] = {e.item.id: {suite.metric: _score(suite, e, texts[e.item.id])} for e in entries}
    return {**result, "suites": about, "scored": scored}


def _score(suite: ScoredSuite, entry: Entry, answer: str) -> float:
    if suite.grader is None:
        return METRICS[suite.metric](answer, entry.item.expected or "")
    try:
        reward = graders.run(graders.parse(suite.grader), item=entry.row, sample=answer).reward
    except InvalidRequest:  # the answer is longer than graders read
        return 0.0
    return min(1.0, max(0.0, reward))


def _entry(stored: Mapping[str, Any]) -> Entry:
    return Entry(item=from_json(Item, stored["item"], ignore_unknown=True), row=stored["row"])


def _entries(path: Path, filename: str, scoring: Scoring) -> Iterator[Entry]:
    """Yield the items of a file's rows; refuses the first row that is none, that its metric or grader cannot score, or that repeats the
    prompt and reference of an earlier one."""
    grader = None if scoring.grader is None else graders.parse(scoring.grader)
    needs_reference = scoring.grader is None and scoring.metric not in WITHOUT_REFERENCE
    seen: dict[str, int] = {}
    for row in open_rows(path, filename=filename, max_bytes=MAX_FILE_BYTES).rows:
        item = _item(row.value, row.number, filename)
        if needs_reference and item.expected is None:
            raise _refused(f"row {row.number} of {filename} has no answer that {scoring.metric} can compare with", param="file")
        if grader is not None:
            _check_gradable(grader, row.value, row.number, filename)
        if first := seen.get(item.id):
            raise _refused(f"rows {first} and {row.number} of {filename} are the same item; leave one out", param="file")
        seen[item.id] = row.number
        if len(seen) > MAX_ITEMS:
            raise _refused(f"a scored suite has at most {MAX_ITEMS:,} items; give a part of them", param="file")
        yield Entry(item=item, row=row.value)


def _check_gradable(grader: graders.Leaf | graders.Multi, row: Any, number: int, filename: str) -> None:
    if (size := len(json.dumps(row, ensure_ascii=False))) > graders.MAX_GIVEN:
        raise _refused(
            f"row {number} of {filename} has {size:,} characters, graders read at most {graders.MAX_GIVEN:,}; remove fields that no "
            "template uses",
            param="file",
        )
    if (path := graders.unknown_path(grader, item=row)) is not None:
        raise _refused(
            f"the grader reads {{{{{path}}}}}, which row {number} of {filename} does not have; correct the template, or add the field to "
            "every row",
            param="grader",
        )


def _item(value: Any, number: int, filename: str) -> Item:
    example, problems = _example(value, number)
    item = None if example is None or problems else item_of(example.as_row(), calls=lambda: True)
    if item is None:
        why = problems[0] if problems else Problem("not_an_item", "the row is not a conversation", fix='write {"prompt", "completion"}')
        raise _refused(f"row {number} of {filename} is no item: {why.message} ({why.code}); {why.fix}", param="file")
    return replace(item, expected=None) if _is_unanswered(value) else item


def _example(value: Any, number: int) -> tuple[Example | None, Sequence[Problem]]:
    if isinstance(value, Problem):
        return None, [value]
    if not isinstance(value, dict):
        return None, [Problem("not_an_object", "the row is not a JSON object", fix='write {"prompt": "...", "completion": "..."}')]
    if _is_unanswered(value):
        turns = value.get("messages")
        value = (
            {**value, "messages": [*turns, {"role": "assistant", "content": UNANSWERED}]} if turns else {**value, "completion": UNANSWERED}
        )
    shape = detect_shape(value)
    if shape is None or shape[0] not in ("chat", "prompt_completion"):
        return None, [Problem("unknown_shape", "the row holds no prompt", fix='write {"prompt", "completion"} or {"messages": [...]}')]
    example, problems = to_example(value, shape[0], row=number)
    return example, problems or (list(order_problems(example)) if example else [])


def _is_unanswered(value: Mapping[str, Any]) -> bool:
    """Whether a row has a prompt and no answer, so that only a grader can score what is answered."""
    turns = value.get("messages")
    if isinstance(turns, list):
        return bool(turns) and isinstance(turns[-1], dict) and turns[-1].get("role") != "assistant"
    return "prompt" in value and value.get("completion") is None


def _receive(stream: BinaryIO, path: Path) -> None:
    data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"a scored suite's file has at most {MAX_FILE_BYTES >> 20} MiB", code="file_too_large", param="file")
    path.write_bytes(data)


def _unknown(name: str) -> NotFound:
    return NotFound(f"no scored suite {name[:80]!r}; list yours with `ft scored-suites list`", code="suite_not_found", param="name")


def _refused(message: str, *, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_suite", param=param)
