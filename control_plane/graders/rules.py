"""OpenAI's graders that need no model and run no code: ``string_check``, ``text_similarity``, and ``multi`` of these.

Texts are templates: ``{{item.answer}}`` is a field of the dataset's row, ``{{sample.output_text}}`` the model's answer, and
``{{sample.output_json.field}}`` a field of an answer in JSON. An invalid grader is refused. A valid grader that fails on an item and
sample scores 0.0 and sets an error flag.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.graders import formulas
from control_plane.graders.text_similarity import METRICS, NEEDS_MORE
from core.errors import InvalidRequest

PATH = re.compile(r"\s*(item|sample)((?:\.[^.\s\[\]{}]+|\[[0-9]{1,6}\])*)\s*")
STEP = re.compile(r"\.([^.\s\[\]{}]+)|\[([0-9]+)\]")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_TEXT = 100_000
"""Characters of a text once its template is filled."""
MAX_COMPARED = 20_000
"""Characters of a text whose similarity is measured: the time grows with the square, and ten graders take under a second."""
MAX_TEMPLATE = 20_000
MAX_GIVEN = 200_000
"""Characters of the sample, and of the item as JSON: templates may name all of it, each of them."""
MAX_GRADERS = 10
KINDS = ("string_check", "text_similarity", "multi")
OPERATIONS = ("eq", "ne", "like", "ilike")
UNSUPPORTED: Mapping[str, str] = {
    "python": "code of tenants is not run here",
    "score_model": "no model is asked to judge through this call; `eval_config` of a job has a judge",
    "label_model": "no model is asked to judge through this call; `eval_config` of a job has a judge",
}
ERRORS = (
    "formula_parse_error", "invalid_variable_error", "model_grader_parse_error", "model_grader_refusal_error", "model_grader_server_error",
    "other_error", "python_grader_runtime_error", "python_grader_server_error", "sample_parse_error", "truncated_observation_error",
    "unresponsive_reward_error",
)  # fmt: skip
"""Flags of OpenAI's answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A grader of one text against another."""

    name: str
    type: str
    input: str
    reference: str
    how: str
    """`operation` of a string check, `evaluation_metric` of a similarity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multi:
    name: str
    graders: Mapping[str, Leaf]
    formula: ast.expr
    type: str = "multi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    reward: float
    sub_rewards: Mapping[str, float]
    errors: frozenset[str]
    """Those of :data:`ERRORS` that occurred."""
    seconds: float


class _Unfilled(Exception):
    """A template cannot be filled in; the argument is the error flag."""


def parse(grader: Mapping[str, Any]) -> Leaf | Multi:
    """Parse a grader; raises ``InvalidRequest`` (``invalid_grader`` or ``unsupported_grader``) that names the field."""
    return _multi(grader) if _choice(grader, "type", "grader", KINDS, UNSUPPORTED) == "multi" else _leaf(grader, "grader")


def run(grader: Leaf | Multi, *, item: Any, sample: str) -> Graded:
    """Grade `sample` against `item`; raises ``InvalidRequest`` if they are too long."""
    for what, size in (("model_sample", len(sample)), ("item", len(json.dumps(item, ensure_ascii=False)))):
        if size > MAX_GIVEN:
            raise InvalidRequest(f"{what} has {size} characters, the limit is {MAX_GIVEN}; remove fields that no template uses", param=what)
    began, values = time.perf_counter(), {"item": item, "sample": _sample(sample)}
    errors: set[str] = set()
    leaves = {grader.name: grader} if isinstance(grader, Leaf) else grader.graders
    rewards = {name: _graded(leaf, values, errors) for name, leaf in leaves.items()}
    if isinstance(grader, Leaf):
        reward, rewards = rewards[grader.name], {}
    else:
        reward = _combined(grader, rewards, errors)
    return Graded(reward=reward, sub_rewards=rewards, errors=frozenset(errors), seconds=time.perf_counter() - began)


def unknown_path(grader: Leaf | Multi, *, item: Any) -> str | None:
    """Return the first path of the templates that `item`, or any answer, lacks: every answer would score 0.0. None if all are there."""
    known = {"item": item, "sample": _sample("")}
    for leaf in [grader] if isinstance(grader, Leaf) else grader.graders.values():
        for path in (path.strip() for text in (leaf.input, leaf.reference) for _, path in _parts(text) if path is not None):
            try:
                _looked_up(path, known)
            except _Unfilled as missing:
                if str(missing) != "sample_parse_error":  # the answer's own JSON
                    return path
    return None


def _combined(grader: Multi, rewards: Mapping[str, float], errors: set[str]) -> float:
    try:
        return formulas.value(grader.formula, rewards)
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        errors.add("other_error")
        return 0.0


def _graded(leaf: Leaf, values: Mapping[str, Any], errors: set[str]) -> float:
    try:
        text, reference = (_filled(template, values) for template in (leaf.input, leaf.reference))
    except _Unfilled as e:
        errors.add(str(e))
        return 0.0
    except RecursionError:  # of a sample's JSON: the request's own nesting is limited
        errors.add("sample_parse_error")
        return 0.0
    if leaf.type == "text_similarity":
        if max(len(text), len(reference)) > MAX_COMPARED:
            errors.add("truncated_observation_error")
            return 0.0
        return METRICS[leaf.how](text, reference)
    return float(_holds(leaf.how, text, reference))


def _holds(operation: str, text: str, reference: str) -> bool:
    if operation == "like":
        return reference in text
    if operation == "ilike":
        return reference.casefold() in text.casefold()
    return (text == reference) == (operation == "eq")


def _sample(text: str) -> Mapping[str, object]:
    sample: dict[str, object] = {"output_text": text}
    with contextlib.suppress(ValueError, RecursionError):
        sample["output_json"] = json.loads(text)
    return sample


def _filled(template: str, values: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in _pieces(template, values):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_TEXT:
            raise _Unfilled("truncated_observation_error")
    return "".join(pieces)


def _pieces(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    for literal, path in _parts(template):
        yield literal
        if path is not None:
            value = _looked_up(path, values)
            yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield each literal text with the path in the ``{{...}}`` that follows it; None after the last."""
    end = 0
    while (start := template.find("{{", end)) >= 0 and (stop := template.find("}}", start + 2)) >= 0:
        yield template[end:start], template[start + 2 : stop]
        end = stop + 2
    yield template[end:], None


