"""The operator's base models: added with pinned files, verified, deprecated, removed; and the model of a job.

The catalogue is a file, because the command line and every node read it without a database. Jobs and adapters have a digest in their rows,
and whatever the file says later, other bytes are refused.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.jobs.tables import jobs
from control_plane.models.model_fetch import fetch_model, remove_fetched
from control_plane.models.operator_catalogue import Entry, edited
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from control_plane.platform.settings import Settings
from core import base_models
from core.base_models import BaseModel, Catalogue, catalogue_file
from core.errors import Conflict, InvalidRequest

ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
MAX_ID = 96
"""Characters of an id: adapter names contain it, and file systems and labels have limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The operator's settings of a model beyond its files; None leaves a value to the files."""

    license: str | None = None
    context_length: int | None = None


def catalogue_of(settings: Settings) -> Catalogue:
    """Return every base model known to the processes of this home."""
    return Catalogue.load(settings.base_models, operator=catalogue_file(settings.models_dir))


def add_local(settings: Settings, model_id: str, directory: Path, given: Given) -> BaseModel:
    """Pin the files in `directory` under `model_id`; they stay where they are."""
    entry = {"path": str(directory.resolve()), "license": given.license}
    return _add(settings, model_id, directory.resolve(), entry, given)


def add_extended(settings: Settings, model_id: str, directory: Path, *, base: BaseModel, record: Mapping[str, Any]) -> BaseModel:
    """Do :func:`add_local` for a model that was made from `base`, with its license and context; `record` says how it was made."""
    license = None if base.license == "unknown" else base.license
    entry = {"path": str(directory), "license": license, "context_length": base.context_length, "extended_from": record}
    return _add(settings, model_id, directory, entry, Given())


def add_from_hub(
    settings: Settings, model_id: str, *, repo: str, revision: str, given: Given, say: Callable[[str], None] = lambda _: None
) -> BaseModel:  # fmt: skip
    """Fetch one commit of a repository into the home, once, and pin it under `model_id`."""
    check_id(model_id)
    directory, entry = fetched(settings, repo, revision, say)
    return _add(settings, model_id, directory, {**entry, "license": given.license or entry["license"]}, given)


def fetched(settings: Settings, repo: str, revision: str, say: Callable[[str], None]) -> tuple[Path, Entry]:
    """Fetch one commit of a repository into the home, once; returns its directory, and an entry that names it."""
    made = fetch_model(repo, revision, settings.models_dir, endpoint=settings.hub_endpoint, token=settings.hub_token or None, say=say)
    return made.directory, {"path": made.directory.name, "repo": repo, "revision": revision, "license": made.license}


def verify(settings: Settings, model_id: str) -> BaseModel:
    """Read every file again and compare it with the pins; ``base_model_changed`` lists the differences."""
    return catalogue_of(settings).get(model_id, fresh=True)


def deprecate(settings: Settings, model_id: str, since: dt.date | None) -> BaseModel:
    """Refuse new jobs on the model from that day on; None revokes this. Admitted jobs finish."""
    catalogue = catalogue_of(settings)
    entry, _ = catalogue.entry(model_id)
    with edited(catalogue_file(settings.models_dir)) as entries:
        kept = entries.get(model_id) or pinned(entry, catalogue.get(model_id), settings.models_dir)
        entries[model_id] = {k: v for k, v in kept.items() if k != "deprecated_since"} | ({"deprecated_since": since} if since else {})
    return replace(catalogue.card(model_id), deprecated_since=since)


def remove(platform: Platform, model_id: str) -> Path | None:
    """Remove a model from the operator's catalogue; refused while a job or an adapter needs it.

    Returns the fetched directory that was deleted, if any; files that the operator named by path stay.
    """
    settings = platform.settings
    with edited(catalogue_file(settings.models_dir)) as entries:
        entry = entries.get(model_id)
        if entry is None:
            catalogue_of(settings).entry(model_id)
            raise Conflict(f"base model {model_id} is listed in a separate file, not in the operator's catalogue; remove it there")
        _check_unused(platform, model_id)
        del entries[model_id]
        versions = [entry, *([entry["next"]] if entry.get("next") else []), *entry.get("previous", ())]
        orphans = {unnamed(settings.models_dir, version, entries) for version in versions} - {None}
    for orphan in filter(None, orphans):
        remove_fetched(orphan)
    own = _fetched(settings.models_dir, entry.get("path"))
    return own if own in orphans else None


