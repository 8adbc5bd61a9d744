"""Updates a base model's id to other files: staged, evaluated by its production adapters, then switched.

An id stands for pinned bytes, and this is the only way to change them:

1. Staged: the new files are pinned beside the present ones (``next`` of the entry). Refused if adapters could not fit them: other shapes;
   or another tokenizer or template, or less context, while adapters are in production.
2. Evaluated: every production adapter, of every tenant, is evaluated on the new files, unless it already was.
3. Switched: the new files become the entry's, and the old ones stay (``previous``) for jobs that were promised them.

Each step replaces the operator's file once, and verdicts are read from the database: after a kill between any two steps, the same call
continues. The switch locks the adapters' rows, so that no promotion slips in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.tables import Evaluation
from control_plane.evaluations.tables import evaluations as evaluations_table
from control_plane.jobs.tables import jobs
from control_plane.models import catalogue
from control_plane.models.model_fetch import remove_fetched
from control_plane.models.operator_catalogue import Entry, edited
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.records import columns, many, one_or_none
from control_plane.serving import accepted_bases
from core.base_models import VERSION_FIELDS, BaseModel, Catalogue, catalogue_file, model_config
from core.errors import Conflict, InvalidRequest, Unavailable
from engine.adapters import LORA_ADAPTER, AdapterRecord, Stage, weight_shapes

KEPT_FOR = timedelta(hours=1)
"""Counted from the switch; a submission takes seconds between reading the catalogue and writing its row."""
ACCEPTED, NOT_EVALUATED, RUNNING, REFUSED, ERROR = "accepted", "not evaluated", "running", "failed", "error"
SAME_CONFIG = ("architectures", "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
"""Keys of config.json that determine how tensors are used, if their shapes do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Affected:
    """A production adapter, and its state on the files in question."""

    tenant: str
    adapter_id: str
    name: str
    state: str
    """``accepted``, ``not evaluated``, ``running`` (or waiting to), ``failed`` its gate, or ``error``: it could not be evaluated."""
    reasons: tuple[str, ...] = ()
    evaluation_id: str | None = None

    def __str__(self) -> str:
        why = f" ({', '.join(self.reasons)})" if self.reasons else ""
        return f"{self.tenant} {self.name}: {self.state}{why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseUpdate:
    model_id: str
    digest: str
    """Digest of the present files."""
    staged: str | None
    """Digest of the staged files; None if nothing is staged."""
    previous: tuple[str, ...]
    """Digests of earlier files that are kept."""
    adapters: tuple[Affected, ...]
    """Production adapters, with their state on the staged files, or on the present ones if none are staged."""

    @property
    def blocking(self) -> tuple[Affected, ...]:
        return tuple(a for a in self.adapters if a.state != ACCEPTED)


def stage_local(platform: Platform, model_id: str, directory: Path) -> BaseUpdate:
    """Stage the files in `directory`, which stay where they are; staging the same files again changes nothing."""
    return _stage(platform, model_id, directory.resolve(), {"path": str(directory.resolve())})


def stage_from_hub(
    platform: Platform, model_id: str, *, repo: str, revision: str, say: Callable[[str], None] = lambda _: None
) -> BaseUpdate:
    """Fetch one commit of a repository into the home, once, and stage it."""
    platform.models.entry(model_id)
    directory, source = catalogue.fetched(platform.settings, repo, revision, say)
    return _stage(platform, model_id, directory, source)


def status(platform: Platform, model_id: str) -> BaseUpdate:
    """Return the state of the model's update, from the catalogue and the verdicts."""
    entry, _ = platform.models.entry(model_id)
    with platform.engine.connect() as conn:
        return _status(platform, conn, entry, platform.models.card(model_id).digest)


def evaluate(platform: Platform, model_id: str, *, again: bool = False) -> BaseUpdate:
    """Order the evaluations that the update waits for; with `again`, also of adapters that failed theirs. Orders nothing twice."""
    found = status(platform, model_id)
    target = found.staged or found.digest
    for adapter in found.blocking:
        if adapter.state in (NOT_EVALUATED, ERROR) or (again and adapter.state == REFUSED):
            evaluations.request(platform, adapter.tenant, adapter.adapter_id, kind=evaluations.BASE_UPDATE, base_digest=target)
    return status(platform, model_id)


