"""Reasoning in rows, under the base model's chat template: what it leaves out, and answers that begin in two ways after one prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from engine.data.blocks.block_result import BlockResult, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check
from engine.data.tokens.assistant_turns import reasoning_of
from engine.data.tokens.reasoning_probe import Reasoning, TemplateOpenings


class ReasoningInRows(Check):
    name = "reasoning"
    order = 31

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Counts rows with reasoning and how their answers begin; keeps all."""
        result.totals["reasoning"] += sum(any(map(reasoning_of, row.example.all_messages())) for row in rows)
        result.totals["rows_with_reasoning_left_out"] += sum(row.reasoning_left_out > 0 for row in rows)
        result.totals["reasoning_left_out"] += sum(row.reasoning_left_out for row in rows)
        if (template := self._template) is not None:
            result.tallies[self.name] = openings = TemplateOpenings()
            for row in rows:
                openings.add(template.opening(row.example))
        return rows

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - no row is flagged
        template = self._template
        found = {
            "rows": total.totals["reasoning"],
            "left_out_turns": total.totals["reasoning_left_out"],
            "template": None if template is None else asdict(template.facts),
            "openings": self._openings(total).listed(),
        }
        return {self.name: found}

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        if (count := total.totals["reasoning"]) and self.setup.tokenizer is None:
            message = f"{count} rows hold reasoning, which some chat templates leave out; name the base model (--model) to check the rows"
            yield "reasoning_not_checked", f"{message} with its template"
        if count := total.totals["rows_with_reasoning_left_out"]:
            message = (
                f"{total.totals['reasoning_left_out']} assistant turns without loss in {count} rows hold reasoning that the base model's "
                "chat template leaves out, as it does at inference; to train it, add a row for each turn that ends with it"
            )
            yield "reasoning_left_out", message
        template = self._template
        yield from self._openings(total).warnings(None if template is None else template.facts.switch)

    @property
    def _template(self) -> Reasoning | None:
        """The base model's, if it has a chat template."""
        return None if self.setup.tokenizer is None else self.setup.tokenizer.reasoning

    def _openings(self, total: BlockResult) -> TemplateOpenings:
        found = total.tallies.get(self.name, TemplateOpenings())
        assert isinstance(found, TemplateOpenings)
        return found


CHECK = ReasoningInRows
