"""Row checks that need more than the row: the base model's tokenizer, patterns of personal data, a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ft_assets.datasets.checks import content
from ft_assets.datasets.checks.pii import Match, PiiScanner, redact
from ft_assets.datasets.checks.toxicity import load_classifier
from ft_assets.datasets.dedup.normalization import near_text
from ft_assets.datasets.pipeline.block_reader import ReadRow, report_bad
from ft_assets.datasets.pipeline.block_result import BlockResult
from ft_assets.datasets.pipeline.options import BlockOptions
from ft_assets.datasets.report.problems import Problem
from ft_assets.datasets.schema import Example, Message
from ft_assets.datasets.tokens.assistant_turns import reasoning_of
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from ft_assets.datasets.tokens.encoders import PREFIX_CHARS
from ft_assets.errors import InvalidRequest

SEPARATOR = "\n\0\n"
"""Separates the texts of a row: no text contains NUL, so no match extends from one text into the next."""
FIXES = {
    "template_refused": "order or join the messages as the chat template wants them, remove the row, or choose another base model",
    "reasoning_not_rendered": "remove the reasoning from the row, or choose a base model whose chat template renders it",
}
"""Policy for a row that the base model's chat template refuses."""
GROUPS = ("messages", "chosen", "rejected")
"""Fields of an example that hold messages."""


