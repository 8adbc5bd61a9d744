"""The first examples exactly as trained: text, ids, tokens with loss, truncated parts.

Uses the same encoding as packs; a preference is shown as its two sides, and a judged answer with its label.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidRequest
from core.storable_text import num_characters
from engine.data.schema import Example
from engine.data.tokens.answer_sides import judged_answer, preference_sides
from engine.data.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
from engine.data.tokens.loss_mask import IGNORE, TrainOnInputs
from engine.data.tokens.templates import Span

Side = Literal["chosen", "rejected", "good", "bad"]
MAX_CHARS = 1_000_000
"""Most characters of an example, over all fields: rendering and tokenizing may take seconds per million characters."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters with which content could control a terminal or reorder its lines; line feed and tab stay."""
TRAINED, REASONING, CUT, PLAIN = "\x1b[32m", "\x1b[3m", "\x1b[2m", "\x1b[0m"
"""Green, italic, faint and reset."""
WITHOUT_LOSS = {
    "weight_0": "weight 0, or part of a prompt",
    "rewritten_in_history": "the chat template writes it differently once more messages follow",
}
"""Why a turn carries no loss, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    start: int
    """First token."""
    end: int
    """First token after it."""
    start_char: int
    """Range of characters in the preview's text."""
    end_char: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    row: int
    kind: str
    side: Side | None
    """Side of a preference; for a judged answer, its label."""
    text: str
    """As rendered by the template, before truncation."""
    input_ids: list[int]
    loss_spans: tuple[TokenSpan, ...]
    """Tokens with loss."""
    reasoning_spans: tuple[TokenSpan, ...]
    """Tokens of the answers' reasoning, with or without loss; without the marks around it. A token at an edge belongs to it."""
    num_tokens: int
    """Number of tokens before truncation."""
    num_trained_tokens: int
    num_reasoning_tokens: int
    """Number of tokens in `reasoning_spans`."""
    truncated: bool
    turns: list[str]
    """For each assistant turn: ``loss``, or why it carries none, ``weight_0`` or ``rewritten_in_history``."""
    kept_chars: int
    """Characters of the text that the ids cover; fewer than its length if truncated."""


def preview(
    examples: Iterable[Example],
    tokenizer: ChatTokenizer,
    *,
    max_seq_len: int,
    num_examples: int = 5,
    train_on_inputs: TrainOnInputs = False,
    escape_control_tokens: bool = False,
) -> list[Preview]:
    """Returns the first `num_examples` of `examples` as trained, a preference as two."""
    out: list[Preview] = []
    for example in itertools.islice(examples, num_examples):
        _refuse_huge(example)
        if example.kind == "preference":
            sides = tokenizer.encode_preference(example, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
            shown = zip(preference_sides(example), sides, ("chosen", "rejected"), strict=True)
            out += (_preview(example, one, encoded, tokenizer, side) for one, encoded, side in shown)
        elif example.kind == "kto":
            (encoded,) = tokenizer.encode_judged_batch([example], max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
            out.append(_preview(example, judged_answer(example), encoded, tokenizer, "good" if example.label else "bad"))
        else:
            encoded = tokenizer.encode(
                example, max_seq_len=max_seq_len, train_on_inputs=train_on_inputs, escape_control_tokens=escape_control_tokens
            )
            out.append(_preview(example, example, encoded, tokenizer, None))
    return out


def _refuse_huge(example: Example) -> None:
    num_chars = num_characters(msgspec.to_builtins(example))
    if num_chars > MAX_CHARS:
        raise InvalidRequest(
            f"row {example.row} has {num_chars} characters, over the {MAX_CHARS} that a preview shows; split the row",
            code="example_too_long",
        )


def _preview(example: Example, shown: Example, encoded: TokenizedExample, tokenizer: ChatTokenizer, side: Any) -> Preview:
    """Returns the preview of `shown`, which is `example` or one side of it."""
    ids = encoded.input_ids.tolist()
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.labels != IGNORE, [0])).astype(np.int8))).reshape(-1, 2).tolist()
    offsets = tokenizer.offsets(encoded)
    spans: list[TokenSpan] = []
    for start, end in edges:
        said = tokenizer.decode(ids[start:end])
        first = _place(encoded.text, said, int(offsets[start, 0]), spans[-1].end_char if spans else 0)
        spans.append(TokenSpan(start=start, end=end, start_char=first, end_char=min(first + len(said), len(encoded.text)), text=said))
    reasoning = list(_reasoning_spans(encoded.text, tokenizer.reasoning_spans(shown), offsets))
    kept = len(tokenizer.decode(ids)) if encoded.truncated else len(encoded.text)
    return Preview(
        row=example.row,
        kind=example.kind,
        side=side,
        text=encoded.text,
        input_ids=ids,
        loss_spans=tuple(spans),
        reasoning_spans=tuple(reasoning),
        num_tokens=encoded.num_tokens,
        num_trained_tokens=encoded.num_trained_tokens,
        num_reasoning_tokens=sum(span.end - span.start for span in reasoning),
        truncated=encoded.truncated,
        turns=list(encoded.turns),
        kept_chars=min(kept, len(encoded.text)),
    )


