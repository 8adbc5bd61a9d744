"""Mixtures: one job's several training files, and how much of each an epoch reads.

Each file is packed once, alone, as if a job trained on nothing else; a mixture is an order over those packs
(``engine.training.data_order``).

1. `tokens`: an epoch reads that many tokens of the file. If it has fewer, some rows are read again; if it has more, the next epoch goes on
   where this one stopped.
2. `weight`: the files with weights share as many tokens as they have together, in proportion to their weights. Equal weights read a small
   file as much as a large one: its rows more than once, not all rows of the large one.
3. Neither, for every file without `tokens`: an epoch reads each of its rows once, as if the files were one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from core.errors import InvalidRequest

MIXTURE_FIELD = "training_files"
FIELDS = ("file", "weight", "tokens")
MAX_FILES = 16
"""Each is packed alone and keeps up to 1 GiB of its windows in the memory of every rank (``pack_loader.KEPT_SHARDS``)."""
MAX_WEIGHT = 1e6
MAX_TOKENS = 10**13
"""More than any base model has seen."""
MAX_REPEATS = 100.0
"""Times that an epoch may read a file. Its value ends long before: see ``USEFUL_READS``."""
USEFUL_READS = 16
"""Reads of the same rows, over all epochs, after which another adds almost nothing (Muennighoff et al. 2023, section 6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedFile:
    """One training file of a mixture, with at most one of `weight` and `tokens`."""

    file: str
    """Its id."""
    weight: float | None = None
    tokens: int | None = None

    def to_dict(self) -> dict[str, str | float]:
        """Returns the fields that are set, as they are stored."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        return cls(file=str(stored["file"]), weight=stored.get("weight"), tokens=stored.get("tokens"))


def parse_mixture(given: Sequence[Any]) -> tuple[MixedFile, ...]:
    """Returns the files of a request; ``InvalidRequest`` (``invalid_training_files``) names the first field that is not valid."""
    if not 1 <= len(given) <= MAX_FILES:
        raise mixture_refusal(f"{MIXTURE_FIELD} names {len(given)} files; name 1 to {MAX_FILES}, or join small files before the upload")
    found = tuple(_file(place, one) for place, one in enumerate(given))
    for place, one in enumerate(found):
        if one.file in [other.file for other in found[:place]]:
            raise mixture_refusal(f"{MIXTURE_FIELD} names {one.file} twice; name each file once, with a larger weight", f"[{place}].file")
    unlike = [place for place, one in enumerate(found) if one.weight is None and one.tokens is None]
    if unlike and any(one.weight is not None for one in found):
        message = (
            f"{found[unlike[0]].file} has no weight, but another file has one; give each file a weight or tokens, or leave all weights out"
        )
        raise mixture_refusal(message, f"[{unlike[0]}].weight")
    return found


def _file(place: int, given: Any) -> MixedFile:
    if not isinstance(given, Mapping):
        raise mixture_refusal(
            f'{MIXTURE_FIELD}[{place}] {str(given)[:80]!r} is not an object such as {{"file": "file-...", "weight": 2}}', f"[{place}]"
        )
    for name in given:
        if name not in FIELDS:
            raise mixture_refusal(
                f"unknown field {name[:80]!r} in {MIXTURE_FIELD}[{place}]; known are {', '.join(FIELDS)}", f"[{place}].{name[:80]}"
            )
    file, weight, tokens = (given.get(name) for name in FIELDS)
    if not isinstance(file, str) or not file:
        raise mixture_refusal(f"{MIXTURE_FIELD}[{place}] names no file; give the id of an uploaded file as `file`", f"[{place}].file")
    if weight is not None and tokens is not None:
        raise mixture_refusal(f"{MIXTURE_FIELD}[{place}] has both weight and tokens; keep one of them", f"[{place}].tokens")
    if weight is not None and not (_is_number(weight) and 0 < weight <= MAX_WEIGHT):
        step = "leave the file out, or give it a weight"
        raise mixture_refusal(f"weight {weight!r} of {file} is not above 0 and at most {MAX_WEIGHT:,.0f}; {step}", f"[{place}].weight")
    if tokens is not None and not (isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens <= MAX_TOKENS):
        raise mixture_refusal(
            f"tokens {tokens!r} of {file} is not a whole number from 1 to {MAX_TOKENS:,}; correct it", f"[{place}].tokens"
        )
    return MixedFile(file=file, weight=None if weight is None else float(weight), tokens=tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def mixture_refusal(message: str, place: str = "") -> InvalidRequest:
    """Returns the refusal of a mixture; `place`: the field within it, ``[1].weight``."""
    return InvalidRequest(message, code="invalid_training_files", param=f"{MIXTURE_FIELD}{place}")


def mixture_params(files: Sequence[MixedFile]) -> list[str]:
    """Returns the fields of a request that name its training files, of which `files` are those of a mixture."""
    return [f"{MIXTURE_FIELD}[{place}].file" for place in range(len(files))] or ["training_file"]


def mixture_repeats(files: Sequence[MixedFile], tokens: Sequence[int]) -> list[float]:
    """Returns how often an epoch reads each file of so many `tokens`: 0.5 is half of its rows, 2.0 each of them twice."""
    sizes = [max(1, count) for count in tokens]
    weighted = sum(size for one, size in zip(files, sizes, strict=True) if one.weight is not None)
    weights = sum(one.weight or 0.0 for one in files)

    def wanted(one: MixedFile, size: int) -> float:
        if one.tokens is not None:
            return one.tokens
        return size if one.weight is None else weighted * one.weight / weights

    return [wanted(one, size) / size for one, size in zip(files, sizes, strict=True)]


def check_repeats(files: Sequence[MixedFile], found: Sequence[float]) -> None:
    """Refuses a mixture that would read a file more than :data:`MAX_REPEATS` times an epoch."""
    for place, (one, times) in enumerate(zip(files, found, strict=True)):
        if times > MAX_REPEATS:
            name = "weight" if one.tokens is None else "tokens"
            raise mixture_refusal(
                f"an epoch would read {one.file} {times:,.0f} times, at most {MAX_REPEATS:.0f}; lower its {name}", f"[{place}].{name}"
            )


class Packed(Protocol):
    """What a mixture needs to know of a pack."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


def rows_per_epoch(files: Sequence[MixedFile], packs: Sequence[Packed]) -> list[int]:
    """Returns how many rows of each pack an epoch reads, at least one; :func:`check_repeats` says what it refuses."""
    found = mixture_repeats(files, [pack.num_tokens for pack in packs])
    check_repeats(files, found)
    return [max(1, round(times * pack.num_rows)) for pack, times in zip(packs, found, strict=True)]


def described_mixture(files: Sequence[MixedFile], rows: Sequence[int], packs: Sequence[Packed]) -> Iterator[str]:
    """Yields for each file, in words, how much of it an epoch of so many `rows` reads."""
    tokens = [count * pack.num_tokens / pack.num_rows for count, pack in zip(rows, packs, strict=True)]
    for one, count, pack, read in zip(files, rows, packs, tokens, strict=True):
        yield f"{one.file} {count / pack.num_rows:.3g} times ({read:,.0f} tokens, {read / sum(tokens):.1%})"


def repetition_warning(times: float) -> str:
    """Returns the warning about a file whose rows are read so many times over all epochs."""
    return (
        f"its rows are read {times:.0f} times over all epochs, and more than {USEFUL_READS} add almost nothing; lower its weight or tokens"
    )
