"""Tokens of each row under the base model's tokenizer and chat template: too long, refused by the template, turns without loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from core.errors import InvalidRequest
from engine.data.blocks.block_result import BlockResult, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, Option
from engine.data.checks.turn_order import has_consecutive_turns
from engine.data.problems import Problem
from engine.data.schema import Example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.encoders import PREFIX_CHARS
from engine.data.tokens.tool_probe import TOOLS_FIX

TOO_LONG = Finding(
    "example_too_long",
    "more tokens than max_seq_len",
    message="{at_least}{num_tokens} tokens, over max_seq_len {max_seq_len}",
    fix="shorten it, raise max_seq_len, or choose the policy 'truncate'",
)
REORDER = "order or join the messages as the chat template wants them, remove the row, or choose another base model"
OMIT_REASONING = (
    "remove the reasoning, choose a base model whose chat template renders it, or write it into the content as <think>...</think>, if "
    "stats.reasoning.template.in_content is true and the model shall show it"
)
TEMPLATE_FIX = "change the row so that the model's chat template takes it"
OMIT_CONTENT = "remove the content beside the tool calls, or choose a base model whose chat template renders it"
OF_TEMPLATE = (
    Finding("template_refused", "a conversation that the base model's chat template refuses", fix=REORDER),
    Finding("template_unstable", "a conversation whose turns the template rewrites, so that no loss mask can be made", fix=TEMPLATE_FIX),
    Finding("reasoning_not_rendered", "reasoning in an answer, which the base model's chat template leaves out", fix=OMIT_REASONING),
    Finding("tools_not_rendered", "tools, calls or results, which the base model's chat template leaves out", fix=TOOLS_FIX),
    Finding("answer_not_rendered", "an answer whose content the base model's chat template leaves out", fix=OMIT_CONTENT),
    Finding("no_chat_template", "a conversation for a base model that has no chat template", fix=TEMPLATE_FIX),
)


class TokenLimit(Check):
    name = "over_long"
    options = (Option("over_long", ("truncate", "drop", "reject"), help="rows with more tokens than `max_seq_len`", in_every_id=True),)
    findings = (TOO_LONG, *OF_TEMPLATE)
    order = 30

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Counts the tokens of each row; without a base model, what its template might refuse."""

        if self.setup.tokenizer is None:
            result.totals["consecutive_turns"] += sum(has_consecutive_turns(row.example) for row in rows)
            return rows
        if self.setup.options.max_seq_len is None:
            return rows
        return self._counted(rows, self.setup.tokenizer, self.setup.options.max_seq_len, result)

    def _counted(self, rows: list[ReadRow], tokenizer: ChatTokenizer, max_seq_len: int, result: BlockResult) -> list[ReadRow]:

        out = []
        if self.action != "truncate":  # rows that cannot fit need not be counted exactly
            rows = [row for row in rows if self._may_fit(row, tokenizer.fewest_tokens(row.example), max_seq_len, result)]
        escape = self.policies.options["control_tokens"] == "escape"
        measured = tokenizer.measure_batch([row.example for row in rows], escape_control_tokens=escape, most=max_seq_len)
        counts = (measured.num_tokens, measured.untrained_turns, measured.left_out)
        for row, num_tokens, untrained, left_out in zip(rows, *(m.tolist() for m in counts), strict=True):
            if num_tokens < 0 and (problem := _why_uncounted(tokenizer, row.example, escape)) is not None:
                result.refuse(row, [problem])
                continue
            row.num_tokens, row.untrained_turns, row.reasoning_left_out = num_tokens, untrained, left_out
            if num_tokens > max_seq_len:
                at_least = row.example.num_characters() > PREFIX_CHARS * max_seq_len
                if not self._over_long(row, num_tokens, max_seq_len, result, at_least=at_least):
                    continue
                if _is_cut_off(tokenizer, row.example, max_seq_len, escape):
                    result.note("answer_cut_off", row.number)
            _count_untrained(row, result)
            out.append(row)
        return out

    def _may_fit(self, row: ReadRow, fewest_tokens: int, max_seq_len: int, result: BlockResult) -> bool:
        if fewest_tokens <= max_seq_len:
            return True
        return self._over_long(row, fewest_tokens, max_seq_len, result, at_least=True)

    def _over_long(self, row: ReadRow, num_tokens: int, max_seq_len: int, result: BlockResult, *, at_least: bool) -> bool:
        """Counts a row over the limit; returns whether it is kept, to be truncated."""
        result.totals["over_long"] += 1
        if self.action == "reject":
            spelled = "at least " if at_least else ""
            result.refuse(row, [TOO_LONG.problem(at_least=spelled, num_tokens=num_tokens, max_seq_len=max_seq_len)])
        return self.action == "truncate"

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - no row is flagged
        untrained = total.totals["untrained_turns"] if self.setup.options.max_seq_len is not None else None
        cut_off = total.noted["answer_cut_off"].count if "answer_cut_off" in total.noted else 0
        return {"over_long": total.totals["over_long"], "answer_cut_off": cut_off, "untrained_turns": untrained}

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        totals = total.totals
        if totals["over_long"] and self.action != "reject":
            done = "will be cut" if self.action == "truncate" else "left out"
            limit = self.setup.options.max_seq_len
            examples = "1 example is" if totals["over_long"] == 1 else f"{totals['over_long']} examples are"
            yield "truncated_examples", f"{examples} over {limit} tokens and {done}"
        if (noted := total.noted.get("answer_cut_off")) is not None:
            limit = self.setup.options.max_seq_len
            message = f"max_seq_len {limit} cuts off the whole answer of {noted.words()}, which are left out unless prompts are trained too"
            yield "answer_cut_off", f"{message}; raise max_seq_len, or shorten the prompts"
        if count := totals["consecutive_turns"]:
            message = f"{count} rows hold two user or two assistant messages in a row, which some chat templates refuse"
            yield "consecutive_turns", f"{message}; join them, or name the base model (--model) to check the rows with its template"
        if count := totals["rows_with_untrained_turns"]:
            message = (
                f"{totals['untrained_turns']} earlier assistant turns in {count} rows carry no loss: the base model's chat template writes "
                "them differently once more messages follow, and the model would learn two openings for one prompt"
            )
            if totals["rows_without_loss"]:
                message += f"; {totals['rows_without_loss']} of these rows have no other turn of weight 1 and are left out of training"
            yield "turns_without_loss", f"{message}; to train them too, add a row for each that ends with it"


