"""The lineage of a model as boxes in layers: files, data and bases, job, evaluation, model, and the names that callers use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from control_plane.adapters.impact import Standing
from control_plane.adapters.tables import Adapter
from control_plane.console.documents.lineage_picture import Box, Mark
from engine.adapters import Stage, parse_adapter_name

Found = Mapping[str, Any]
"""One adapter of the response of ``GET /v1/adapters/{id}/lineage``."""
MAX_ROUTES = 4
"""Routes drawn; a last box counts the others."""
MODELS = "/console/models"


def lineage_layers(found: Found, now: Standing) -> Sequence[Sequence[Box]]:
    """Return the boxes of the picture, each layer leading to the next."""
    return [list(layer) for layer in (_files(found), _inputs(found), _job(found), _evaluation(found), _model(now.adapter), _names(now))]


def _files(found: Found) -> Iterator[Box]:
    for file in found["uploads"]:
        deleted = file["deleted_at"] is not None
        yield Box(
            kind=f"{file['role'].capitalize()} file", name=file["filename"] or file["id"], detail="deleted" if deleted else "as uploaded",
            href=None if deleted else f"/console/files/{file['id']}", mark="off" if deleted else "",
        )  # fmt: skip


def _inputs(found: Found) -> Iterator[Box]:
    for data in filter(None, (found["dataset"], *found["mixed_datasets"])):
        name, rows = f"{data['name']} v{data['version']}", f"{data['row_count']:,} rows"
        yield Box(kind="Dataset", name=name, detail=rows, href=f"/console/datasets/{data['id']}")
    base = found["base_model"]
    detail = (base["digest"] or "")[:12] if base["in_catalogue"] else "updated since"
    yield Box(kind="Base model", name=base["id"], detail=detail, href=f"{MODELS}/base/{quote(base['id'])}", joins=False)
    parents = found["parents"]
    if parents:
        more = " or more" if found["more_parents"] else ""
        parent = parents[0]["adapter"]
        named = parse_adapter_name(parent["name"])
        detail = f"{named.opaque} and {len(parents) - 1}{more}" if len(parents) > 1 else named.opaque
        yield Box(kind="Started from", name=named.suffix, detail=detail, href=f"{MODELS}/{parent['id']}", joins=False)


def _job(found: Found) -> Iterator[Box]:
    job = found["job"]
    cost = f"${job['cost_micros'] / 1e6:,.2f}"
    yield Box(kind="Job", name=f"{job['method']} job", detail=f"{job['state']}, {cost}", href=f"/console/jobs/{job['id']}")


def _evaluation(found: Found) -> Iterator[Box]:
    passed, num_later = found["adapter"]["eval_passed"], len(found["evaluations"]) - 1
    again = f"{num_later} later" if num_later else "at registration"
    page = f"/console/jobs/{found['job']['id']}/evaluation"
    yield Box(kind="Evaluation", name="Passed" if passed else "Did not pass", detail=again, href=page, mark="" if passed else "failed")


MARKS: Mapping[Stage, Mark] = {Stage.PRODUCTION: "now", Stage.QUARANTINED: "failed", Stage.ARCHIVED: "off", Stage.DEPRECATED: "off"}


def _model(adapter: Adapter) -> Iterator[Box]:
    name, waits = parse_adapter_name(adapter.name), adapter.approval in ("pending", "rejected")
    state = f"{adapter.stage}, {adapter.approval}" if waits else adapter.stage.value
    yield Box(kind="Model", name=name.suffix, detail=state, href=f"{MODELS}/{adapter.id}", mark=MARKS.get(adapter.stage, ""))


def _names(now: Standing) -> Iterator[Box]:
    answering, name = now.answering, f"ft:…:{parse_adapter_name(now.adapter.name).suffix}"
    if answering is None:
        yield Box(kind="Name", name=name, detail="no model answers", mark="off")
    else:
        mine = answering.id == now.adapter.id
        who = "this model answers" if mine else f"{answering.name.rpartition(':')[2]} answers"
        playground = f"/console/playground#{urlencode({'left': now.logical})}"
        yield Box(kind="Name", name=name, detail=who, href=playground, mark="now" if mine else "off")
    routes = [(route, next((t for t in route.targets if t.adapter_id == now.adapter.id), None)) for route in now.routes]
    with_it = [(route, target) for route, target in routes if target is not None]
    for route, target in with_it[:MAX_ROUTES]:
        detail = f"{100 * target.share:.0f} % of callers"
        yield Box(kind="Route", name=route.name, detail=detail, href=f"{MODELS}/routes/{route.name}", mark="now" if target.share else "off")
    if len(with_it) > MAX_ROUTES:
        yield Box(kind="Routes", name=f"{len(with_it) - MAX_ROUTES} more", href=f"{MODELS}/routes")