def _reasoning_spans(text: str, places: Iterable[Span], offsets: NDArray[np.int64]) -> Iterator[TokenSpan]:
    """Yields the tokens of the reasoning at `places` that truncation left."""
    for first, last in places:
        start, end = int(np.searchsorted(offsets[:, 1], first, side="right")), int(np.searchsorted(offsets[:, 0], last, side="left"))
        if end > start:
            end_char = min(last, int(offsets[end - 1, 1]))
            yield TokenSpan(start=start, end=end, start_char=first, end_char=end_char, text=text[first:end_char])


def preview_pieces(shown: Preview) -> Iterator[tuple[str, bool, bool]]:
    """Yields the text that the tokens cover in pieces, each with whether it carries loss and whether it is reasoning."""
    changes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for counter, spans in zip(changes, (shown.loss_spans, shown.reasoning_spans), strict=True):
        for span in spans:
            counter[span.start_char] += 1
            counter[span.end_char] -= 1
    loss = reasoning = 0
    for start, end in itertools.pairwise(
        sorted(edge for edge in {0, shown.kept_chars, *changes[0], *changes[1]} if edge <= shown.kept_chars)
    ):
        loss, reasoning = loss + changes[0][start], reasoning + changes[1][start]
        yield shown.text[start:end], loss > 0, reasoning > 0


def _place(text: str, said: str, expected: int, after: int) -> int:
    """Returns where `said` stands in `text`: at `expected`, or at its next occurrence if decoding does not reproduce the text."""
    found = expected if text.startswith(said, expected) else text.find(said, after)
    return max(after, expected) if found < 0 else found


def preview_lines(shown: Preview, *, colour: bool) -> Iterator[str]:
    """Returns the preview for a terminal: text with loss is green, or between ``{+`` and ``+}``; reasoning is italic, or between ``{?``
    and ``?}``; truncated text is faint, or after ``{-``."""
    side = f", {shown.side}" if shown.side else ""
    cut = f", cut to {len(shown.input_ids)}" if shown.truncated else ""
    yield f"row {shown.row} ({shown.kind}{side}): {shown.num_tokens} tokens{cut}, {shown.num_trained_tokens} with loss"
    for reason, words in WITHOUT_LOSS.items():
        if quiet := [str(number) for number, turn in enumerate(shown.turns, start=1) if turn == reason]:
            yield f"  no loss on assistant turn {', '.join(quiet)} of {len(shown.turns)}: {words}"
    if shown.truncated and "loss" in shown.turns and not shown.num_trained_tokens:
        yield "  no loss: the whole answer is cut off (answer_cut_off)"
    elif not shown.num_trained_tokens:
        yield "  no loss: no token of this row is trained"
    if shown.reasoning_spans:
        yield f"  {shown.num_reasoning_tokens} tokens of reasoning{'' if colour else ', between {? and ?}'}"
    parts = list(_marked(shown, colour=colour))
    if shown.kept_chars < len(shown.text):
        rest = _printable(shown.text[shown.kept_chars :])
        parts.append(f"{CUT}{rest}{PLAIN}" if colour else f"{{-{rest}-}}")
    yield from "".join(parts).split("\n")


def _marked(shown: Preview, *, colour: bool) -> Iterator[str]:
    """Yields the text that the tokens cover, with marks around loss and reasoning."""
    in_loss = False
    for text, loss, reasoning in preview_pieces(shown):
        said = _printable(text)
        if colour:
            yield f"{REASONING * reasoning}{TRAINED * loss}{said}{PLAIN}" if loss or reasoning else said
            continue
        if loss != in_loss:
            yield "{+" if loss else "+}"
        in_loss = loss
        yield f"{{?{said}?}}" if reasoning else said
    yield "+}" * in_loss


def _printable(text: str) -> str:
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
