"""Suites: the items that base and adapter answer, and the digest under which a base model's answers are kept.

A suite digest covers the items and everything that shapes an answer to them, so a cached score is either exactly
right or not found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_assets.evals import golden, metrics

Message = Mapping[str, Any]

PROTOCOL = 2
"""Raised whenever rendering, decoding or scoring changes meaning: older cached answers are then not found."""
SHORT_ANSWER_WORDS = 8
"""An expected answer of at most this many words can be asked for to the letter (a label, a number, a name)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    id: str
    messages: tuple[Message, ...]
    """The prompt: every turn before the answer."""
    expected: str | None
    """The answer wanted; None where any coherent one will do."""

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "messages": [dict(m) for m in self.messages], "expected": self.expected}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Item:
        expected = data.get("expected")
        return cls(id=str(data["id"]), messages=tuple(data["messages"]), expected=None if expected is None else str(expected))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Greedy decoding: no temperature and no seed, the same answer on every run."""

    max_new_tokens: int = 256
    """Most tokens of an answer to a holdout item; lowered to what the longest expected answer needs."""
    golden_max_new_tokens: int = 64
    """Most tokens of an answer to a golden prompt: enough to see a loop."""


def golden_items() -> list[Item]:
    return [Item(id=id_, messages=({"role": "user", "content": text},), expected=None) for id_, text in golden.prompts()]


def holdout_items(rows: Iterable[Mapping[str, Any]], *, limit: int = 200) -> list[Item]:
    """Items from validation rows: the turns before the last assistant turn, and that turn's text.

    Rows without a textual answer (continued pre-training, tool calls, preferences) give none. Above `limit` the choice
    is by a hash of the item, so it does not depend on the order of rows and stays when rows are added.
    """
    items = {item.id: item for item in map(_item, rows) if item is not None}
    return sorted(items.values(), key=lambda item: item.id)[:limit]


def _item(row: Mapping[str, Any]) -> Item | None:
    if row.get("messages"):
        messages = list(row["messages"])
    elif row.get("prompt") and row.get("completion") and not row.get("rejected"):
        messages = [*_turns(row["prompt"], "user"), *_turns(row["completion"], "assistant")]
    else:
        return None
    answer = messages[-1]
    if len(messages) < 2 or answer.get("role") != "assistant" or not isinstance(answer.get("content"), str) or answer.get("tool_calls"):
        return None
    prompt = tuple(messages[:-1])
    digest = _sha256({"messages": prompt, "expected": answer["content"]})
    return Item(id=f"item-{digest[:16]}", messages=prompt, expected=answer["content"])


def _turns(value: str | Sequence[Message], role: str) -> Sequence[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def write_items(items: Iterable[Item], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item.to_dict(), ensure_ascii=False) + "\n" for item in items), encoding="utf-8")


def read_items(path: Path) -> list[Item]:
    with path.open(encoding="utf-8") as lines:
        return [Item.from_dict(json.loads(line)) for line in lines if line.strip()]


def is_literal(items: Sequence[Item]) -> bool:
    """Whether most expected answers can be asked for to the letter: JSON, or a few words.

    If not, an exact match says nothing about free text and the task is measured by perplexity.
    """
    answers = [item.expected for item in items if item.expected is not None]
    literal = sum(len(a.split()) <= SHORT_ANSWER_WORDS or metrics.json_valid(a) == 1.0 for a in answers)
    return bool(answers) and 2 * literal > len(answers)


def suite_digest(holdout: Sequence[Item], *, with_golden: bool, decoding: Decoding, validation_sha256: str | None, max_items: int) -> str:
    """Digest of everything that shapes the scores but the model: items, decoding, validation windows, protocol."""
    body = {
        "protocol": PROTOCOL,
        "holdout": [item.to_dict() for item in holdout],
        "golden": [item.to_dict() for item in golden_items()] if with_golden else None,
        "decoding": [decoding.max_new_tokens, decoding.golden_max_new_tokens],
        "validation": validation_sha256,
        "max_items": max_items,
    }
    return _sha256(body)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