CHECK = TokenLimit


def _count_untrained(row: ReadRow, result: BlockResult) -> None:
    if row.untrained_turns:
        result.totals["rows_with_untrained_turns"] += 1
        result.totals["untrained_turns"] += row.untrained_turns
        trained = sum(m.weight for m in row.example.messages if m.role == "assistant")
        result.totals["rows_without_loss"] += row.example.kind == "chat" and row.untrained_turns == trained


def _is_cut_off(tokenizer: ChatTokenizer, example: Example, max_seq_len: int, escape: bool) -> bool:
    """Returns whether truncation leaves nothing to train, in one of the answers of a preference."""
    kwargs: Mapping[str, Any] = {"max_seq_len": max_seq_len, "escape_control_tokens": escape}
    if example.kind == "preference":
        return any(side.is_cut_off for side in tokenizer.encode_preference(example, **kwargs))
    return (
        tokenizer.encode_judged_batch([example], **kwargs)[0] if example.kind == "kto" else tokenizer.encode(example, **kwargs)
    ).is_cut_off


def _why_uncounted(tokenizer: ChatTokenizer, example: Example, escape: bool) -> Problem | None:
    try:
        tokenizer.count_tokens(example, escape_control_tokens=escape, most=0)
    except InvalidRequest as error:
        fix = next((finding.fix for finding in OF_TEMPLATE if finding.code == error.code), TEMPLATE_FIX)
        return Problem(error.code, error.message, fix=fix)
    return None
