"""The check for personal data and secrets: searches every text of a row, and redacts or refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from engine.data.blocks.block_result import BlockResult, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, Option
from engine.data.checks.pii.scanner import Match, PiiScanner, redact
from engine.data.schema import Example, Message

SEPARATOR = "\n\0\n"
"""Separates the texts of a row: no text contains NUL, so no match extends from one text into the next."""
GROUPS = ("messages", "chosen", "rejected")
"""Fields of an example that hold messages."""
FOUND = Finding(
    "personal_data",
    "a row that holds personal data",
    message="holds personal data or a secret: {kinds}",
    fix="remove it, or choose the policy pii=redact",
)
ROWS, OF_KIND = "personal_data", "personal_data."
"""Totals: rows, and rows by kind."""


class PersonalData(Check):
    name = "pii"
    options = (
        Option(
            "pii",
            ("off", "warn", "redact", "reject"),
            help="e-mail, phone, card, IBAN, US SSN, IP address, API key, private key",
            in_every_id=True,
        ),
    )
    findings = (FOUND,)
    order = 20

    @cached_property
    def _scanner(self) -> PiiScanner:
        return PiiScanner()

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Scans each row as one text, then searches exactly in the texts of the few that may match."""
        suspects = self._scanner.suspects([_one_text(row.example) for row in rows])
        refused = {index for index in suspects if not self._passes(rows[index], result)}
        return [row for index, row in enumerate(rows) if index not in refused] if refused else rows

    def _passes(self, row: ReadRow, result: BlockResult) -> bool:
        """Returns whether the row is kept; redacts it if the policy says so."""
        paths, texts = zip(*_texts(row.example), strict=True)
        matches = self._scanner.scan(texts)
        kinds = sorted({m.kind for group in matches for m in group})
        if not kinds:
            return True
        result.totals.update([ROWS, *(f"{OF_KIND}{kind}" for kind in kinds)])
        if self.action == "reject":
            path = next(path for path, found in zip(paths, matches, strict=True) if found)
            result.refuse(row, [FOUND.problem(path=path, kinds=", ".join(kinds))])
            return False
        if self.action == "redact":
            row.example = _redacted(row.example, texts, matches)
        return True

    def stats(self, total: BlockResult, decision: Decision) -> Mapping[str, Any]:  # noqa: ARG002 - no row is flagged
        return {"personal_data": {"rows": total.totals[ROWS], "kinds": _kinds(total)}}

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        if (count := total.totals[ROWS]) and self.action in ("warn", "redact"):
            kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(_kinds(total).items(), key=lambda item: -item[1]))
            advice = "choose the policy pii=redact or pii=reject, or make sure that you may"
            done = "it was replaced" if self.action == "redact" else advice
            yield "personal_data", f"{count} rows hold personal data or secrets ({kinds}); {done}"


CHECK = PersonalData


def _kinds(total: BlockResult) -> dict[str, int]:
    """Returns the rows by kind."""
    return {name.removeprefix(OF_KIND): count for name, count in total.totals.items() if name.startswith(OF_KIND)}


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
