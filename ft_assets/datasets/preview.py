"""The first examples exactly as they will be trained: text, ids, which tokens carry loss, what is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ft_assets.datasets.schema import Example
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSpan:
    start: int
    """First token with loss."""
    end: int
    """First token after it without."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    row: int
    text: str
    """As rendered by the template, before any cut."""
    input_ids: list[int]
    loss_spans: list[LossSpan]
    num_tokens: int
    """Before any cut."""
    num_trained_tokens: int
    truncated: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preview(
    examples: Iterable[Example], tokenizer: ChatTokenizer, *, max_seq_len: int, num_examples: int = 5, train_on_inputs: bool = False
) -> list[Preview]:
    """The first `num_examples` of `examples` as trained."""
    return [_preview(e, tokenizer, max_seq_len, train_on_inputs) for e in itertools.islice(examples, num_examples)]


def _preview(example: Example, tokenizer: ChatTokenizer, max_seq_len: int, train_on_inputs: bool) -> Preview:
    encoded = tokenizer.encode(example, max_seq_len=max_seq_len, train_on_inputs=train_on_inputs)
    ids = encoded.input_ids.tolist()
    edges = np.flatnonzero(np.diff(np.concatenate(([0], encoded.labels != IGNORE, [0])).astype(np.int8))).reshape(-1, 2).tolist()
    return Preview(
        row=example.row,
        text=encoded.text,
        input_ids=ids,
        loss_spans=[LossSpan(start=start, end=end, text=tokenizer.decode(ids[start:end])) for start, end in edges],
        num_tokens=encoded.num_tokens,
        num_trained_tokens=encoded.num_trained_tokens,
        truncated=encoded.truncated,
    )