def check_id(model_id: str) -> None:
    """Refuse an id that is not a name (``invalid_id``)."""
    if not ID.fullmatch(model_id) or len(model_id) > MAX_ID:
        raise InvalidRequest(
            f"id {model_id[:120]!r} is not valid: NAME or ORG/NAME of letters, digits, '.', '_' and '-', at most {MAX_ID} characters",
            code="invalid_id",
            param="id",
        )


def _add(settings: Settings, model_id: str, directory: Path, entry: Entry, given: Given) -> BaseModel:
    check_id(model_id)
    found = Catalogue({model_id: ({**entry, "id": model_id, "path": str(directory)}, directory)}).get(model_id, fresh=True)
    if given.context_length is not None:
        if not 1 <= given.context_length <= found.context_length:
            raise InvalidRequest(
                f"context {given.context_length} is outside 1..{found.context_length}, which is what the model's config allows",
                code="invalid_context_length",
                param="context",
            )
        found = replace(found, context_length=given.context_length)
    known = catalogue_of(settings)
    with edited(catalogue_file(settings.models_dir)) as entries:
        if model_id in known.ids() and known.card(model_id).digest != found.digest:
            raise Conflict(
                f"base model {model_id} is in the catalogue with digest {known.card(model_id).digest}, and an id changes its "
                f"bytes by an update alone; add these ({found.digest}) under another id, or see `ft admin models update {model_id}`",
                code="model_exists",
            )
        before = entries.get(model_id, {})
        kept = {k: before[k] for k in ("deprecated_since", "next", "previous", "history") if before.get(k)}
        entries[model_id] = {**pinned({**entry, "id": model_id}, found, settings.models_dir), **kept}
    return found


def unnamed(models_dir: Path, version: Entry, entries: Mapping[str, Entry]) -> Path | None:
    """Return the fetched directory of `version` if no entry in `entries` names it any more; None for files not fetched here."""
    path = version.get("path")
    named = [e.get("path") for entry in entries.values() for e in (entry, entry.get("next") or {}, *entry.get("previous", ()))]
    return None if path in named else _fetched(models_dir, path)


def pinned(entry: Entry, model: BaseModel, models_dir: Path) -> Entry:
    """Return `entry` for the operator's file: with every digest of `model`, and a path that is valid there."""
    path = entry.get("path")
    if path is not None and model.directory is not None:
        fetched = _fetched(models_dir, path)
        if fetched is None or fetched.resolve() != model.directory.resolve():  # an entry of a separate file: the operator's lies elsewhere
            root = Path(str(model.directory.absolute()).removesuffix(path))
            path = str(model.directory.absolute())
            if entry.get("previous"):
                entry = {**entry, "previous": [{**v, "path": str(root / v["path"])} if v.get("path") else v for v in entry["previous"]]}
    pins = {k: getattr(model, k) for k in (*base_models.CARD, "license")}
    return {k: v for k, v in {"id": model.id, **entry, "path": path, **pins}.items() if v is not None}


def _fetched(models_dir: Path, path: str | None) -> Path | None:
    """Return the fetched directory of an entry, directly below `models_dir`; None for files not fetched here."""
    if path is None or Path(path).is_absolute():
        return None
    found = models_dir / path
    return None if found.is_symlink() or found.resolve().parent != models_dir.resolve() else found


def _check_unused(platform: Platform, model_id: str) -> None:
    live = sa.select(jobs.c.id).where(jobs.c.model == model_id, jobs.c.state.not_in([s.value for s in FINAL]))
    made = sa.select(adapters.c.id).where(adapters.c.base_model == model_id)
    with platform.engine.connect() as conn:
        users = [*conn.execute(live).scalars(), *conn.execute(made).scalars()]
    if users:
        raise Conflict(
            f"base model {model_id} is needed by {len(users)} jobs and adapters, {users[0]} among them; deprecate it instead: "
            "new jobs cannot use it; existing jobs and adapters continue",
            code="model_in_use",
        )