def _looked_up(path: str, values: Mapping[str, Any]) -> Any:
    read = PATH.fullmatch(path)
    assert read is not None, "it was checked when the grader was read"
    value = values[read[1]]
    for name, index in STEP.findall(read[2]):
        if isinstance(value, dict) and name and name in value:
            value = value[name]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            of_json = read[1] == "sample" and read[2].startswith(".output_json") and "output_json" not in values["sample"]
            raise _Unfilled("sample_parse_error" if of_json else "invalid_variable_error")
    return value


def _leaf(grader: Mapping[str, Any], where: str) -> Leaf:
    kind = _choice(grader, "type", where, KINDS, UNSUPPORTED)
    how = {"string_check": "operation", "text_similarity": "evaluation_metric"}.get(kind)
    if how is None:
        raise _invalid(f"a multi grader holds no grader of type {kind!r}; use string_check or text_similarity", f"{where}.type")
    _only(grader, ("type", "name", "input", "reference", how), where)
    allowed, unsupported = (OPERATIONS, {}) if kind == "string_check" else (tuple(METRICS), NEEDS_MORE)
    return Leaf(
        name=_text(grader, "name", where),
        type=kind,
        input=_template(grader, "input", where),
        reference=_template(grader, "reference", where),
        how=_choice(grader, how, where, allowed, unsupported),
    )


def _multi(grader: Mapping[str, Any]) -> Multi:
    _only(grader, ("type", "name", "graders", "calculate_output"), "grader")
    name, formula, given = _text(grader, "name", "grader"), _text(grader, "calculate_output", "grader"), grader.get("graders")
    if not isinstance(given, dict) or not given:
        raise _invalid('graders is missing; write {"exact": {"type": "string_check", ...}}', "grader.graders")
    named = {str(given.get("name")): given} if isinstance(given.get("type"), str) else given  # one grader alone, as OpenAI's types have it
    if len(named) > MAX_GRADERS:
        raise _invalid(f"{len(named)} graders are too many, the limit is {MAX_GRADERS}", "grader.graders")
    leaves = {}
    for key, one in named.items():
        where = f"grader.graders.{key[:80]}"
        if not NAME.fullmatch(key) or not isinstance(one, dict):
            raise _invalid(f"{key[:80]!r} is not a name with a grader; names have letters, digits and '_'", where)
        leaves[key] = _leaf(one, where)
    try:
        return Multi(name=name, graders=leaves, formula=formulas.parse(formula, leaves))
    except formulas.FormulaError as e:
        raise _invalid(f"calculate_output {formula[:80]!r} cannot be computed: {e}", "grader.calculate_output") from e


def _choice(grader: Mapping[str, Any], field: str, where: str, allowed: tuple[str, ...], unsupported: Mapping[str, str]) -> str:
    value, use = _text(grader, field, where), f"use one of {', '.join(allowed)}"
    if value in unsupported:
        message = f"{field} {value} is not offered: {unsupported[value]}; {use}"
        raise InvalidRequest(message, code="unsupported_grader", param=f"{where}.{field}")
    if value not in allowed:
        raise _invalid(f"{field} {value[:80]!r} does not exist; {use}", f"{where}.{field}")
    return value


def _text(grader: Mapping[str, Any], field: str, where: str) -> str:
    value = grader.get(field)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _invalid(f"{field} {repr(value)[:80]} is not text of at most {MAX_TEXT} characters", f"{where}.{field}")
    return value


def _template(grader: Mapping[str, Any], field: str, where: str) -> str:
    text = _text(grader, field, where)
    if len(text) > MAX_TEMPLATE:
        raise _invalid(f"{field} has {len(text)} characters, the limit is {MAX_TEMPLATE}; put long texts into the item", f"{where}.{field}")
    for _, path in _parts(text):
        if path is not None and not PATH.fullmatch(path):
            raise _invalid(
                f"{field} holds {f'{{{{{path}}}}}'[:80]!r}; write {{{{item.FIELD}}}}, {{{{sample.output_text}}}} or "
                "{{sample.output_json.FIELD}}",
                f"{where}.{field}",
            )
    return text


def _only(grader: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(grader) - set(known))
    if unknown:
        raise _invalid(f"unknown field {unknown[0][:80]!r}; known are {', '.join(known)}", f"{where}.{unknown[0][:80]}")


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_grader", param=param)
