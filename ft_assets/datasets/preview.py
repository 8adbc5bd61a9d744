"""The first examples exactly as trained: text, ids, tokens with loss, truncated parts.

Uses the same encoding as packs; a preference is shown as its two sides, and a judged answer with its label.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from ft_assets.datasets.schema import Example
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
from ft_assets.datasets.tokens.loss_mask import IGNORE, TrainOnInputs
from ft_assets.errors import InvalidRequest
from ft_assets.storable_text import num_characters

Side = Literal["chosen", "rejected", "good", "bad"]
MAX_CHARS = 1_000_000
"""Most characters of an example, over all fields: rendering and tokenizing may take seconds per million characters."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters with which content could control a terminal or reorder its lines; line feed and tab stay."""
TRAINED, CUT, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
"""Green, faint and reset."""
WITHOUT_LOSS = {
    "weight_0": "weight 0, or part of a prompt",
    "rewritten_in_history": "the chat template writes it differently once more messages follow",
}
"""Why a turn carries no loss, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpan:
    start: int
    """First token with loss."""
    end: int
    """First following token without loss."""
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
    loss_spans: list[LossSpan]
    num_tokens: int
    """Number of tokens before truncation."""
    num_trained_tokens: int
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
            out += (_preview(example, encoded, tokenizer, side) for encoded, side in zip(sides, ("chosen", "rejected"), strict=True))
        elif example.kind == "kto":
            (encoded,) = tokenizer.encode_judged_batch([example], max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
            out.append(_preview(example, encoded, tokenizer, "good" if example.label else "bad"))
        else:
            encoded = tokenizer.encode(
                example, max_seq_len=max_seq_len, train_on_inputs=train_on_inputs, escape_control_tokens=escape_control_tokens
            )
            out.append(_preview(example, encoded, tokenizer, None))
    return out


def _refuse_huge(example: Example) -> None:
    num_chars = num_characters(msgspec.to_builtins(example))
    if num_chars > MAX_CHARS:
        raise InvalidRequest(
            f"row {example.row} has {num_chars} characters, over the {MAX_CHARS} that a preview shows; split the row",
            code="example_too_long",
        )


def _preview(example: Example, encoded: TokenizedExample, tokenizer: ChatTokenizer, side: Any) -> Preview:
    ids = encoded.input_ids.tolist()
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.labels != IGNORE, [0])).astype(np.int8))).reshape(-1, 2).tolist()
    spans: list[LossSpan] = []
    for start, end in edges:
        said = tokenizer.decode(ids[start:end])
        first = _place(encoded.text, tokenizer.decode(ids[:start]), said, spans[-1].end_char if spans else 0)
        spans.append(LossSpan(start=start, end=end, start_char=first, end_char=min(first + len(said), len(encoded.text)), text=said))
    kept = len(tokenizer.decode(ids)) if encoded.truncated else len(encoded.text)
    return Preview(
        row=example.row,
        kind=example.kind,
        side=side,
        text=encoded.text,
        input_ids=ids,
        loss_spans=spans,
        num_tokens=encoded.num_tokens,
        num_trained_tokens=encoded.num_trained_tokens,
        truncated=encoded.truncated,
        turns=list(encoded.turns),
        kept_chars=min(kept, len(encoded.text)),
    )


def _place(text: str, before: str, said: str, after: int) -> int:
    """Returns where `said` stands in `text`: after `before`, or at its next occurrence if decoding does not reproduce the text."""
    if text.startswith(before):
        return len(before)
    return max(after, text.find(said, after))


def render_lines(shown: Preview, *, colour: bool) -> Iterator[str]:
    """Returns the preview for a terminal: text with loss is green, or between ``{+`` and ``+}``; truncated text is faint, or after
    ``{-``."""
    side = f", {shown.side}" if shown.side else ""
    cut = f", cut to {len(shown.input_ids)}" if shown.truncated else ""
    yield f"row {shown.row} ({shown.kind}{side}): {shown.num_tokens} tokens{cut}, {shown.num_trained_tokens} with loss"
    for reason, words in WITHOUT_LOSS.items():
        if quiet := [str(number) for number, turn in enumerate(shown.turns, start=1) if turn == reason]:
            yield f"  no loss on assistant turn {', '.join(quiet)} of {len(shown.turns)}: {words}"
    opens, closes, drops, ends = (TRAINED, PLAIN, CUT, PLAIN) if colour else ("{+", "+}", "{-", "-}")
    place, parts = 0, []
    for span in shown.loss_spans:
        parts += [_printable(shown.text[place : span.start_char]), opens, _printable(shown.text[span.start_char : span.end_char]), closes]
        place = span.end_char
    kept = max(place, shown.kept_chars)
    parts.append(_printable(shown.text[place:kept]))
    if kept < len(shown.text):
        parts += [drops, _printable(shown.text[kept:]), ends]
    yield from "".join(parts).split("\n")


def _printable(text: str) -> str:
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
