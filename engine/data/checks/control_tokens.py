"""Control tokens of the base model inside content: they would be tokenized as real ones and could end or forge a turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from engine.data.blocks.block_result import BlockResult, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, Option
from engine.data.schema import Example
from engine.data.tokens.control_token_search import CODE, FIX, MESSAGE, control_token_problems, first_match

SUSPECT = re.compile(r"<\|[A-Za-z0-9_]{2,40}\|>")
"""Text that looks like a control token: a warning while the base model is unknown."""
FOUND = Finding(CODE, "a control token of the tokenizer inside content, where it would become a real one", message=MESSAGE, fix=FIX)


class ControlTokens(Check):
    name = "control_tokens"
    options = (
        Option(
            "control_tokens",
            ("reject", "drop", "escape"),
            help="text inside content that the model reads as a control token, such as the end of a turn; "
            "checked once the base model is known",
            in_every_id=True,
        ),
    )
    findings = (FOUND,)
    order = 10

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return SUSPECT if self.setup.tokenizer is None else self.setup.tokenizer.control_token_pattern

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        """First characters of all control tokens."""
        tokenizer = self.setup.tokenizer
        return ("<",) if tokenizer is None else tuple(sorted({token[0] for token in tokenizer.control_tokens if token}))

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        return [row for row in rows if self._passes(row, result)]

    def _passes(self, row: ReadRow, result: BlockResult) -> bool:
        if not self._may_hold_any(row.example) or first_match(row.example, self._pattern) is None:
            return True
        if self.setup.tokenizer is None:
            result.totals["suspect"] += 1
            return True
        if self.action == "reject":
            result.refuse(row, control_token_problems(row.example, self._pattern))
            return False
        result.totals["control_tokens_dropped" if self.action == "drop" else "control_tokens_escaped"] += 1
        return self.action == "escape"

    def _may_hold_any(self, example: Example) -> bool:
        """Returns False for plain texts without the first character of any control token, which saves the search."""
        if example.kind != "chat" or example.tools:
            return True
        for message in example.messages:
            text = message.content
            if message.tool_calls or message.name is not None or message.tool_call_id is not None or message.reasoning is not None:
                return True
            if text is not None and any(first in text for first in self._openings):
                return True
        return False

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        if count := total.totals["suspect"]:
            message = f"{count} rows hold text like '<|...|>'; rows with a control token of the base model are refused"
            yield "possible_control_token", message
        for done in ("dropped", "escaped"):
            if count := total.totals[f"control_tokens_{done}"]:
                yield f"control_tokens_{done}", f"{count} rows hold a control token of the base model inside content and were {done}"


CHECK = ControlTokens
