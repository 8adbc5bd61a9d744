"""Policies of a validation: one setting per check, given with the upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args, get_type_hints

from ft_assets.datasets.readers.containers import MAX_BYTES
from ft_assets.datasets.readers.encodings import UTF8, Encoding, encoding_named
from ft_assets.errors import InvalidRequest

Verdict = Literal["fail", "drop", "warn", "review"]
"""fail: refuse the file. drop: omit the rows and count them. warn: keep them with a warning. review: keep them, but no job trains on the
dataset until its tenant has approved it."""

MIN_TRAINING_EXAMPLES = 10
"""Least good examples in a training file: OpenAI's minimum. A validation file may have fewer."""
FEW_EXAMPLES = 100
"""Good examples below which a report warns: from here on OpenAI expects clear improvements."""
OPERATORS = frozenset(("min_examples", "max_examples", "max_bytes"))
"""Settings that a tenant does not choose: they come from the tier and from the file's purpose."""
READING = frozenset(("encoding", "rows_at"))
"""Settings for parsing a file; their effect is visible in the rows."""
MAX_KEY = 200
"""Characters of `rows_at`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    min_examples: int = 1
    """Least good examples in a file. Its use is known only when a job names it: see `MIN_TRAINING_EXAMPLES`."""
    max_examples: int | None = None
    """Limit of the tenant's tier; None: no limit."""
    max_bytes: int = MAX_BYTES
    """Limit of the decompressed file."""
    bad_rows: Literal["fail", "drop"] = "fail"
    """fail: one bad row refuses the file. drop: bad rows are reported and omitted."""
    exact_duplicates: Literal["drop", "warn"] = "drop"
    """Rows whose normalized text is equal; the first is kept."""
    near_duplicates: Literal["off", "fail", "drop", "warn", "review"] = "drop"
    """Rows whose text (all except system messages) shares 90 % of its character 5-grams with an earlier row's."""
    contamination: Literal["off", "fail", "drop", "warn", "review"] = "drop"
    """Rows that repeat a registered evaluation suite."""
    contamination_threshold: float = 0.5
    """Share of a row's 13-grams found in a suite from which it counts as contaminated (GPT-3's and Llama 2's measure)."""
    pii: Literal["off", "warn", "redact", "reject"] = "off"
    """Personal data and secrets. redact: replaced by ``[EMAIL]`` and the like. reject: the row is a bad row."""
    toxicity: Literal["off", "fail", "drop", "warn", "review"] = "off"
    toxicity_threshold: float = 0.9
    """Score of the classifier, 0 to 1, from which a row counts."""
    control_tokens: Literal["reject", "drop", "escape"] = "reject"
    """Control tokens of the base model inside content. escape: split, so that they are tokenized as plain text."""
    over_long: Literal["reject", "truncate", "drop"] = "truncate"
    """Policy for examples over `max_seq_len`, when it and the tokenizer are known; they are counted either way."""
    encoding: Encoding = "utf-8"
    """Encoding of the file's text."""
    rows_at: str | None = None
    """Key of the rows, in a file that is one JSON object."""

    def __post_init__(self) -> None:
        for name in ("contamination_threshold", "toxicity_threshold"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidRequest(
                    f"policy {name} {getattr(self, name)} is outside of 0 < t <= 1", code="invalid_policy", param=f"policies.{name}"
                )

    def shaping(self) -> dict[str, Any]:
        """Returns the settings that determine the rows and their parsing: part of the dataset's id."""
        return {name: value for name, value in asdict(self).items() if name not in OPERATORS | READING}

    @classmethod
    def from_request(cls, given: Mapping[str, Any], **limits: Any) -> Self:
        """Returns the tenant's settings over the operator's `limits`; ``InvalidRequest`` names the first unknown setting or value."""
        types = get_type_hints(cls)
        known = [f.name for f in fields(cls) if f.name not in OPERATORS]
        given = {**given, "encoding": encoding_named(given.get("encoding", UTF8))}
        for name, value in given.items():
            if name not in known:
                raise InvalidRequest(
                    f"policy {str(name)[:60]!r} is not known; there are {', '.join(known)}", code="invalid_policy", param="policies"
                )
            if name == "rows_at":
                _check_key(value)
                continue
            choices = get_args(types[name])
            number = not choices and isinstance(value, int | float) and not isinstance(value, bool)
            if not number and value not in choices:
                wanted = ", ".join(choices) or "a number above 0 and at most 1"
                raise InvalidRequest(
                    f"policy {name} {str(value)[:60]!r} is not one of: {wanted}", code="invalid_policy", param=f"policies.{name}"
                )
        return cls(**{**given, **limits})


def _check_key(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_KEY):
        raise InvalidRequest(
            f"rows_at {str(value)[:60]!r} is not a key of up to {MAX_KEY} characters", code="invalid_policy", param="policies.rows_at"
        )


def too_few_to_train(num_examples: int) -> str | None:
    """Returns why a training file with this many good examples is refused; None if it has enough."""
    if num_examples >= MIN_TRAINING_EXAMPLES:
        return None
    return (
        f"{num_examples} good example{'s' if num_examples != 1 else ''}, but training needs at least {MIN_TRAINING_EXAMPLES}: "
        f"add {MIN_TRAINING_EXAMPLES - num_examples} or more and upload the file again"
    )
