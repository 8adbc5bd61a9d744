"""Text to ids with the base model's own tokenizer and template, and which ids carry loss.

Ids and assistant masks equal those of ``apply_chat_template(..., return_assistant_tokens_mask=True)`` of the transformers library,
without importing it. The rules:

1. Chat: loss on what the template marks with ``{% generation %}``; a template without marks is rendered turn by turn and the
   difference is the assistant's turn. The end-of-turn token is always inside.
2. A message of weight 0 carries no loss. With `train_on_inputs` everything else does.
3. Text: every token, and the end-of-sequence token after it.
4. The first token of an example never carries loss: nothing predicts it, and in a packed window its neighbour must not.
5. Content that holds a control token is refused: it would become the real one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from ft_assets.base_models import read_template, template_digest, tokenizer_digest
from ft_assets.datasets.checks.content import control_token_pattern, control_token_problems
from ft_assets.datasets.schema import Example, Message
from ft_assets.datasets.tokens.templates import ChatTemplate, Rendered, Span
from ft_assets.errors import InvalidDataset, InvalidRequest, Unavailable

IGNORE = -100
"""The label that carries no loss."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedExample:
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    """`input_ids` where there is loss, -100 elsewhere; not shifted."""
    truncated: bool
    """Tokens past `max_seq_len` were cut off."""
    num_tokens: int
    """Before the cut."""
    text: str
    """What was tokenized."""

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORE))