def apply(platform: Platform, model_id: str, *, digest: str | None = None) -> BaseUpdate:
    """Switch the id to the staged files; ``base_update_blocked`` names the production adapters that fail on them.

    The files are verified again first. With `digest`, only files with that digest are switched to.
    """
    present, _ = platform.models.entry(model_id)
    if not present.get("next"):
        raise Conflict(
            f"nothing is staged for base model {model_id}; stage bytes with --path or --repo and --revision", code="nothing_staged"
        )
    if digest is not None and present["next"]["digest"] != digest:
        raise Conflict(
            f"{present['next']['digest'][:12]} is staged for {model_id}, and not {digest[:12]}; look at it again", code="nothing_staged"
        )
    digest = str(present["next"]["digest"])
    platform.models.get_pinned(model_id, digest, fresh=True)
    with platform.engine.begin() as conn, edited(catalogue_file(platform.settings.models_dir)) as entries:
        entry: Entry = entries.get(model_id) or {}
        if (entry.get("next") or {}).get("digest") != digest:
            raise Conflict(f"the update of {model_id} was changed in the meantime; review it again", code="nothing_staged")
        conn.execute(sa.select(adapters.c.id).where(adapters.c.base_model == model_id).order_by(adapters.c.id).with_for_update())
        found = _status(platform, conn, entry, entry["digest"])
        if found.blocking:
            raise Conflict(blocked(found), code="base_update_blocked")
        old = {k: entry[k] for k in VERSION_FIELDS if k in entry} | {"replaced_at": platform.clock()}
        kept = {k: v for k, v in entry.items() if k not in (*VERSION_FIELDS, "next")}
        others = [v for v in entry.get("previous", ()) if v["digest"] != digest]
        accepted = [a.adapter_id for a in found.adapters]
        entries[model_id] = {
            **kept, **entry["next"], "previous": [old, *others], "history": _logged(platform, entry, "applied", digest, adapters=accepted),
        }  # fmt: skip
    return status(platform, model_id)


def abandon(platform: Platform, model_id: str) -> Path | None:
    """Drop what is staged, if anything; returns the fetched directory that was deleted."""
    with edited(catalogue_file(platform.settings.models_dir)) as entries:
        entry = entries.get(model_id)
        if entry is None or not entry.get("next"):
            platform.models.entry(model_id)
            return None
        dropped = entry["next"]
        kept = {k: v for k, v in entry.items() if k != "next"}
        entries[model_id] = kept | {"history": _logged(platform, entry, "abandoned", dropped["digest"])}
        orphan = catalogue.unnamed(platform.settings.models_dir, dropped, entries)
    if orphan is not None:
        remove_fetched(orphan)
    return orphan


def prune(platform: Platform, model_id: str) -> list[str]:
    """Forget replaced files that no unfinished job and no kept adapter uses; returns their digests.

    Fetched copies are deleted; what the operator named by path stays. Files replaced within :data:`KEPT_FOR` are kept, because a submission
    in progress may have been promised them.
    """
    before = platform.clock() - KEPT_FOR
    orphans: list[Path | None] = []
    with platform.engine.connect() as conn, edited(catalogue_file(platform.settings.models_dir)) as entries:
        entry = entries.get(model_id)
        if entry is None:
            return []
        old = [v for v in entry.get("previous", ()) if v["replaced_at"] < before]
        gone = [v["digest"] for v in old if not _needed(conn, model_id, v["digest"])]
        if gone:
            doomed = [v for v in entry["previous"] if v["digest"] in gone]
            kept = [v for v in entry["previous"] if v["digest"] not in gone]
            entries[model_id] = {**entry, "previous": kept, "history": _logged(platform, entry, "pruned", *gone)}
            orphans = [catalogue.unnamed(platform.settings.models_dir, v, entries) for v in doomed]
    for orphan in filter(None, orphans):
        remove_fetched(orphan)
    return gone


def blocked(update: BaseUpdate) -> str:
    """Return why an update is blocked, and what to do."""
    model_id, listed = update.model_id, "; ".join(map(str, update.blocking))
    return (
        f"{len(update.blocking)} production adapters of {model_id} are not accepted on {(update.staged or update.digest)[:12]}: {listed}. "
        f"Wait for their evaluations: `ft admin models evaluate {model_id} --wait`, then `ft admin models update {model_id} --apply`; one "
        "that fails is trained again on the new base, or deprecated by its tenant"
    )


def _stage(platform: Platform, model_id: str, directory: Path, source: Entry) -> BaseUpdate:
    entry, _ = platform.models.entry(model_id)
    current = platform.models.get(model_id, fresh=True)
    alone = {"id": model_id, "path": str(directory), **{k: source[k] for k in ("repo", "revision", "license") if source.get(k)}}
    found = Catalogue({model_id: (alone, directory)}).get(model_id, fresh=True)
    if found.digest == current.digest:  # already switched
        if entry.get("next"):
            raise _staged(entry, f"{model_id} stands for these bytes already, and others are staged")
        return status(platform, model_id)
    with platform.engine.connect() as conn:
        in_production = len(_production(conn, model_id))
    _check_fits(current, found, in_production=in_production)
    version = catalogue.pinned(source, found, platform.settings.models_dir)
    version = {k: v for k, v in {**version, "license": source.get("license") or current.license}.items() if k in VERSION_FIELDS}
    version["context_length"] = min(found.context_length, current.context_length)
    with edited(catalogue_file(platform.settings.models_dir)) as entries:
        kept = entries.get(model_id) or catalogue.pinned({**entry, "id": model_id}, current, platform.settings.models_dir)
        staged = kept.get("next")
        if staged and staged["digest"] != found.digest:
            raise _staged(kept, f"other bytes are staged for {model_id} already")
        if not staged:
            entries[model_id] = {**kept, "next": version, "history": _logged(platform, kept, "staged", found.digest)}
    return status(platform, model_id)


