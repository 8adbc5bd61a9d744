"""Encodes requests to token ids, once for all subjects: they share one tokenizer.

Conversations are rendered as in training, by the same template engine with the same fixed date, so that the evaluated form equals the
learned form, tomorrow too. Texts are encoded like lm-evaluation-harness encodes them (its ``HFLM``), so that an accuracy measured here
equals the one measured there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.typed_json import JsonObject
from engine.data import NO_KWARGS, ChatTokenizer, TemplateValue
from engine.evals.suites.model_requests import Generate, Likelihood, Request

DEFAULT_CONTEXT = 2048
"""Positions of a model that does not state its number; lm-evaluation-harness assumes the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Input of a generation."""

    ids: tuple[int, ...]
    budget: int
    """Most tokens to generate: the requested number, or what the model's positions allow."""
    cut: int
    """Tokens cut off at its start, for lack of positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Tokens that a model reads, the last of which are predicted."""

    ids: tuple[int, ...]
    """Tokens read; the last token of the continuation is only predicted."""
    targets: tuple[int, ...]
    """Start of the continuation: the first is predicted after ``ids[start]``."""
    cut: int

    @property
    def start(self) -> int:
        return len(self.ids) - len(self.targets)


class Encoder:
    """Caches encodings by request object, so that base, adapter and previous adapter read the same tokens."""

    def __init__(self, tokenizer: Any, *, chat: ChatTokenizer, context: int) -> None:
        self.tokenizer, self.context, self._chat = tokenizer, context, chat
        self._prompts: dict[int, tuple[Request, Prompt]] = {}
        self._scored: dict[int, tuple[Request, Scored]] = {}
        first = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._prefix_id, self._prefix = int(first), str(tokenizer.decode([first]))

    def prompt(self, request: Generate) -> Prompt:
        """Returns the prompt, cut at its start to leave positions for the answer, but never below half of the model's positions."""
        if id(request) not in self._prompts:
            ids = self.render(request.messages, request.tools, request.template_kwargs) if request.messages else self.encode(request.text)
            space = max(self.context - request.max_new_tokens, self.context // 2)
            budget = max(1, min(request.max_new_tokens, self.context - space))
            found = Prompt(ids=tuple(ids[-space:]), budget=budget, cut=max(0, len(ids) - space))
            self._prompts[id(request)] = (request, found)
        return self._prompts[id(request)][1]

    def scored(self, request: Likelihood) -> Scored:
        """Returns context and continuation, cut at the start to the model's positions."""
        if id(request) not in self._scored:
            context, continuation = self.pair(request)
            whole = [*context, *continuation]
            kept = whole[-(self.context + 1) :]
            targets = continuation[-(len(kept) - 1) :] if continuation else []
            found = Scored(ids=tuple(kept[:-1]), targets=tuple(targets), cut=len(whole) - len(kept))
            self._scored[id(request)] = (request, found)
        return self._scored[id(request)][1]

    def cut(self, requests: Sequence[Request]) -> int:
        """Returns how many of `requests` did not fit completely."""
        texts = [self.prompt(r).cut for r in requests if isinstance(r, Generate)]
        return sum(n > 0 for n in [*texts, *(self.scored(r).cut for r in requests if isinstance(r, Likelihood))])

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), kwargs: Mapping[str, TemplateValue] = NO_KWARGS
    ) -> list[int]:
        """Returns the token ids of a conversation and the start of the answer, by the model's own chat template."""
        return self._chat.render_turns([dict(m) for m in messages], tools=[dict(t) for t in tools], kwargs=kwargs)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a plain text, with the tokenizer's prefix unless the text begins with that."""
        if text.startswith(self._prefix):
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return list(self.tokenizer.encode(text))

    def pair(self, request: Likelihood) -> tuple[list[int], list[int]]:
        """Returns the token ids of context and continuation.

        1. Without a context, the model's first token (else its last) stands for one.
        2. Spaces at the end of the context belong to the continuation: tokenizers put them in front of words.
        3. Both are encoded as one text, and the context's tokens are those that it has alone.
        """
        context, continuation = request.context, request.continuation
        if not context:
            ids = list(self.tokenizer.encode(continuation, add_special_tokens=False))
            return (ids[:1], ids[1:]) if ids[:1] == [self._prefix_id] else ([self._prefix_id], ids)
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        whole, alone = self.encode(context + continuation), self.encode(context)
        return alone, whole[len(alone) :]


def batches(
    requests: Sequence[Generate], encoder: Encoder, *, size: int
) -> Iterator[tuple[tuple[str, ...], int, list[tuple[Generate, Prompt]]]]:
    """Yields stops, budget and at most `size` requests that are generated together: prompts of similar length, to reduce padding."""
    alike: dict[tuple[tuple[str, ...], int], list[tuple[Generate, Prompt]]] = {}
    for request in requests:
        prompt = encoder.prompt(request)
        alike.setdefault((request.stops, prompt.budget), []).append((request, prompt))
    for (stops, budget), requested in alike.items():
        requested.sort(key=lambda pair: len(pair[1].ids))
        for at in range(0, len(requested), size):
            yield stops, budget, requested[at : at + size]


def end_tokens(declared: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer: the model's (`declared`), the tokenizer's, and the end of a ChatML turn if there is one."""
    found = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    return sorted(i for i in found if i is not None)


def text_of(ids: Sequence[int], tokenizer: Any, *, ends: Sequence[int], stops: Sequence[str]) -> str:
    """Returns the answer in generated tokens: before the first of `ends` and of `stops`, without special tokens."""
    kept = next((list(ids[:at]) for at, token in enumerate(ids) if token in ends), list(ids))
    text = tokenizer.decode(kept, skip_special_tokens=True).replace("\0", "\ufffd")  # databases refuse NUL
    return str(text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))])


def positions(config: Any, tokenizer: Any) -> int:
    """Returns how many tokens a model of this config can read."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    declared = getattr(tokenizer, "model_max_length", None)
    return int(declared) if declared and declared < 1 << 24 else DEFAULT_CONTEXT
