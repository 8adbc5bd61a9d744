"""Reads the body of a submission, the same way for REST, GraphQL and the command line.

``method`` is OpenAI's object (``{"type": "dpo", "dpo": {"hyperparameters": {...}}}``) or one word (``"dpo"``, or ``"qlora"`` for SFT with
that adapter); the kind of adapter may also be given at the top level or among the hyperparameters. Unsupported values are refused with the
name of the field. ``spot`` is a preference: :mod:`engine.scheduler.pools` decides which jobs move to spot pools, and it never refuses
a job. ``integrations`` may name a project of Weights & Biases, as in OpenAI's API.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from control_plane.http.metadata import check_metadata
from core.errors import InvalidRequest, did_you_mean
from core.storable_text import check_storable
from engine.data import MIXTURE_FIELD, MixedFile, parse_mixture
from engine.evals import parse_eval_config
from engine.training import (
    ADAPTER_KINDS,
    HYPERPARAMETER_LIMITS,
    AdapterKind,
    canonical_json,
    checked_hardware,
    checked_hyperparameters,
    registered_methods,
)

ALIASES: Mapping[str, str] = {"supervised": "sft"} | dict.fromkeys(ADAPTER_KINDS, "sft")
"""Method names beyond the registered ones: OpenAI's word, and kinds of adapter."""
BODY_ALIASES: Mapping[str, str] = {"base_model": "model"}
HYPERPARAMETER_ALIASES: Mapping[str, str] = {"lora_rank": "rank", "lora_alpha": "alpha", "lora_target_modules": "target_modules"}
"""Names used by other services; those of hyperparameters are also accepted at the top level."""
SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MAX_SUFFIX = 64
"""OpenAI's limit, which also fits into the name of a served model."""
MAX_SEED = 2**31 - 1
WANDB_RESERVED = re.compile(r"[/\\#?%:]")
MAX_WANDB_NAME, MAX_WANDB_TAG, MAX_WANDB_TAGS = 128, 64, 50
"""W&B's limits on names of projects and on tags; the number of tags is ours."""
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "model": str, "training_file": str, "validation_file": str, "suffix": str, "seed": int, "metadata": dict, "integrations": list,
    "hyperparameters": dict, "method": (str, dict), "eval_config": dict, "tier": str, "spot": bool, "recipe": str, "hardware": dict,
    "auto_promote": bool, "idempotency_key": str, "adapter": str, "warm_start": str, "force": bool, "training_files": list,
}  # fmt: skip
PLAIN = (
    "model", "training_file", "validation_file", "eval_config", "tier", "spot", "recipe", "hardware", "auto_promote", "warm_start", "force",
)  # fmt: skip
"""Fields that a request takes over as they are."""
WORDS = {str: "text", int: "a whole number", dict: "an object", list: "a list", bool: "true or false", (str, dict): "text or an object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    model: str
    training_file: str
    """Of a mixture, its first file."""
    training_files: tuple[MixedFile, ...] = ()
    """Files of a mixture; empty for a single training file."""
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    """None: drawn when the job is created."""
    metadata: Mapping[str, str] | None = None
    method: str = "sft"
    adapter: AdapterKind = "lora"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """As requested, including ``auto``, without the kind of adapter; each value is within its limits."""
    eval_config: Mapping[str, Any] | None = None
    tier: str | None = None
    """None: the tenant's own tier."""
    spot: bool = False
    """It may run on cheaper GPUs that can be reclaimed, where that pays (``engine.scheduler.pools.may_use_spot``)."""
    recipe: str | None = None
    hardware: Mapping[str, Any] | None = None
    auto_promote: bool = True
    """Serve the adapter as soon as it has passed its gates; of an experiment false unless requested."""
    warm_start: str | None = None
    """The tenant's adapter, whole model or checkpoint that training starts from; it may be given as `model` too."""
    force: bool = False
    """Train even if an earlier job trained the same."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The request as sent, without its idempotency key and without nulls; files of a mixture as parsed."""

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Ids of its training files."""
        return tuple(one.file for one in self.training_files) or (self.training_file,)

    @property
    def sha256(self) -> str:
        """Digest of the body: two requests are the same if their bodies are."""
        return hashlib.sha256(canonical_json(self.body).encode()).hexdigest()

    @property
    def stored_body(self) -> Mapping[str, Any]:
        """The body that a job keeps: with the versions of the scored suites that it named."""
        return self.body if self.eval_config is None else {**self.body, "eval_config": dict(self.eval_config)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read a request; ``InvalidRequest`` names the first field that is unknown, missing or has a wrong type or value."""
        present = {k: v for k, v in body.items() if v is not None}
        check_storable(present)
        given = canonical_body(present)
        _check_types(given)
        name, requested = _method(given)
        hyperparameters = _hyperparameters(given, requested)
        adapter = _adapter(given, name, hyperparameters.pop("adapter", None))
        method = ALIASES.get(name, name)
        checked_hyperparameters(hyperparameters, method=method)
        checked_hardware(given.get("hardware"))
        if parse_eval_config(given.get("eval_config")).mode == "experiment":
            given = {"auto_promote": False, **given}
        _check_integrations(given.get("integrations"))
        mixed = parse_mixture(given[MIXTURE_FIELD]) if MIXTURE_FIELD in given else ()
        plain = {name: given[name] for name in PLAIN if name in given} | ({"training_file": mixed[0].file} if mixed else {})
        return cls(
            **plain,
            training_files=mixed,
            suffix=_suffix(given.get("suffix")),
            seed=_seed(given.get("seed")),
            metadata=check_metadata(given.get("metadata")),
            method=method,
            adapter=adapter,
            hyperparameters=hyperparameters,
            body={k: v for k, v in given.items() if k != "idempotency_key"}
            | ({MIXTURE_FIELD: [one.to_dict() for one in mixed]} if mixed else {}),
        )


def canonical_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `body` with this API's field names in place of :data:`BODY_ALIASES` and :data:`HYPERPARAMETER_ALIASES`.

    A field given under both names with different values is refused (``conflicting_parameters``); null counts as absent.
    """
    of_loras = {name: value for name, value in body.items() if name in HYPERPARAMETER_ALIASES and value is not None}
    given = dict(_renamed({name: value for name, value in body.items() if name not in HYPERPARAMETER_ALIASES}, {}, BODY_ALIASES))
    method = given["method"] if isinstance(given.get("method"), dict) else {}
    name = method.get("type")
    settings = method[name] if isinstance(name, str) and isinstance(method.get(name), dict) else {}
    of_method = settings.get("hyperparameters")
    if isinstance(of_method, dict) and of_method:
        renamed = _renamed(of_method, of_loras, HYPERPARAMETER_ALIASES)
        given["method"] = {**method, name: {**settings, "hyperparameters": renamed}}
    of_body = given.get("hyperparameters")
    if (isinstance(of_body, dict) and of_body) or (of_body in (None, {}) and of_loras and not of_method):
        given["hyperparameters"] = _renamed(of_body or {}, of_loras, HYPERPARAMETER_ALIASES)
    return given


def _renamed(given: Mapping[str, Any], more: Mapping[str, Any], aliases: Mapping[str, str]) -> Mapping[str, Any]:
    found: dict[str, object] = {}
    for name, value in (*given.items(), *more.items()):
        canonical = aliases.get(name, name)
        if value is None and (name in aliases or canonical in found):
            continue
        if found.get(canonical) not in (None, value):
            alias = next(alias for alias, meant in aliases.items() if meant == canonical)
            raise InvalidRequest(
                f"{alias} and {canonical} are the same field, with the values {str(value)[:80]!r} and {str(found[canonical])[:80]!r}; "
                f"keep {canonical}",
                code="conflicting_parameters",
                param=alias,
            )
        found[canonical] = value
    return found


def adapter_of(body: Mapping[str, Any]) -> AdapterKind:
    """Return the kind of adapter of a stored request."""
    name, requested = _method(body)
    return _adapter(body, name, _hyperparameters(body, requested).get("adapter"))


def _check_types(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        kind = TYPES.get(name)
        if kind is None:
            if name in HYPERPARAMETER_LIMITS:
                raise InvalidRequest(
                    f'unknown field {name!r}; it is a hyperparameter: write {{"hyperparameters": {{"{name}": ...}}}}',
                    code="unknown_parameter",
                    param=name,
                )
            hint = did_you_mean(name, TYPES) or f"; known are {', '.join(TYPES)}"
            raise InvalidRequest(f"unknown field {name[:80]!r}{hint}", code="unknown_parameter", param=name[:80])
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequest(f"{name} {str(value)[:80]!r} is not {WORDS[kind]}", code="invalid_type", param=name)
    if given.get("training_file") and "training_files" in given:
        raise InvalidRequest(
            "training_file and training_files were both given; keep training_file for one file, or training_files for a mixture",
            code="conflicting_parameters",
            param="training_files",
        )
    for name in ("model", "training_file"):
        if not given.get(name) and not (name == "training_file" and "training_files" in given):
            raise InvalidRequest(
                f"{name} is missing; a job needs a base model and an uploaded file", code="missing_required_parameter", param=name
            )


def _method(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the method name as requested, and the hyperparameters beside it."""
    requested = given.get("method", "supervised")
    name = requested if isinstance(requested, str) else requested.get("type")
    if not isinstance(name, str):
        raise InvalidRequest('method.type is missing; write {"type": "supervised"}', code="missing_required_parameter", param="method.type")
    known = [*ALIASES, *registered_methods()]
    if name not in known:
        supported = ", ".join(known)
        raise InvalidRequest(
            f"method {name[:80]!r} is not supported; use one of: {supported}{did_you_mean(name, known)}",
            code="unsupported_method",
            param="method",
        )
    settings = {} if isinstance(requested, str) else requested.get(name) or {}
    unknown = [] if isinstance(requested, str) else sorted(set(requested) - {"type", name})
    if unknown or not isinstance(settings, dict) or set(settings) - {"hyperparameters"}:
        raise InvalidRequest(
            f'method {name} takes only {{"type": "{name}", "{name}": {{"hyperparameters": ...}}}}; remove the other fields',
            code="unknown_parameter",
            param=f"method.{(unknown or [name])[0]}"[:80],
        )
    return name, settings.get("hyperparameters") or {}


def _adapter(given: Mapping[str, Any], method: str, of_hyperparameters: Any) -> AdapterKind:
    """Return the kind of adapter, wherever it was given; if given twice, the values must agree."""
    of_method = method if method in ADAPTER_KINDS else None
    places = {"method": of_method, "adapter": given.get("adapter"), "hyperparameters.adapter": of_hyperparameters}
    requested = {where: kind for where, kind in places.items() if kind not in (None, "auto")}
    for where, kind in requested.items():
        if kind not in ADAPTER_KINDS:
            raise InvalidRequest(
                f"adapter {repr(kind)[:80]} is not known; use one of: {', '.join(ADAPTER_KINDS)}", code="unsupported_adapter", param=where
            )
    if len(set(requested.values())) > 1:
        message = " and ".join(f"{kind} ({where})" for where, kind in requested.items())
        raise InvalidRequest(f"the adapter was given as {message}; keep only one", code="unsupported_adapter", param=list(requested)[-1])
    return next(iter(requested.values()), "lora")


def _hyperparameters(given: Mapping[str, Any], of_method: Any) -> dict[str, object]:
    """Return the method's hyperparameters, or else the older top-level ones; both at once would be ambiguous."""
    of_body = given.get("hyperparameters", {})
    if not isinstance(of_method, dict):
        raise InvalidRequest(f"hyperparameters {str(of_method)[:80]!r} is not an object", code="invalid_type", param="method")
    if of_method and of_body and of_method != of_body:
        raise InvalidRequest(
            "hyperparameters were given both in `method` and at the top level; keep those in `method`",
            code="invalid_hyperparameter",
            param="hyperparameters",
        )
    return dict(of_method or of_body)


def _check_integrations(requested: list[Any] | None) -> None:
    """Refuse what is not OpenAI's ``[{"type": "wandb", "wandb": {"project": ...}}]``."""
    for given in requested or ():
        kind = given.get("type") if isinstance(given, dict) else given
        if not isinstance(given, dict) or kind != "wandb":
            raise InvalidRequest(
                f"integration {str(kind)[:80]!r} is not offered; the only one is wandb",
                code="unsupported_integration",
                param="integrations",
            )
        _check_wandb(given)
    if len(requested or ()) > 1:
        raise _wandb_error("a job has one run at Weights & Biases; name one integration")


def _check_wandb(given: Mapping[str, Any]) -> None:
    wandb = given.get("wandb")
    if not isinstance(wandb, dict) or set(given) != {"type", "wandb"} or not set(wandb) <= {"project", "name", "entity", "tags"}:
        raise _wandb_error('write {"type": "wandb", "wandb": {"project": ..., "name": ..., "entity": ..., "tags": [...]}}')
    tags = wandb.get("tags") or []
    if not isinstance(tags, list) or len(tags) > MAX_WANDB_TAGS or not all(_is_name(tag, MAX_WANDB_TAG) for tag in tags):
        raise _wandb_error(f"tags are up to {MAX_WANDB_TAGS} texts of 1 to {MAX_WANDB_TAG} characters", "tags")
    for name in ("project", "name", "entity"):
        value = wandb.get(name)
        if value is None and name != "project":
            continue
        if not _is_name(value, MAX_WANDB_NAME) or (name != "name" and WANDB_RESERVED.search(str(value))):
            raise _wandb_error(f"{name} {str(value)[:80]!r} is not a text of 1 to {MAX_WANDB_NAME} characters without / \\ # ? % :", name)


def _is_name(value: Any, max_chars: int) -> bool:
    return isinstance(value, str) and len(value.strip()) > 0 and len(value) <= max_chars


def _wandb_error(message: str, field: str = "") -> InvalidRequest:
    param = f"integrations.wandb.{field}" if field else "integrations"
    return InvalidRequest(message, code="invalid_integration", param=param)


def _suffix(value: str | None) -> str | None:
    if value is None or (len(value) <= MAX_SUFFIX and SUFFIX.fullmatch(value)):
        return value
    raise InvalidRequest(
        f"suffix {value[:80]!r} ({len(value)} characters) is not valid: at most {MAX_SUFFIX} letters, digits, '-', '_' and '.', "
        "starting with a letter or digit",
        code="invalid_suffix",
        param="suffix",
    )


def _seed(value: int | None) -> int | None:
    if value is None or 0 <= value <= MAX_SEED:
        return value
    raise InvalidRequest(f"seed {value} is outside 0..{MAX_SEED}", code="invalid_seed", param="seed")