def _staged(entry: Entry, why: str) -> Conflict:
    return Conflict(
        f"{why} ({entry['next']['digest'][:12]}); apply those (`ft admin models update {entry['id']} --apply`), or drop them "
        f"(`ft admin models update {entry['id']} --abandon`)",
        code="update_staged",
    )


def _check_fits(current: BaseModel, new: BaseModel, *, in_production: int) -> None:
    if current.directory is None or new.directory is None:
        raise Unavailable(f"the files of base model {current.id} are not on this machine, so the new ones cannot be compared with them")
    differs = list(_architecture(current.directory, new.directory))
    if in_production:
        differs += [
            name.removesuffix("_digest") for name in ("tokenizer_digest", "template_digest") if getattr(current, name) != getattr(new, name)
        ]
        if new.context_length < current.context_length:
            differs.append(f"context {new.context_length} instead of {current.context_length}")
    if differs:
        raise InvalidRequest(
            f"these files are not an update of {current.id}: {'; '.join(differs)} differ, which adapters ({in_production} in production) "
            "cannot be used with; add them as a base model of another id",
            code="base_update_incompatible",
            param="path",
        )


def _architecture(old: Path, new: Path) -> Sequence[str]:
    before, after = model_config(old), model_config(new)
    found = [f"{key} {after.get(key)!r} instead of {before.get(key)!r}" for key in SAME_CONFIG if before.get(key) != after.get(key)]
    shapes, others = weight_shapes(old), weight_shapes(new)
    odd = sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name))
    if odd:
        first = odd[0]
        found.append(f"{len(odd)} shapes (first: {first}, {_size(others.get(first))} instead of {_size(shapes.get(first))})")
    return found


def _size(shape: Sequence[int] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape))


def _status(platform: Platform, conn: Connection, entry: Entry, digest: str) -> BaseUpdate:
    staged = (entry.get("next") or {}).get("digest")
    affected = tuple(_affected(platform, conn, row, staged or digest) for row in _production(conn, entry["id"]))
    previous = tuple(v["digest"] for v in entry.get("previous", ()))
    return BaseUpdate(model_id=entry["id"], digest=digest, staged=staged, previous=previous, adapters=affected)


def _production(conn: Connection, model_id: str) -> list[AdapterRecord]:
    query = sa.select(*columns(adapters, AdapterRecord)).where(adapters.c.base_model == model_id, adapters.c.type == LORA_ADAPTER)
    query = query.where(adapters.c.stage == Stage.PRODUCTION.value).order_by(adapters.c.tenant_id, adapters.c.name)
    return many(conn, query, AdapterRecord)


def _affected(platform: Platform, conn: Connection, record: AdapterRecord, digest: str) -> Affected:
    e = evaluations_table.c
    query = (
        sa.select(evaluations_table)
        .where(e.adapter_id == record.id, e.base_digest == digest, e.eval_config.is_(None))
        .order_by(e.created_at.desc(), e.id)
        .limit(1)
    )
    last = one_or_none(conn, query, Evaluation)
    accepted = digest in accepted_bases.accepted_digests(platform.models, conn, record)
    state, reasons = (ACCEPTED, ()) if accepted else _standing(last)
    evaluation_id = None if last is None else last.id
    return Affected(
        tenant=record.tenant_id, adapter_id=record.id, name=record.name, state=state, reasons=reasons, evaluation_id=evaluation_id
    )


def _standing(last: Evaluation | None) -> tuple[str, tuple[str, ...]]:
    """State of an adapter that is not accepted, from its last evaluation."""
    if last is None:
        return NOT_EVALUATED, ()
    if last.state in evaluations.OPEN:
        return RUNNING, ()
    if last.state == evaluations.FAILED:
        return ERROR, (str((last.error or {}).get("message") or "no reason was given"),)
    return REFUSED, last.reasons or ()


def _needed(conn: Connection, model_id: str, digest: str) -> bool:
    """Whether an unfinished job, or an adapter whose files are kept, was promised these files."""
    live = sa.select(jobs.c.id).where(jobs.c.model == model_id, jobs.c.base_digest == digest, jobs.c.state.not_in([s.value for s in FINAL]))
    made = sa.select(adapters.c.id).where(
        adapters.c.base_model == model_id, adapters.c.base_digest == digest, adapters.c.stage != Stage.ARCHIVED.value
    )
    return bool(conn.execute(sa.select(sa.or_(live.exists(), made.exists()))).scalar_one())


def _logged(platform: Platform, entry: Entry, what: str, *digests: str, **more: Any) -> list[Entry]:
    line = {"at": platform.clock().isoformat(timespec="seconds"), "what": what, "digests": list(digests), **more}
    return [*entry.get("history", ()), line]
