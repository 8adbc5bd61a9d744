"""Policies of a validation, given with the upload: the options of the checks, and how the file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from core.errors import InvalidRequest, did_you_mean
from engine.data.checks import all_options
from engine.data.checks.check import Option
from engine.data.readers.containers import MAX_DECODED_BYTES
from engine.data.readers.encodings import ENCODINGS, UTF8, Encoding, encoding_named

MIN_TRAINING_EXAMPLES = 10
"""Least good examples in a training file: OpenAI's minimum. A validation file may have fewer."""
FEW_EXAMPLES = 100
"""Good examples below which a report warns: from here on OpenAI expects clear improvements."""
OPERATORS = ("min_examples", "max_examples", "max_bytes")
"""Settings that a tenant does not choose: they come from the tier and from the file's purpose."""
READING_POLICIES = frozenset(("encoding", "rows_at"))
"""Settings for parsing a file; their effect is visible in the rows."""
MAX_KEY = 200
"""Characters of `rows_at`."""
BAD_ROWS = Option("bad_rows", ("fail", "drop"), help="rows with an error", in_every_id=True)
"""fail: one bad row refuses the file. drop: bad rows are reported and omitted."""
ENCODING = Option("encoding", ENCODINGS, help="encoding of the file's text")


def policy_options() -> dict[str, Option]:
    """Returns the settings that decide what happens to rows, by name."""
    return {BAD_ROWS.name: BAD_ROWS, **all_options()}


@dataclass(frozen=True, init=False)
class Policies:
    """What an upload or the platform sets. An option of a check is also an attribute: ``policies.pii``."""

    min_examples: int
    """Least good examples in a file. Its use is known only when a job names it: see `MIN_TRAINING_EXAMPLES`."""
    max_examples: int | None
    """Limit of the tenant's tier; None: no limit."""
    max_bytes: int
    """Limit of the decompressed file."""
    options: Mapping[str, Any]
    """Value of each of :func:`policy_options`."""
    encoding: Encoding
    """Encoding of the file's text."""
    rows_at: str | None
    """Key of the rows, in a file that is one JSON object."""

    def __init__(
        self,
        *,
        min_examples: int = 1,
        max_examples: int | None = None,
        max_bytes: int = MAX_DECODED_BYTES,
        encoding: Encoding = "utf-8",
        rows_at: str | None = None,
        **given: Any,
    ) -> None:
        """Raises ``InvalidRequest`` for an option that no check has, or a value that it does not accept."""
        known = policy_options()
        for name, value in given.items():
            if name not in known:
                raise _unknown(name)
            known[name].verify(value)
        chosen = {name: given.get(name, option.default) for name, option in known.items()}
        own = {"min_examples": min_examples, "max_examples": max_examples, "max_bytes": max_bytes, "encoding": encoding, "rows_at": rows_at}
        for name, value in {**own, "options": chosen}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(f"no policy {name!r}") from None

    def to_dict(self) -> Mapping[str, Any]:
        """Returns all settings by name: the arguments that make an equal instance."""
        limits = {name: getattr(self, name) for name in OPERATORS}
        return {**limits, **self.options, "encoding": self.encoding, "rows_at": self.rows_at}

    def shaping(self) -> Mapping[str, Any]:
        """Returns the settings that determine the rows: part of the dataset's id."""
        return {n: self.options[n] for n, option in policy_options().items() if option.in_every_id or self.options[n] != option.default}

    @classmethod
    def from_request(cls, given: Mapping[str, Any], **limits: Any) -> Self:
        """Returns the tenant's settings over the operator's `limits`; ``InvalidRequest`` names the first unknown setting or value."""
        if (name := next((name for name in OPERATORS if name in given), None)) is not None:
            raise _unknown(name)
        given = {**given, "encoding": encoding_named(given.get("encoding", UTF8))}
        ENCODING.verify(given["encoding"])
        rows_at = given.get("rows_at")
        if rows_at is not None and not (isinstance(rows_at, str) and 0 < len(rows_at) <= MAX_KEY):
            raise InvalidRequest(
                f"rows_at {str(rows_at)[:60]!r} is not a key of up to {MAX_KEY} characters", code="invalid_policy", param="policies.rows_at"
            )
        return cls(**{**given, **limits})


def _unknown(name: str) -> InvalidRequest:
    names = ", ".join((*policy_options(), *sorted(READING_POLICIES)))
    meant = did_you_mean(name, (*policy_options(), *READING_POLICIES))
    return InvalidRequest(f"policy {name[:60]!r} is not known; there are {names}{meant}", code="invalid_policy", param="policies")


def too_few_to_train(num_examples: int) -> str | None:
    """Returns why a training file with this many good examples is refused; None if it has enough."""
    if num_examples >= MIN_TRAINING_EXAMPLES:
        return None
    return (
        f"{num_examples} good example{'s' if num_examples != 1 else ''}, but training needs at least {MIN_TRAINING_EXAMPLES}: "
        f"add {MIN_TRAINING_EXAMPLES - num_examples} or more and upload the file again"
    )