class Screen:
    """The screens required by the policies, loaded once."""

    def __init__(self, options: BlockOptions) -> None:
        self._policies = options.policies
        self._max_seq_len = options.max_seq_len
        self._tokenizer = ChatTokenizer.load(options.model_dir) if options.model_dir is not None else None
        self._pattern = content.SUSPECT if self._tokenizer is None else self._tokenizer.control_token_pattern
        self._gate = tuple(sorted({t[0] for t in self._tokenizer.control_tokens if t})) if self._tokenizer is not None else ("<",)
        self._scanner = PiiScanner() if options.policies.pii != "off" else None
        self._classifier = load_classifier(options.classifier) if options.policies.toxicity != "off" else None

    def apply(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Returns the rows that pass, redacted if the policy says so, with their token counts and scores."""
        rows = [row for row in rows if self._control_tokens_pass(row, result)]
        if self._scanner is not None:
            rows = self._without_personal_data(rows, result)
        if self._tokenizer is not None:
            rows = self._counted(rows, result)
        else:
            result.totals["consecutive_turns"] += sum(content.has_consecutive_turns(row.example) for row in rows)
            result.totals["reasoning"] += sum(any(map(reasoning_of, row.example.all_messages())) for row in rows)
        if self._classifier is not None and rows:
            for row, score in zip(rows, self._classifier.scores([near_text(r.example) for r in rows]), strict=True):
                row.toxicity = float(score)
        return rows

    def _control_tokens_pass(self, row: ReadRow, result: BlockResult) -> bool:
        if not self._may_hold_control_token(row.example) or content.first_match(row.example, self._pattern) is None:
            return True
        if self._tokenizer is None:
            result.totals["suspect"] += 1
            return True
        policy = self._policies.control_tokens
        if policy == "reject":
            report_bad(row, list(content.control_token_problems(row.example, self._pattern)), result)
            return False
        result.totals["control_tokens_dropped" if policy == "drop" else "control_tokens_escaped"] += 1
        return policy == "escape"

    def _may_hold_control_token(self, example: Example) -> bool:
        """Returns False for plain texts without the first character of any control token, which saves the search."""
        if example.kind != "chat" or example.tools:
            return True
        for message in example.messages:
            text = message.content
            if message.tool_calls or message.name is not None or message.tool_call_id is not None or message.reasoning is not None:
                return True
            if text is not None and any(first in text for first in self._gate):
                return True
        return False

    def _without_personal_data(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """First scans each row as one text, then searches exactly in the texts of the few that may match."""
        if self._scanner is None:
            raise AssertionError("asked for only where there is a scanner")
        suspects = self._scanner.suspects([_one_text(row.example) for row in rows])
        refused = [index for index in suspects if not self._cleared(rows[index], result)]
        return [row for index, row in enumerate(rows) if index not in set(refused)] if refused else rows

    def _cleared(self, row: ReadRow, result: BlockResult) -> bool:
        """Returns whether the row is kept; redacts it if the policy says so."""
        paths, texts = zip(*_texts(row.example), strict=True)
        matches = self._scanner.scan(texts) if self._scanner is not None else []
        kinds = sorted({m.kind for group in matches for m in group})
        if not kinds:
            return True
        result.personal.update(kinds)
        result.totals["personal_data"] += 1
        if self._policies.pii == "reject":
            report_bad(row, [_personal_problem(paths, matches, kinds)], result)
            return False
        if self._policies.pii == "redact":
            row.example = _redacted(row.example, texts, matches)
            result.totals["redacted"] += 1
        return True

    def _counted(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        if self._tokenizer is None or self._max_seq_len is None:
            return rows
        out = []
        if self._policies.over_long != "truncate":  # rows that cannot fit need not be counted exactly
            rows = [row for row in rows if self._may_fit(row, self._tokenizer.fewest_tokens(row.example), self._max_seq_len, result)]
        escape = self._policies.control_tokens == "escape"
        measured = self._tokenizer.measure_batch([r.example for r in rows], escape_control_tokens=escape, most=self._max_seq_len)
        for row, num_tokens, untrained in zip(rows, *(m.tolist() for m in measured), strict=True):
            if num_tokens < 0 and (problem := _why_uncounted(self._tokenizer, row.example, escape)) is not None:
                report_bad(row, [problem], result)
                continue
            row.num_tokens, row.untrained_turns = num_tokens, untrained
            if num_tokens > self._max_seq_len:
                result.totals["over_long"] += 1
                if self._policies.over_long == "reject":
                    at_least = row.example.num_characters() > PREFIX_CHARS * self._max_seq_len
                    report_bad(row, [content.length_problem(num_tokens, self._max_seq_len, at_least=at_least)], result)
                if self._policies.over_long != "truncate":
                    continue
            _count_untrained(row, result)
            out.append(row)
        return out

    def _may_fit(self, row: ReadRow, fewest_tokens: int, max_seq_len: int, result: BlockResult) -> bool:
        if fewest_tokens <= max_seq_len:
            return True
        result.totals["over_long"] += 1
        if self._policies.over_long == "reject":
            report_bad(row, [content.length_problem(fewest_tokens, max_seq_len, at_least=True)], result)
        return False


def _count_untrained(row: ReadRow, result: BlockResult) -> None:
    if row.untrained_turns:
        result.totals["rows_with_untrained_turns"] += 1
        result.totals["untrained_turns"] += row.untrained_turns
        trained = sum(m.weight for m in row.example.messages if m.role == "assistant")
        result.totals["rows_without_loss"] += row.example.kind == "chat" and row.untrained_turns == trained


def _why_uncounted(tokenizer: ChatTokenizer, example: Example, escape: bool) -> Problem | None:
    try:
        tokenizer.count_tokens(example, escape_control_tokens=escape, most=0)
    except InvalidRequest as error:
        fix = FIXES.get(error.code, "change the row so that the model's chat template takes it")
        return Problem(path="", code=error.code, message=error.message, fix=fix)
    return None


def _texts(example: Example) -> list[tuple[str, str]]:
    """Yields (path, text) of everything that may contain personal data, in the order in which :func:`_redacted` replaces it."""
    out: list[tuple[str, str]] = []
    for name in GROUPS if example.kind == "preference" else GROUPS[:1]:
        for index, message in enumerate(getattr(example, name)):
            for field in ("content", "reasoning"):
                if (text := getattr(message, field)) is not None:
                    out.append((f"{name}[{index}].{field}", text))
            for number, call in enumerate(message.tool_calls):
                out += [(f"{name}[{index}].tool_calls[{number}].arguments", text) for text in _strings(call.arguments)]
    if example.text is not None:
        out.append(("text", example.text))
    return out


def _one_text(example: Example) -> str:
    """Returns all of :func:`_texts` as one text."""
    parts = []
    for message in example.messages:
        if message.tool_calls or message.reasoning is not None:
            break
        parts.append(message.content or "")
    else:
        if example.kind != "preference" and example.text is None:
            return SEPARATOR.join(parts)
    return SEPARATOR.join([text for _, text in _texts(example)])


def _personal_problem(paths: Sequence[str], matches: Sequence[Sequence[Match]], kinds: Sequence[str]) -> Problem:
    path = next(path for path, found in zip(paths, matches, strict=True) if found)
    message = f"holds personal data or a secret: {', '.join(kinds)}"
    return Problem(path=path, code="personal_data", message=message, fix="remove it, or choose the policy pii=redact")


def _redacted(example: Example, texts: Sequence[str], matches: Sequence[Sequence[Match]]) -> Example:
    clean = iter([redact(text, found) if found else text for text, found in zip(texts, matches, strict=True)])

    def one(message: Message) -> Message:
        replaced = {f: next(clean) for f in ("content", "reasoning") if getattr(message, f) is not None}
        calls = tuple(msgspec.structs.replace(c, arguments=_with_strings(c.arguments, clean)) for c in message.tool_calls)
        return msgspec.structs.replace(message, **replaced, tool_calls=calls)

    replaced = {name: tuple(one(m) for m in getattr(example, name)) for name in GROUPS}
    return msgspec.structs.replace(example, **replaced, text=next(clean) if example.text is not None else None)


def _strings(value: Any) -> Iterator[str]:
    """Yields every text inside JSON, depth first; keys are names, not data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _with_strings(value: Any, texts: Iterator[str]) -> Any:
    """Returns `value` with its texts replaced by `texts`, in the order of :func:`_strings`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {key: _with_strings(item, texts) for key, item in value.items()}
    return [_with_strings(item, texts) for item in value] if isinstance(value, list) else value
