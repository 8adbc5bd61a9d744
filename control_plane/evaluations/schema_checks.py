"""Checks the answers to rows with a response format against its JSON schema. Schemas are a tenant's, so a child process with limits does
it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from control_plane.platform.context import Platform
from control_plane.sandbox import scratch
from control_plane.sandbox.sandbox_parent import GIB, Limits, run_sandboxed
from core.errors import FtError, Unavailable
from engine.evals import HOLDOUT, SCHEMA_VALID, AnswerReader, Item

CHECKER = "control_plane.sandbox.task_schemas"
LIMITS = Limits(wall_s=60.0, memory_bytes=GIB)
"""15,000 answers (5,000 items of three models) to a schema of 30 fields take a second of one core."""

log = logging.getLogger(__name__)


def with_schema_verdicts(
    platform: Platform, tenant: str, result: Mapping[str, Any], items: Sequence[Item], *, reader: AnswerReader
) -> Mapping[str, Any]:
    """Returns a reviewed result with the verdicts on answers to `items` that have a schema.

    An invalid schema gives no verdict. If the checks exceed their limits, there are none at all, and the log says so. Raises
    ``Unavailable`` if the disk is full.
    """
    wanted = {item.id: item.schema for item in items if item.schema is not None and not item.calls}
    if not wanted:
        return result
    plain = replace(reader, mode="strip")
    answers = {name: sections[HOLDOUT]["answers"] for name, sections in result["subjects"].items() if sections and HOLDOUT in sections}
    asked = [(name, id_, plain.text(id_, str(given[id_]), suite=HOLDOUT)) for name, given in answers.items() for id_ in wanted]
    spelled = {id_: json.dumps(schema, sort_keys=True) for id_, schema in wanted.items()}
    schemas = {text: at for at, text in enumerate(dict.fromkeys(spelled.values()))}
    order = {"schemas": [json.loads(text) for text in schemas], "checks": [(schemas[spelled[id_]], text) for _, id_, text in asked]}
    try:
        with scratch.directory(platform.settings.work_dir, tenant) as directory:
            verdicts = run_sandboxed(CHECKER, order, directory, limits=LIMITS, what="JSON schemas of answers")["verdicts"]
    except Unavailable:  # the next run of the step checks them
        raise
    except FtError as error:
        log.warning("answers were not checked against their JSON schemas: %s", error)
        return result
    valid: dict[str, dict[str, float]] = {name: {} for name in answers}
    for (name, id_, _), verdict in zip(asked, verdicts, strict=True):
        if verdict is not None:
            valid[name][id_] = float(verdict)
    return {**result, SCHEMA_VALID: valid}
