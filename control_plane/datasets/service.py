"""Dataset versions as their tenant sees them: immutable, listed, with a report, and approved where a policy requires review."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.datasets.tables import Dataset, datasets, files
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one_or_raise
from core.base_models import BaseModel
from core.errors import InvalidDataset, InvalidRequest, NotFound
from engine.data import TemplateTools, load_template, mixture_refusal, report_in_order, template_tools, too_few_to_train, tools_problem
from engine.training import method_named, registered_methods

LISTED = sa.select(*columns(datasets, Dataset), datasets.c.report["stats"].label("stats"))


def list_datasets(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Dataset]:
    """Return the tenant's dataset versions, newest first."""
    query = LISTED.where(datasets.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        keys = (datasets.c.created_at, datasets.c.id)
        return page(conn, query, keys, of=Dataset, id_column=datasets.c.id, after=after, limit=limit, max_limit=100)


def versions(platform: Platform, tenant: str, name: str, *, limit: int = 20) -> Sequence[Dataset]:
    """Return the newest versions of the dataset with this name."""
    query = LISTED.where(datasets.c.tenant_id == tenant, datasets.c.name == name)
    with platform.engine.connect() as conn:
        return many(conn, query.order_by(datasets.c.version.desc()).limit(limit), Dataset)


def get(platform: Platform, tenant: str, dataset_id: str) -> Dataset:
    """Return the dataset version; ``NotFound`` for another tenant's."""
    with platform.engine.connect() as conn:
        return _get(conn, tenant, dataset_id)


def approve(platform: Platform, tenant: str, dataset_id: str, *, by: str) -> Dataset:
    """Let jobs train on a dataset held for review; records who approved it and when. Approving again changes nothing."""
    these = (datasets.c.tenant_id == tenant) & (datasets.c.id == dataset_id)
    with platform.engine.begin() as conn:
        approval = {"review": "approved", "approved_at": platform.clock(), "approved_by": by}
        conn.execute(sa.update(datasets).where(these, datasets.c.review == "pending").values(**approval))
        return _get(conn, tenant, dataset_id)


def check_reviewed(review: str, dataset_id: str, *, param: str) -> None:
    """Refuse to train on a dataset that still needs approval."""
    if review == "pending":
        raise InvalidDataset(
            f"{param}: dataset {dataset_id} waits for your review, as its policies require; read GET /v1/datasets/{dataset_id}/report, "
            f"then approve it with POST /v1/datasets/{dataset_id}/approve, and submit again",
            code="dataset_needs_review",
            param=param,
        )


def check_format(format: str, method: str, file_id: str, *, param: str) -> None:
    """Refuse rows that the method cannot use, as packing would."""
    of = method_named(method)
    kind = "chat" if format == "prompt_completion" else format
    if kind in of.rows:
        return
    fitting = sorted((m for m in registered_methods().values() if kind in m.rows), key=lambda m: (m.every_token, not m.needs_reference))
    *others, last = [m.name for m in fitting] or [""]
    named = f"{', '.join(others)} or {last}" if others else last
    step = f"use method {named} for such rows" if fitting else "no method trains on such rows"
    if kind in ("preference", "kto"):
        step += ", or upload the good answers as conversations"
    raise InvalidRequest(
        f"{param} {file_id} holds {format} rows, which method {method} cannot train on: it needs {of.row_help}; {step}",
        code="preference_rows",
        param=param,
    )


def check_tools(stats: Mapping[str, Any] | None, policies: Mapping[str, Any] | None, model: BaseModel, file_id: str, *, param: str) -> None:
    """Refuse rows of whose tools the base model's chat template leaves parts out, as packing would. `stats` are those of a report.

    With the policy ``bad_rows=drop`` packing leaves such rows out.
    """
    if model.directory is None or (policies or {}).get("bad_rows") == "drop" or not (stats or {}).get("tools"):
        return
    if problem := tools_problem(stats, _template_tools(model.directory, model.template_digest)):
        raise InvalidDataset(f"{param} {file_id}: {problem}", code="tools_not_rendered", param=param)


@functools.lru_cache(maxsize=64)
def _template_tools(directory: Path, _digest: str) -> TemplateTools | None:
    template = load_template(directory)
    return None if template is None else template_tools(template)


def check_enough_to_train(num_rows: int, *, training_file: str, param: str) -> None:
    """Refuse a training file with fewer valid examples than training needs."""
    if (shortage := too_few_to_train(num_rows)) is not None:
        raise InvalidDataset(f"{param} {training_file}: {shortage}", param=param)


def check_distinct(training_files: Sequence[str], dataset_ids: Sequence[str | None]) -> None:
    """Refuse a mixture with two files of the same rows, which it could not tell apart; `dataset_ids`: None while a file is validated."""
    known: dict[str, str] = {}
    for place, (file_id, dataset_id) in enumerate(zip(training_files, dataset_ids, strict=True)):
        if dataset_id is not None and (other := known.setdefault(dataset_id, file_id)) != file_id:
            raise mixture_refusal(
                f"{file_id} and {other} hold the same rows (dataset {dataset_id}); name one of them, with a larger weight",
                f"[{place}].file",
            )


def report(platform: Platform, tenant: str, subject: str) -> Mapping[str, Any]:
    """Return the validation report of a dataset version or a file: a refused file has a report and no dataset."""
    with platform.engine.connect() as conn:
        of_dataset = sa.select(datasets.c.report).where(datasets.c.tenant_id == tenant, datasets.c.id == subject)
        of_file = sa.select(files.c.report).where(files.c.tenant_id == tenant, files.c.id == subject, files.c.deleted_at.is_(None))
        found: Mapping[str, Any] | None = conn.execute(of_dataset).scalar() or conn.execute(of_file).scalar()
    if found is None:
        raise NotFound(
            f"no dataset or validated file {subject!r}; list your files with GET /v1/files", code="dataset_not_found", param="dataset_id"
        )
    return report_in_order(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleMessage:
    role: str
    content: str
    is_whole: bool = True
    """False if it is shortened as in the report's first rows."""


def example_prompt(platform: Platform, tenant: str, dataset_id: str) -> list[ExampleMessage]:
    """Return what a model trained on the dataset is asked: the system message that its first rows share, and the first user message.

    The system message is whole where the report keeps it so. Empty for rows that are not conversations, and for a deleted dataset.
    """
    report = datasets.c.report
    query = sa.select(report["first_rows"], report["system"]).where(datasets.c.tenant_id == tenant, datasets.c.id == dataset_id)
    with platform.engine.connect() as conn:
        rows, system = conn.execute(query).one_or_none() or (None, None)
    said = [{m["role"]: m["content"] for m in reversed(row.get("messages", ()))} for row in rows or ()]
    roles = ("system", "user") if len({row.get("system") for row in said}) == 1 else ("user",)
    shown = {role: row[role] for row in said[:1] for role in roles if role in row}
    messages = {role: ExampleMessage(role=role, content=text, is_whole=not text.endswith("...")) for role, text in shown.items()}
    if system is not None:
        messages["system"] = ExampleMessage(role="system", content=system)
    return [messages[role] for role in ("system", "user") if role in messages]


def dataset_name(filename: str) -> str:
    """Return the file's name without suffixes: ``support.jsonl.gz`` is ``support``."""
    return filename.split(".", 1)[0] or "dataset"


def _get(conn: Connection, tenant: str, dataset_id: str) -> Dataset:
    query = LISTED.where(datasets.c.tenant_id == tenant, datasets.c.id == dataset_id)
    unknown = NotFound(f"no dataset {dataset_id!r}; list yours with GET /v1/datasets", code="dataset_not_found", param="dataset_id")
    return one_or_raise(conn, query, Dataset, unknown)
