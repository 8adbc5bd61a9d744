"""Keeps control tokens inside content from becoming real: a placeholder replaces each until the template is rendered.

A placeholder is one private-use character, so that no template treats it differently from other text. In the rendered text the token is
restored and its segment is tokenized by a tokenizer without control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from core.errors import InvalidDataset
from engine.data.schema import Example

FIRST = 0xF0000
"""First of the 65,534 private-use characters of plane 15."""
PLACEHOLDERS = re.compile("[\U000f0000-\U000ffffd]")

NO_ESCAPES: Mapping[str, str] = MappingProxyType({})


def spell_out(text: str, spelled: Mapping[str, str]) -> str:
    """Returns `text` with its placeholders replaced by their control tokens."""
    for placeholder, token in spelled.items():
        text = text.replace(placeholder, token)
    return text


def placeholders_kept(example: Example, text: str) -> bool:
    """Returns whether the rendered `text` has every placeholder of `example`: a template that drops or rewrites one breaks the escape."""
    written = json.dumps(msgspec.to_builtins(example), ensure_ascii=False)
    return len(PLACEHOLDERS.findall(text)) >= len(PLACEHOLDERS.findall(written))


class Escapes:
    """Placeholders of the control tokens of one tokenizer."""

    def __init__(self, tokens: Iterable[str], pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._of = {token: chr(FIRST + index) for index, token in enumerate(sorted(tokens))}

    def escape(self, example: Example) -> tuple[Example, dict[str, str]]:
        """Returns `example` with placeholders in all of its texts, and the tokens that they stand for."""
        used: dict[str, str] = {}
        escaped = self._walk(msgspec.to_builtins(example), used)
        return msgspec.convert(escaped, Example), used

    def _walk(self, value: Any, used: dict[str, str]) -> Any:
        if isinstance(value, str):
            if found := PLACEHOLDERS.search(value):
                message = f"holds a control token and U+{ord(found.group()):X}, with which it would be escaped; remove one"
                raise InvalidDataset(message, code="control_token_in_content")
            return self._pattern.sub(lambda m: self._mark(m.group(), used), value)
        if isinstance(value, dict):
            return {self._walk(k, used): self._walk(v, used) for k, v in value.items()}
        return [self._walk(v, used) for v in value] if isinstance(value, list | tuple) else value

    def _mark(self, token: str, used: dict[str, str]) -> str:
        used[self._of[token]] = token
        return self._of[token]
