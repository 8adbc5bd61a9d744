"""What a submission asks for: one reading of the request's body for every entrance (REST, GraphQL, command line).

``method`` is OpenAI's object (``{"type": "supervised", "supervised": {"hyperparameters": {...}}}``) or one word
(``"lora"``). What cannot be done is refused here, by the name of its field. ``spot``, ``hardware`` and ``integrations`` are
recorded with the job; nothing reads them yet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ft_assets.errors import InvalidRequest
from ft_assets.evals import config as eval_config
from ft_assets.evals.config import parse as parse_eval_config
from ft_assets.storable import check_storable
from ft_assets.training.hyperparameters import checked
from ft_assets.training.spec import canonical_json

METHODS: Mapping[str, tuple[str, Literal["lora"]]] = {"supervised": ("sft", "lora"), "sft": ("sft", "lora"), "lora": ("sft", "lora")}
"""Accepted names, each with the training method and the kind of adapter."""
SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MAX_SUFFIX = 64
"""OpenAI's limit, and what a served model's name has room for."""
MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits on metadata."""
MAX_SEED = 2**31 - 1
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "model": str, "training_file": str, "validation_file": str, "suffix": str, "seed": int, "metadata": dict, "integrations": list,
    "hyperparameters": dict, "method": (str, dict), "eval_config": dict, "tier": str, "spot": bool, "recipe": str, "hardware": dict,
    "auto_promote": bool, "idempotency_key": str,
}  # fmt: skip
WORDS = {str: "text", int: "a whole number", dict: "an object", list: "a list", bool: "true or false", (str, dict): "text or an object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    """None: drawn when the job is made."""
    metadata: Mapping[str, str] | None = None
    integrations: tuple[Mapping[str, Any], ...] = ()
    method: str = "sft"
    adapter: Literal["lora"] = "lora"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """As asked, ``auto`` included; each value is within its limits."""
    eval_config: Mapping[str, Any] | None = None
    tier: str | None = None
    """None: the tenant's own."""
    spot: bool = False
    recipe: str | None = None
    hardware: Mapping[str, Any] | None = None
    auto_promote: bool = True
    """Serve the adapter as soon as it has passed its gates."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """The request as sent, without its idempotency key and without nulls."""

    @property
    def sha256(self) -> str:
        """Two requests are the same when their bodies are."""
        return hashlib.sha256(canonical_json(self.body).encode()).hexdigest()

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Read a request; ``InvalidRequest`` names the first field that is unknown, missing or of a wrong type or value."""
        given = {k: v for k, v in body.items() if v is not None}
        check_storable(given)
        _check_types(given)
        method, adapter, asked = _method(given)
        hyperparameters = _hyperparameters(given, asked)
        checked(hyperparameters)
        parse_eval_config(given.get("eval_config"))
        eval_config.parse(given.get("eval_config"))
        given.pop("idempotency_key", None)
        return cls(
            model=given["model"],
            training_file=given["training_file"],
            validation_file=given.get("validation_file"),
            suffix=_suffix(given.get("suffix")),
            seed=_seed(given.get("seed")),
            metadata=_metadata(given.get("metadata")),
            integrations=tuple(given.get("integrations", ())),
            method=method,
            adapter=adapter,
            hyperparameters=hyperparameters,
            eval_config=given.get("eval_config"),
            tier=given.get("tier"),
            spot=given.get("spot", False),
            recipe=given.get("recipe"),
            hardware=given.get("hardware"),
            auto_promote=given.get("auto_promote", True),
            body=given,
        )


def _check_types(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        kind = TYPES.get(name)
        if kind is None:
            raise InvalidRequest(f"unknown field {name[:80]!r}; known are {', '.join(TYPES)}", code="unknown_parameter", param=name[:80])
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InvalidRequest(f"{name} {str(value)[:80]!r} is not {WORDS[kind]}", code="invalid_type", param=name)
    for name in ("model", "training_file"):
        if not given.get(name):
            raise InvalidRequest(
                f"{name} is missing; a job needs a base model and an uploaded file", code="missing_required_parameter", param=name
            )


def _method(given: Mapping[str, Any]) -> tuple[str, Literal["lora"], Mapping[str, Any]]:
    asked = given.get("method", "supervised")
    name = asked if isinstance(asked, str) else asked.get("type")
    if not isinstance(name, str):
        raise InvalidRequest('method.type is missing; write {"type": "supervised"}', code="missing_required_parameter", param="method.type")
    if name not in METHODS:
        supported = ", ".join(METHODS)
        raise InvalidRequest(f"method {name[:80]!r} is not supported; use one of: {supported}", code="unsupported_method", param="method")
    settings = {} if isinstance(asked, str) else asked.get(name) or {}
    unknown = [] if isinstance(asked, str) else sorted(set(asked) - {"type", name})
    if unknown or not isinstance(settings, dict) or set(settings) - {"hyperparameters"}:
        raise InvalidRequest(
            f'method {name} takes only {{"type": "{name}", "{name}": {{"hyperparameters": ...}}}}; remove the other fields',
            code="unknown_parameter",
            param=f"method.{(unknown or [name])[0]}",
        )
    return *METHODS[name], settings.get("hyperparameters") or {}


def _hyperparameters(given: Mapping[str, Any], of_method: Any) -> dict[str, Any]:
    """Those of the method, else the older top-level ones; both at once would be ambiguous."""
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


def _metadata(value: Mapping[str, Any] | None) -> Mapping[str, str] | None:
    if value is None:
        return None
    if len(value) > MAX_METADATA_PAIRS:
        raise InvalidRequest(
            f"metadata has {len(value)} pairs, at most {MAX_METADATA_PAIRS} fit", code="invalid_metadata", param="metadata"
        )
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata {key[:80]!r} is not valid: keys have at most {MAX_METADATA_KEY} characters, values are text of at most "
                f"{MAX_METADATA_VALUE}",
                code="invalid_metadata",
                param="metadata",
            )
    return value
