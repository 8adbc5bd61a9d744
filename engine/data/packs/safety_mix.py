"""A small share of safety-preserving examples for the training part: refusals of harm, and help where a refusal would be wrong.

Fine-tuning on harmless rows already weakens what a base model refuses; a few hundred such examples preserve most of it (Bianchi et al.
2024, "Safety-Tuned LLaMAs"). The shipped set is ``safety.jsonl``; an operator may name another file of conversations
(``FT_SAFETY_EXAMPLES``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from core.errors import InvalidRequest
from engine.data.schema import Example, Message

SHIPPED = Path(__file__).with_name("safety.jsonl")
MAX_REPEATS = 4
"""Most repetitions of one example: the effect comes from a few hundred examples, and more would be memorized."""


def safety_digest(file: Path | None) -> str:
    """sha256 of the set."""
    return hashlib.sha256(_bytes(file or SHIPPED)).hexdigest()


def num_wanted(num_train: int, share: float) -> int:
    """Returns the number of examples that make up `share` of the training part once added."""
    return round(num_train * share / (1.0 - share))


def safety_examples(num_train: int, *, share: float, file: Path | None) -> Iterator[Example]:
    """Returns the examples mixed into `num_train`, with rows -1, -2 ... by their place in the set; each once before any repeats."""
    if not share:
        return
    found = load_safety(file)
    digest = safety_digest(file)
    order = sorted(range(len(found)), key=lambda i: hashlib.sha256(f"{digest}:{i}".encode()).digest())
    for n in range(min(num_wanted(num_train, share), MAX_REPEATS * len(found))):
        yield found[order[n % len(order)]]


def safety_counts(num_train: int, *, share: float, file: Path | None) -> Mapping[str, int] | None:
    """Returns the manifest's entry for :func:`safety_examples`; None if nothing is mixed in."""
    if not share:
        return None
    chosen = [e.row for e in safety_examples(num_train, share=share, file=file)]
    return {"num_examples": len(chosen), "num_wanted": num_wanted(num_train, share), "num_distinct": len(set(chosen))}


def load_safety(file: Path | None = None) -> list[Example]:
    """Parses the conversations of the set; ``InvalidRequest`` names the first invalid line."""
    path = file or SHIPPED
    examples = []
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        try:
            messages = msgspec.convert(json.loads(line)["messages"], tuple[Message, ...], strict=True)
        except (ValueError, KeyError, TypeError) as error:
            raise _refused(path, f"line {number} holds no conversation ({str(error)[:120]})") from error
        if len(messages) < 2 or messages[-1].role != "assistant":
            raise _refused(path, f"line {number} does not end with the assistant's answer")
        examples.append(Example(kind="chat", messages=messages, row=-number))
    if not examples:
        raise _refused(path, "it is empty")
    return examples


def _refused(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"safety file {path}: {why}; give one JSON object with 'messages' a line", param="safety_file")


def _bytes(path: Path) -> bytes:
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise _refused(path, f"it cannot be read ({error.strerror})") from error


@cache
def _read(path: Path, _mtime_ns: int, _size: int) -> bytes:
    return path.read_bytes()
