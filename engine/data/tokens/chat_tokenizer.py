"""Converts text to ids with the base model's own tokenizer and template, and labels them (see ``loss_mask``).

Ids and assistant masks equal those of ``apply_chat_template(..., return_assistant_tokens_mask=True)`` of the transformers library, without
importing it.

1. Tokens past `max_seq_len` are truncated, on both sides of a preference alike: the start is kept (TRL's ``keep_start``).
2. Content that contains a control token is refused, because it would become the real one; with `escape_control_tokens` it is tokenized as
   plain text, and decodes to the same characters.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from core.base_models import read_template, template_digest, tokenizer_digest
from core.errors import InvalidDataset, InvalidRequest, Unavailable
from core.typed_json import JsonObject
from engine.data.conversation import Conversation
from engine.data.problems import Problem
from engine.data.schema import Example, Message, TemplateValue
from engine.data.tokens.answer_sides import judged_answer, preference_sides
from engine.data.tokens.assistant_turns import RenderedTurns, Turns, reasoning_of, without_thinking
from engine.data.tokens.control_token_search import control_token_pattern, control_token_problems
from engine.data.tokens.encoders import UNCUT, Encoder, Job, Mark, Plan, Segments, encoder_for, is_byte_level
from engine.data.tokens.escapes import NO_ESCAPES, Escapes, placeholders_kept, spell_out
from engine.data.tokens.loss_mask import IGNORE, TrainOnInputs, TurnLoss, labels, turn_loss
from engine.data.tokens.patterns import MAX_PATTERNS, Pattern, Patterns, literal_pieces, plain_contents
from engine.data.tokens.reasoning_probe import Reasoning
from engine.data.tokens.templates import NO_KWARGS, ChatTemplate, Span, special_tokens
from engine.data.tokens.tool_probe import TemplateTools, ToolProbe, refuse_blank_answers


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedExample:
    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    """`input_ids` where there is loss, -100 elsewhere; not shifted."""
    truncated: bool
    """Tokens past `max_seq_len` were cut off."""
    num_tokens: int
    """Number of tokens before truncation; for a text of far more than `max_seq_len` tokens (see ``encoders.exact_chars``) any number
    above it."""
    text: str
    """The tokenized text, with the tokens put around a text; not truncated."""
    turns: tuple[TurnLoss, ...]
    """Outcome of each assistant turn in order; what truncation leaves of it is in `labels`."""

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORE))

    @property
    def is_cut_off(self) -> bool:
        """Truncation left nothing that carries loss."""
        return self.truncated and "loss" in self.turns and not self.num_trained_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One number for each example."""

    num_tokens: NDArray[np.int64]
    """Before truncation; -1 if the template refuses the example."""
    untrained_turns: NDArray[np.int64]
    """Turns of weight 1 without loss, because the template rewrites them."""
    left_out: NDArray[np.int64]
    """Turns without loss whose reasoning the template leaves out."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One example, ready to be tokenized."""

    job: Job
    text: str
    weights: tuple[bool, ...]
    """For each turn, the weight of its message."""
    rewritten: tuple[bool, ...]
    """For each turn: it carries no loss, because the template writes it differently once more messages follow."""
    is_text: bool
    num_left_out: int = 0
    """Turns without loss whose reasoning the template leaves out."""

    @property
    def num_rewritten(self) -> int:
        """Number of turns of weight 1 that carry no loss."""
        return sum(map(operator.and_, self.weights, self.rewritten))