class ChatTokenizer:
    """A tokenizer with its chat template. Not safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, *, template: str | None, config: Mapping[str, Any], digests: tuple[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.tokenizer_digest, self.template_digest = digests
        self.special = {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name)}
        self._template = None if template is None else ChatTemplate(template, variables=self.special)

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """The tokenizer of a model directory: ``tokenizer.json``, ``tokenizer_config.json`` and its chat template."""
        file, config = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
        if not file.is_file():
            raise Unavailable(f"{model_dir} has no tokenizer.json; a base model needs its fast tokenizer")
        return cls(
            Tokenizer.from_file(str(file)),
            template=read_template(model_dir),
            config=json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {},
            digests=(tokenizer_digest(model_dir), template_digest(model_dir)),
        )

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Special tokens, and the added tokens that the template writes itself."""
        literals = self._template.literal_text if self._template else ""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(t.content for t in added if t.special or (t.content in literals and not t.content.isspace()))

    @cached_property
    def control_token_pattern(self) -> re.Pattern[str]:
        return control_token_pattern(self.control_tokens)

    @property
    def eos_token_id(self) -> int:
        """Id of ``eos_token``; a tokenizer without one cannot end a text."""
        token = self.special.get("eos_token")
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            message = f"the base model's tokenizer has no usable eos_token (got {token!r}); choose a base model that has one"
            raise InvalidRequest(message, code="no_eos_token")
        return int(found)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode(self, example: Example, *, max_seq_len: int, train_on_inputs: bool = False) -> TokenizedExample:
        """Ids and labels of one example; what lies past `max_seq_len` is cut and `truncated` says so."""
        return self.encode_batch([example], max_seq_len=max_seq_len, train_on_inputs=train_on_inputs)[0]

    def encode_batch(self, examples: Sequence[Example], *, max_seq_len: int, train_on_inputs: bool = False) -> list[TokenizedExample]:
        """:meth:`encode` for many, tokenized together."""
        layouts = [self._layout(e, train_on_inputs=train_on_inputs) for e in examples]
        texts = [e.kind == "text" for e in examples]
        encoded: list[Encoding | None] = [None] * len(examples)
        for special in (False, True):
            indexes = [i for i, is_text in enumerate(texts) if is_text == special]
            batch = self._tokenizer.encode_batch([layouts[i].text for i in indexes], add_special_tokens=special) if indexes else []
            for index, encoding in zip(indexes, batch, strict=True):
                encoded[index] = encoding
        return [
            self._label(layout, encoding, max_seq_len) for layout, encoding in zip(layouts, encoded, strict=True) if encoding is not None
        ]

    def count_tokens(self, example: Example) -> int:
        """Tokens of an example before any cut; of a preference, those of its longer side."""
        if example.kind == "text":
            return self.encode(example, max_seq_len=1).num_tokens
        sides = (example.chosen, example.rejected) if example.kind == "preference" else ((),)
        texts = [self._render((*example.messages, *side), example.tools).text for side in sides]
        return max(len(e.ids) for e in self._tokenizer.encode_batch(texts, add_special_tokens=False))

    def render_prompt(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of `messages` followed by the start of the assistant's turn: what a model is given to answer."""
        text = self._chat_template().render([m.as_template() for m in messages], tools=tools, add_generation_prompt=True).text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            message = "the base model has no chat template, so it can be trained on 'text' rows only; choose a chat model or rows of text"
            raise InvalidRequest(message, code="no_chat_template")
        return self._template

    def _layout(self, example: Example, *, train_on_inputs: bool) -> _Layout:
        """The text of an example and which of its characters carry loss."""
        problem = next(control_token_problems(example, self.control_token_pattern), None)
        if problem is not None:
            raise InvalidDataset(f"row {example.row}: {problem.path} {problem.message}; {problem.fix}", code=problem.code)
        if example.kind == "text":
            text = example.text or ""
            return _Layout(text=text, loss=((0, len(text)),), quiet=(), end_of_text=True)
        if example.kind == "preference":
            message = "a preference has two answers and is trained with a preference method; choose method 'dpo' or rows of chat"
            raise InvalidRequest(message, code="preference_rows")
        rendered = self._render(example.messages, example.tools)
        weights = [m.weight for m in example.messages if m.role == "assistant"]
        spans = rendered.spans
        if len(spans) != len(weights) and not all(weights):
            spans, rendered = self._by_prefix(example.messages, example.tools)
        spans = tuple(self._with_end_of_turn(rendered.text, span) for span in spans)
        quiet = tuple(s for s, w in zip(spans, weights, strict=True) if not w) if len(spans) == len(weights) else ()
        loss = ((0, len(rendered.text)),) if train_on_inputs else spans
        return _Layout(text=rendered.text, loss=loss, quiet=quiet, end_of_text=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Rendered:
        template = self._chat_template()
        if not template.marks_generation:
            spans, rendered = self._by_prefix(messages, tools)
            return Rendered(text=rendered.text, spans=spans)
        return template.render([m.as_template() for m in messages], tools=tools)

    def _by_prefix(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[tuple[Span, ...], Rendered]:
        """Spans of the assistant's turns without marks: what a turn adds to the prompt before it."""
        template = self._chat_template()
        dicts = [m.as_template() for m in messages]
        whole = template.render(dicts, tools=tools)
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = template.render(dicts[:index], tools=tools, add_generation_prompt=True).text
            upto = template.render(dicts[: index + 1], tools=tools).text
            if not upto.startswith(before) or not whole.text.startswith(upto):
                raise InvalidRequest(
                    f"the base model's chat template writes message {index + 1} differently once more messages follow, and marks no "
                    "{% generation %}; add the marks to the template or train on single answers",
                    code="template_unstable",
                )
            spans.append((len(before), max(len(before), len(upto.rstrip("\n")))))
        return tuple(spans), whole

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """`span` with the control token right after it, unless it ends with one already: a model must learn to stop."""
        start, end = span
        said = text[start:end].rstrip()
        if any(said.endswith(token) for token in self.control_tokens):
            return span
        match = self.control_token_pattern.match(text, end)
        return (start, match.end()) if match else span

    def _label(self, layout: _Layout, encoding: Encoding, max_seq_len: int) -> TokenizedExample:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=bool)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        for spans, value in ((layout.loss, True), (layout.quiet, False)):
            for start, end in spans:
                if end > start:
                    first = np.searchsorted(offsets[:, 1], start, side="right")
                    mask[first : np.searchsorted(offsets[:, 0], end, side="left")] = value
        if layout.end_of_text:
            mask[:] = True
            if not len(ids) or ids[-1] != self.eos_token_id:
                ids, mask = np.append(ids, np.int32(self.eos_token_id)), np.append(mask, True)
        num_tokens = len(ids)
        ids, mask = ids[:max_seq_len], mask[:max_seq_len]
        mask[:1] = False
        labels = np.where(mask, ids, np.int32(IGNORE)).astype(np.int32)
        return TokenizedExample(input_ids=ids, labels=labels, truncated=num_tokens > max_seq_len, num_tokens=num_tokens, text=layout.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    text: str
    loss: tuple[Span, ...]
    quiet: tuple[Span, ...]
    """Taken out of `loss` again: messages of weight 0."""
    end_of_text: bool


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)
