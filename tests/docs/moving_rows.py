"""The rows of docs/moving.md, and files made of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from ft_client.demo.tickets import make_dataset
from tests.docs.pages import ROOT, blocks

PATH = ROOT / "docs/moving.md"
PAGE = PATH.read_text()
TEXTS = ("content", "value", "prompt", "completion", "chosen", "rejected", "instruction", "input", "output")
"""Fields whose text makes a row differ from the next one."""


def _rows() -> dict[tuple[str, int], dict[str, Any]]:
    """By who writes them ("OpenAI") and their number in that section."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    seen: Counter[str] = Counter()
    for block in blocks(PATH):
        before = "\n".join(PAGE.splitlines()[: block.line])
        who = re.findall(r"^## From (\S+)$", before, flags=re.MULTILINE)[-1]
        found[who, seen[who]] = json.loads(block.text)
        seen[who] += 1
    return found


ROWS = _rows()


def many(row: dict[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """`row` again and again, every text of it followed by a ticket of the demo."""
    tickets, _ = make_dataset(num_train=num_rows, num_holdout=1)
    return [_with(row, f" {ticket.text}") for ticket in tickets]


def _with(value: Any, text: str, name: str = "") -> Any:
    if isinstance(value, dict):
        called = value.get("from") in ("function_call", "observation")
        return {k: v if called else _with(v, text, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_with(v, text, name) for v in value]
    return value + text if isinstance(value, str) and name in TEXTS else value