class ChatTokenizer:
    """A tokenizer with its chat template. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        config: Mapping[str, Any],
        digests: tuple[str, str],
        stop_ids: Sequence[int] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.tokenizer_digest, self.template_digest = digests
        self.special = special_tokens(config)
        self._stop_ids = tuple(stop_ids)
        self._template = None if template is None else ChatTemplate(template, variables=self.special)
        self._plans: dict[int, tuple[Pattern, Plan]] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Self:
        """Loads a model directory: ``tokenizer.json``, ``tokenizer_config.json`` and its chat template."""
        file, config = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
        if not file.is_file():
            raise Unavailable(f"{model_dir} has no tokenizer.json; a base model needs its fast tokenizer")
        return cls(
            Tokenizer.from_file(str(file)),
            template=read_template(model_dir),
            config=json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {},
            digests=(tokenizer_digest(model_dir), template_digest(model_dir)),
            stop_ids=_read_stop_ids(model_dir / "generation_config.json"),
        )

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Special tokens, and the added tokens that the template writes but does not search for in contents (such as ``</think>``)."""
        literals, read = (self._template.literal_text, self._template.read_literals) if self._template else ("", frozenset())
        added = self._tokenizer.get_added_tokens_decoder().values()
        written = (t for t in added if t.content in literals and t.content not in read and not t.content.isspace())
        return frozenset((*(t.content for t in added if t.special), *(t.content for t in written)))

    @cached_property
    def control_token_pattern(self) -> re.Pattern[str]:
        return control_token_pattern(self.control_tokens)

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        """First characters of all control tokens: a text without any of them contains no control token."""
        return tuple({token[:2] for token in self.control_tokens})

    def control_token_problem(self, example: Example) -> Problem | None:
        """Returns the first control token inside content, if any."""
        contents = plain_contents(example) if example.kind == "chat" else None
        if contents is not None and not any(opening in text for text in contents for opening in self._openings):
            return None
        return next(iter(control_token_problems(example, self.control_token_pattern)), None)

    @property
    def eos_token_id(self) -> int:
        """Id of ``eos_token``; a tokenizer without one cannot end a text."""
        token = self.special.get("eos_token")
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            message = f"the base model's tokenizer has no usable eos_token (got {token!r}); choose a base model that has one"
            raise InvalidRequest(message, code="no_eos_token")
        return int(found)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids at which an inference server stops: those of ``generation_config.json``, else ``eos_token``."""
        return frozenset(self._stop_ids or (self.eos_token_id,))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode(
        self, example: Example, *, max_seq_len: int, train_on_inputs: TrainOnInputs = False, escape_control_tokens: bool = False
    ) -> TokenizedExample:
        """Returns ids and labels of one example; tokens past `max_seq_len` are cut off, which `truncated` records."""
        return self.encode_batch(
            [example], max_seq_len=max_seq_len, train_on_inputs=train_on_inputs, escape_control_tokens=escape_control_tokens
        )[0]

    def encode_batch(
        self,
        examples: Sequence[Example],
        *,
        max_seq_len: int,
        train_on_inputs: TrainOnInputs = False,
        escape_control_tokens: bool = False,
    ) -> list[TokenizedExample]:
        """Does :meth:`encode` for many examples, tokenized together."""
        layouts = [self._checked_layout(e, escape=escape_control_tokens) for e in examples]
        encoded = self._encoder.encode([layout.job for layout in layouts], most=max_seq_len)
        everywhere = train_on_inputs is True
        return [self._label(lay, *found, max_seq_len, everywhere) for lay, found in zip(layouts, encoded, strict=True)]

    def encode_preference(
        self, example: Example, *, max_seq_len: int, escape_control_tokens: bool = False
    ) -> tuple[TokenizedExample, TokenizedExample]:
        """Returns (chosen, rejected) of a preference; a side whose prompt fills `max_seq_len` has no trained token."""
        return self.encode_preference_batch([example], max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)[0]

    def encode_preference_batch(
        self, examples: Sequence[Example], *, max_seq_len: int, escape_control_tokens: bool = False
    ) -> list[tuple[TokenizedExample, TokenizedExample]]:
        """Does :meth:`encode_preference` for many examples, tokenized together."""
        sides = [side for e in examples for side in preference_sides(e)]
        encoded = self.encode_batch(sides, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)
        return list(zip(encoded[::2], encoded[1::2], strict=True))

    def encode_judged_batch(
        self, examples: Sequence[Example], *, max_seq_len: int, escape_control_tokens: bool = False
    ) -> list[TokenizedExample]:
        """Returns each judged answer with its prompt; loss on the answer only."""
        answers = [judged_answer(e) for e in examples]
        return self.encode_batch(answers, max_seq_len=max_seq_len, escape_control_tokens=escape_control_tokens)

    def fewest_tokens(self, example: Example) -> int:
        """Returns a lower bound of :meth:`count_tokens` from the number of characters, at no cost; 0 if the tokenizer allows none.

        A byte-level token has no more characters than bytes. Earlier turns' thinking, which templates may drop, is not counted.
        """
        if not self._max_token_chars:
            return 0
        messages = [*example.messages, *(example.chosen or example.rejected)]
        texts = [*map(without_thinking, messages[:-1]), messages[-1].content if messages else example.text]
        return sum(len((text or "").strip()) for text in texts) // self._max_token_chars

    @cached_property
    def _max_token_chars(self) -> int:
        return int(max(map(len, self._tokenizer.get_vocab()))) if is_byte_level(self._tokenizer) else 0

    def count_tokens(self, example: Example, *, escape_control_tokens: bool = False, most: int = UNCUT) -> int:
        """Returns the tokens of an example before truncation; for a preference, of its longer side. Beyond `most`, any number above it.

        Control tokens in content count as themselves, or, escaped, as the plain text that :meth:`encode` then makes of them.
        """
        sides = preference_sides(example) if example.kind == "preference" else (example,)
        return max(self._lengths([self._counted_layout(side, escape=escape_control_tokens) for side in sides], most))

    def count_tokens_batch(self, examples: Sequence[Example], *, escape_control_tokens: bool = False) -> NDArray[np.int64]:
        """Does :meth:`count_tokens` for `examples` together; -1 if it raises (a template that refuses the row)."""
        return self.measure_batch(examples, escape_control_tokens=escape_control_tokens).num_tokens

    def measure_batch(self, examples: Sequence[Example], *, escape_control_tokens: bool = False, most: int = UNCUT) -> Measured:
        """Does :meth:`count_tokens_batch`, and counts each example's turns without loss."""
        out, rewritten, left_out = (np.full(len(examples), value, dtype=np.int64) for value in (-1, 0, 0))
        layouts: list[_Layout] = []
        owners: list[int] = []
        for index, example in enumerate(examples):
            try:
                sides = preference_sides(example) if example.kind == "preference" else (example,)
                made = [self._counted_layout(side, escape=escape_control_tokens) for side in sides]
            except InvalidRequest:
                continue
            layouts += made
            rewritten[index] = sum(layout.num_rewritten for layout in made)
            left_out[index] = max(layout.num_left_out for layout in made)
            owners += [index] * len(made)
        np.maximum.at(out, np.asarray(owners, dtype=np.int64), np.asarray(self._lengths(layouts, most), dtype=np.int64))
        return Measured(num_tokens=out, untrained_turns=rewritten, left_out=left_out)

    def render_turns(
        self, turns: Sequence[JsonObject], *, tools: Sequence[JsonObject] = (), kwargs: Mapping[str, TemplateValue] = NO_KWARGS
    ) -> list[int]:
        """Returns the ids of `turns`, messages in template form, followed by the start of the assistant's turn: the input for an answer."""
        text = self._chat_template().render(turns, tools=tools, kwargs=kwargs, add_generation_prompt=True).text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Returns the ids of `conversation` and the start of the answer, as training renders them.

        Control tokens inside content become plain text, as with `escape_control_tokens`: nobody can forge a turn with them.
        """
        kwargs = dict(conversation.template_kwargs)
        example, spelled = (
            Example(kind="chat", messages=conversation.messages, tools=conversation.tools, template_kwargs=kwargs),
            NO_ESCAPES,
        )
        try:
            if (problem := self.control_token_problem(example)) is not None:
                example, spelled = self._escape(example, problem, otherwise="remove it")
            self._tool_probe.check_prompt(example)
            dicts = [m.as_template() for m in example.messages]
            text = self._chat_template().render(dicts, tools=example.tools, kwargs=kwargs, add_generation_prompt=True).text
            _check_placeholders(example, text, spelled)
        except InvalidDataset as error:
            raise InvalidRequest(error.message, code=error.code, param="messages") from error
        plan = self._encoder.plan([(text, -1)] if text else [], reused=False)
        ((ids, _),) = self._encoder.encode([Job(plan, (), spelled)])
        return [int(i) for i in ids]

    def render_text(self, turns: Sequence[JsonObject], *, tools: Sequence[JsonObject] = (), add_generation_prompt: bool = True) -> str:
        """Returns messages in template form as rendered text."""
        return self._chat_template().render(turns, tools=tools, add_generation_prompt=add_generation_prompt).text

    def check_stop_token(self) -> None:
        """Refuses a template whose trained turns do not end in a token at which the inference server stops.

        A model trained that way would answer without end. Called once per pack; for a model without a template, texts end with
        ``eos_token``.
        """
        if self._template is None:
            return
        requested = Example(kind="chat", messages=(Message(role="user", content="Hi?"), Message(role="assistant", content="Yes.")))
        encoded = self.encode(requested, max_seq_len=1 << 20)
        trained = {int(t) for t in encoded.labels if t != IGNORE}
        if not trained & self.stop_ids:
            ends = self.decode([t for t in encoded.labels.tolist() if t != IGNORE])[-40:]
            wanted = ", ".join(repr(self._tokenizer.id_to_token(t)) for t in sorted(self.stop_ids))
            raise InvalidRequest(
                f"the base model's answers are trained to end with {ends!r}, but its inference stops at {wanted}: it would answer without "
                "end; correct eos_token in tokenizer_config.json, eos_token_id in generation_config.json, or the chat template",
                code="stop_token_not_trained",
            )

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            message = (
                "the base model has no chat template, so it can be trained on 'text' rows only and answers text completions only; choose a "
                "chat model, rows of text, or /v1/completions"
            )
            raise InvalidRequest(message, code="no_chat_template")
        return self._template

    @cached_property
    def _turns(self) -> Turns:
        return Turns(self._chat_template(), self.control_token_pattern)

    @cached_property
    def _tool_probe(self) -> ToolProbe:
        return ToolProbe(self._chat_template(), self._turns)

    @property
    def tools(self) -> TemplateTools | None:
        """What the template writes of tools; None without a template."""
        return None if self._template is None else self._tool_probe.facts

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """What the template does with reasoning; None without a template."""
        return None if self._template is None else Reasoning(self._template, self._turns, self.special_tokens)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Tokens that decoding leaves out."""
        return frozenset(t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special)

    def reasoning_spans(self, example: Example) -> tuple[Span, ...]:
        """Returns the characters of a chat's rendered text that are reasoning of its answers."""
        return self._render(example).reasoning if any(map(reasoning_of, example.messages)) else ()

    def offsets(self, encoded: TokenizedExample) -> NDArray[np.int64]:
        """Returns the characters of `encoded.text` that each token touches, as (start, end)."""
        return self._encoder.offsets(encoded.text, encoded.input_ids)

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns(self._chat_template(), self._turns)

    @cached_property
    def _encoder(self) -> Encoder:
        return encoder_for(self._tokenizer, self.control_tokens)

    @cached_property
    def _around_text(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids that the tokenizer puts before and after a text."""
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next(i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
        return np.asarray(whole[:at], dtype=np.int32), np.asarray(whole[at + len(bare) :], dtype=np.int32)

    def _counted_layout(self, example: Example, *, escape: bool) -> _Layout:
        return self._checked_layout(example, escape=True) if escape else self._layout(example)

    def _checked_layout(self, example: Example, *, escape: bool) -> _Layout:
        """Returns :meth:`_layout`, with control tokens refused or escaped; a refusal names the row."""
        try:
            problem = self.control_token_problem(example)
            if problem is None:
                return self._layout(example)
            if not escape:
                raise InvalidDataset(f"{problem.path} {problem.message}; {problem.fix}", code=problem.code)
            return self._layout(*self._escape(example, problem, otherwise="choose the policy 'drop' or 'reject'"))
        except InvalidDataset as error:
            raise InvalidDataset(f"row {example.row}: {error.message}", code=error.code, param=error.param) from error

    def _escape(self, example: Example, problem: Problem, *, otherwise: str) -> tuple[Example, dict[str, str]]:
        """Returns `example` with placeholders for its control tokens, of which `problem` is the first, and what they stand for."""
        if not isinstance(self._encoder, Segments):
            message = f"this base model's tokenizer cannot tokenize control tokens as plain text; {otherwise}"
            raise InvalidDataset(f"{problem.path} {problem.message}; {message}", code=problem.code)
        return self._escapes.escape(example)

    @cached_property
    def _escapes(self) -> Escapes:
        return Escapes(self.control_tokens, self.control_token_pattern)

    def _layout(self, example: Example, spelled: Mapping[str, str] = NO_ESCAPES) -> _Layout:
        """Returns the text of an example in pieces, and which of them carry loss."""
        if example.kind == "preference":
            message = "a preference has two answers and is trained with a preference method; choose method 'dpo' or rows of chat"
            raise InvalidRequest(message, code="preference_rows")
        if example.kind == "text":
            text = example.text or ""
            plan = self._encoder.plan([(text, 0)] if text else [], reused=False)
            return _Layout(Job(plan, (), spelled), spell_out(text, spelled), (True,), (False,), True)
        return self._filled(example, spelled) or self._rendered(example, spelled)

    def _filled(self, example: Example, spelled: Mapping[str, str]) -> _Layout | None:
        """Returns the layout by the pattern of the example's roles; None if it has none."""
        self._chat_template()
        contents = plain_contents(example)
        if contents is None:
            return None
        pattern = self._patterns.find(tuple([m.role for m in example.messages]), example.template_kwargs)
        weights = tuple([m.weight != 0 for m in example.messages if m.role == "assistant"])
        if pattern is None or not pattern.holds(contents):
            return None
        if pattern.num_turns != len(weights):
            if not all(weights):
                return None
            weights = (True,) * pattern.num_turns
        job, text = Job(self._plan_of(pattern), contents, spelled), spell_out(pattern.text(contents), spelled)
        return _Layout(job, text, weights, pattern.rewritten, False)

    def _rendered(self, example: Example, spelled: Mapping[str, str]) -> _Layout:
        """Returns the layout by the template itself."""
        weights = tuple(m.weight != 0 for m in example.messages if m.role == "assistant")
        self._tool_probe.check(example)
        rendered = self._render(example)
        refuse_blank_answers(example, rendered, self.control_token_pattern)
        _check_placeholders(example, rendered.text, spelled)
        weights = weights if len(rendered.spans) == len(weights) else (True,) * len(rendered.spans)
        plan = self._encoder.plan(literal_pieces(rendered.text, rendered.spans), reused=False)
        text = spell_out(rendered.text, spelled)
        return _Layout(Job(plan, (), spelled), text, weights, rendered.rewritten, False, rendered.num_left_out)

    def _render(self, example: Example) -> RenderedTurns:
        weighted = any(m.weight == 0 for m in example.messages if m.role == "assistant")
        return self._turns.render(example.messages, example.tools, kwargs=example.template_kwargs, weighted=weighted)

    def _plan_of(self, pattern: Pattern) -> Plan:
        """Returns the plan of `pattern`, made once."""
        known = self._plans.get(id(pattern))
        if known is None:
            if len(self._plans) >= MAX_PATTERNS:
                self._plans.clear()
            known = self._plans[id(pattern)] = (pattern, self._encoder.plan(pattern.pieces, reused=True))
        return known[1]

    def _lengths(self, layouts: Sequence[_Layout], most: int) -> list[int]:
        """Returns the tokens of each, including what is put around a text."""
        counts = self._encoder.count([layout.job for layout in layouts], most=most)
        if not any(layout.is_text for layout in layouts):
            return counts
        before, after = self._around_text
        around = len(before) + len(after) + (not (len(after) and after[-1] == self.eos_token_id))
        return [count + around * layout.is_text for count, layout in zip(counts, layouts, strict=True)]

    def _label(
        self, layout: _Layout, ids: NDArray[np.int32], marks: Sequence[Mark], max_seq_len: int, everywhere: bool
    ) -> TokenizedExample:
        text = layout.text
        if layout.is_text:
            before, after = self._around_text
            ids = np.concatenate((before, ids, after))
            text = f"{self.decode(before.tolist())}{text}{self.decode(after.tolist())}"
            if not len(ids) or ids[-1] != self.eos_token_id:
                ids, text = np.append(ids, np.int32(self.eos_token_id)), text + self.special["eos_token"]
            everywhere, marks = True, ()
        num_tokens = len(ids)
        ids = ids[:max_seq_len]
        turns = tuple(map(turn_loss, layout.weights, layout.rewritten))
        return TokenizedExample(
            input_ids=ids,
            labels=labels(ids, marks, turns, everywhere=everywhere),
            truncated=num_tokens > max_seq_len,
            num_tokens=num_tokens,
            text=text,
            turns=() if layout.is_text else turns,
        )


def _check_placeholders(example: Example, text: str, spelled: Mapping[str, str]) -> None:
    if spelled and not placeholders_kept(example, text):
        message = "the chat template rewrites content that holds a control token, so that it cannot be escaped; remove the token"
        raise InvalidDataset(message, code="control_token_in_content")


def _read_stop_ids(file: Path) -> tuple[int, ...]:
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return () if found is None else tuple(found) if isinstance(found, list) else (int(found),)
