"""Counts rows that offer tools, call them and have results, for base models that are chosen later.

With a base model, ``token_limit`` refuses rows of which its template leaves such parts out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from engine.data.blocks.block_result import BlockResult, NotedRows, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check
from engine.data.schema import Example
from engine.data.tokens.tool_probe import PARTS, TOOLS_FIX, TemplateTools

USES: Mapping[str, tuple[str, Callable[[Example], bool]]] = {
    "definitions": (PARTS["tools"], lambda example: bool(example.tools)),
    "calls": ("the tool calls", lambda example: any(m.tool_calls for m in example.all_messages())),
    "results": (PARTS["results"], lambda example: any(m.role == "tool" for m in example.all_messages())),
}
"""By field of :class:`TemplateTools`: the part of a row that it is about, in words, and whether a row has it."""


class ToolUsage(Check):
    name = "tools"
    order = 33

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Counts; keeps all."""
        for row in (row for row in rows if row.example.uses_tools()):
            for use, (_, has) in USES.items():
                if has(row.example):
                    result.note(f"{self.name}.{use}", row.number)
        return rows

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - no row is flagged
        template = None if self.setup.tokenizer is None else self.setup.tokenizer.tools
        counted = {use: asdict(self._rows(total, use)) for use in USES}
        return {self.name: {**counted, "template": None if template is None else asdict(template)}}

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        offered, called, told = (self._rows(total, use).count for use in USES)
        if self.setup.tokenizer is None and (offered or called or told):
            message = (
                f"{offered} rows offer tools, {called} call them and {told} have results, which some chat templates leave out; name the "
                "base model (--model) to check the rows with its template"
            )
            yield "tools_not_checked", message

    def _rows(self, total: BlockResult, use: str) -> NotedRows:
        return total.noted.get(f"{self.name}.{use}", NotedRows())


CHECK = ToolUsage


def tools_problem(stats: Mapping[str, Any] | None, template: TemplateTools | None) -> str | None:
    """Returns why rows with a report's `stats` cannot be trained with a template, None if they can or the report does not count tools."""
    counted = (stats or {}).get(ToolUsage.name)
    if not counted or template is None:
        return None
    for use, (what, _) in USES.items():
        rows = NotedRows(**counted[use])
        if rows.count and getattr(template, use) is False:
            return f"the base model's chat template leaves out {what} of {rows.words()}; {TOOLS_FIX}"
    return None
