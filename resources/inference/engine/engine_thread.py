"""The engine thread: takes requests, runs one batch, and emits pieces of text.

Only this thread uses the model. It attaches and detaches adapters between two steps, so running requests never wait longer than that and
never see a partly attached adapter.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.typed_json import JsonObject
from engine.data import END_OF_THINKING, THINK, CallForm, ChatTokenizer, Conversation, ThinkMarks
from resources.inference.engine import lora
from resources.inference.engine.batch import SLICE, Batch, Row
from resources.inference.engine.fair_turns import PROMPT_TOKEN, FairTurns, Share
from resources.inference.engine.grammar import Constraint, Grammars, TooComplex
from resources.inference.engine.sampler import Sampling, TokenLogprob, logprobs_of, pick
from resources.inference.engine.text import Detokenizer, StopSearch

CHECK_S = 1.0
"""Seconds between looks at whether the engine's thread lives while a caller waits for it: a step may take minutes."""
MAX_JOIN_TOKENS = 256
"""Tokens of prompts that join together, as many as of a slice that is scored."""
MAX_WAITING, MAX_WAITING_EACH = 4096, 512
"""Answers that wait for a slot, of all tenants and of each. A request has up to 128."""
UNNAMED = Share()
"""The share of requests that name no tenant."""
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of an answer; the last one has a `finish_reason`."""

    text: str
    completion_tokens: int
    finish_reason: str | None = None
    """``stop`` or ``length``; ``error`` if the engine failed, ``too_complex`` if the answer's constraint exceeded its limits."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens since the last piece, if the request wants them."""


@dataclass(kw_only=True, eq=False)
class Generation:
    """One request in the engine."""

    row: Row
    max_tokens: int
    share: Share
    sampling: Sampling
    stops: StopSearch
    text: Detokenizer
    emit: Callable[[Piece], None]
    """Called from the engine's thread."""
    source: torch.Generator | None = None
    constraint: Constraint | None = None
    unsent: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of tokens that no piece has yet."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Remove the request from the batch at the next step."""
        self.cancelled.set()


@dataclass(kw_only=True, eq=False)
class Scoring:
    """A prompt whose tokens get log-probabilities, one slice between two steps."""

    row: Row
    share: Share
    top: int
    emit: Callable[[Sequence[TokenLogprob] | None], None]
    """Called from the engine's thread with each slice; with None if the engine failed."""
    slices: Iterator[torch.Tensor]
    num_scored: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Compute no further slice."""
        self.cancelled.set()


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Prefill:
    """Requests whose prompts are being computed, one slice between two steps."""

    generations: list[Generation]
    slices: Iterator[torch.Tensor | None]


class Engine:
    """The base model with its adapters. Thread-safe; :meth:`close` ends the thread."""

    def __init__(self, model_dir: Path, *, max_batch: int = 32) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
        self._chat, self._rendering = ChatTokenizer.load(model_dir), threading.Lock()
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=self.dtype, use_safetensors=True, trust_remote_code=False)
        model.to(self.device).eval().requires_grad_(requires_grad=False)
        routing = lora.Routing()
        self.layers = lora.install(model, routing)
        self.context_length = int(model.config.max_position_embeddings)
        self._ends = _end_tokens(model, self.tokenizer)
        self.grammars = Grammars(self.tokenizer, ends=self._ends, vocabulary=int(model.config.vocab_size))
        pad = next(i for i in (self.tokenizer.pad_token_id, *self._ends, 0) if i is not None)
        self._batch = Batch(model, routing, pad=pad, device=self.device)
        self._make_batch: Callable[[], Batch] = lambda: Batch(model, routing, pad=pad, device=self.device)
        self._active: dict[int, Generation] = {}
        """In the batch or in a prefill."""
        self._prefills: list[Prefill] = []
        self._attached: set[str] = set()
        self._turns: FairTurns[Generation] = FairTurns(
            max_rows=max_batch, max_join_tokens=MAX_JOIN_TOKENS, max_waiting=MAX_WAITING, max_waiting_each=MAX_WAITING_EACH
        )
        self._scorings: list[Scoring] = []
        self._decoders: dict[frozenset[str], Callable[[list[int]], str]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation up to the answer, rendered as for training: same template engine, same fixed date."""
        with self._rendering:
            return self._chat.encode_prompt(conversation)

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template writes `tools` into the prompt."""
        with self._rendering:
            found = self._chat.tools
        return found is not None and found.definitions is True

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the chat template writes tool calls; None if they cannot be read back."""
        with self._rendering:
            return CallForm.of_tokenizer(self._chat)

    def reasoning_under(self, kwargs: JsonObject) -> ThinkMarks | None:
        """Return the marks of the reasoning that answers begin with, under variables of the template; None without ``<think>``."""
        with self._rendering:
            reasoning = self._chat.reasoning
            if reasoning is None:
                return None
            marks = reasoning.marks_under(kwargs)
            has_marks = marks.after == END_OF_THINKING and (not marks.before or (marks.before == THINK and reasoning.facts.field))
            return marks if has_marks else None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary."""
        return self.grammars.vocabulary

    def encode_text(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text)["input_ids"]]

    def text_offsets(self, prompt: str | list[int]) -> list[int]:
        """Return where in the prompt's text each of its tokens begins; tokens that the tokenizer adds have no text."""
        if isinstance(prompt, str):
            ends = [int(end) for _, end in self.tokenizer(prompt or "\n", return_offsets_mapping=True)["offset_mapping"]]
        else:
            text = Detokenizer(self.decode)
            ends = list(accumulate(len(text.add(token)) for token in prompt))
        return [0, *accumulate(ends, max)][: len(ends)]

    def submit(
        self,
        prompt: list[int],
        *,
        adapter: str | None,
        max_tokens: int,
        sampling: Sampling,
        stops: Sequence[str],
        constraint: Constraint | None = None,
        shown: Collection[str] = (),
        share: Share = UNNAMED,
        emit: Callable[[Piece], None],
    ) -> Generation:
        """Queue a request; `emit` is called with each piece, the last of which has a finish reason. Of the special tokens, only `shown` are
        part of the text. ``QueueFull`` if too many wait."""
        generation = Generation(
            row=Row(prompt=prompt, adapter=adapter),
            share=share,
            max_tokens=max_tokens,
            sampling=sampling,
            stops=StopSearch(stops),
            text=Detokenizer(self.decoder(shown)),
            emit=emit,
            source=sampling.generator(),
            constraint=constraint,
        )
        with self._wake:
            self._turns.add(generation, share, num_tokens=len(prompt))
            self._wake.notify()
        return generation

    def decoder(self, shown: Collection[str] = ()) -> Callable[[list[int]], str]:
        """Return the function that makes text of tokens, of which only `shown` special ones have one."""
        key = frozenset(shown)
        if key not in self._decoders:
            hidden = frozenset(i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special and token.content not in key)
            self._decoders[key] = lambda ids: str(self.tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False))
        return self._decoders[key]

    def score(
        self,
        prompt: list[int],
        *,
        adapter: str | None,
        top: int,
        share: Share = UNNAMED,
        emit: Callable[[Sequence[TokenLogprob] | None], None],
    ) -> Scoring:
        """Queue a prompt; `emit` is called with the log-probabilities of its tokens but the first, which nothing predicts."""
        row = Row(prompt=prompt, adapter=adapter)
        scoring = Scoring(row=row, share=share, top=top, emit=emit, slices=self._batch.prompt_logits(row))
        with self._wake:
            self._turns.begin(share)
            self._scorings.append(scoring)
            self._wake.notify()
        return scoring

    def read_adapter(self, directory: Path) -> dict[str, lora.LoraPair]:
        """Read matrices from disk, in the caller's thread so that no step waits for the disk."""
        return lora.read(directory, dtype=self.dtype, device=self.device)

    def attach(self, name: str, pairs: dict[str, lora.LoraPair]) -> None:
        def work() -> None:
            lora.attach(self.layers, name, pairs)
            self._attached.add(name)

        self._between_steps(work)

    def detach(self, name: str) -> None:
        """Detach an adapter. Requests that still need it end with an error, never with the base's answer."""

        def work() -> None:
            self._attached.discard(name)
            orphans = [g for g in self._active.values() if g.row.adapter == name]
            self._drop(orphans)
            self._end_with_error(orphans)
            lora.detach(self.layers, name)

        self._between_steps(work)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _between_steps(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in the engine's thread, after the step in progress. ``RuntimeError`` if the thread has ended."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as e:
                done.set_exception(e)

        with self._wake:
            self._commands.append(run)
            self._wake.notify()
        while not wait([done], timeout=CHECK_S).done:
            if not self._thread.is_alive() and not done.done():
                raise RuntimeError("the engine has ended; restart the server")
        return done.result()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._turns or self._active or self._scorings or self._closed):
                    self._wake.wait()
                if self._closed:
                    break
                commands, self._commands = self._commands, deque()
                self._turns.drop(lambda g: g.cancelled.is_set())
                stay = [g for g in self._active.values() if not g.cancelled.is_set()]
                for g in stay:
                    if g.row.generated:  # it got a token in the last step
                        self._turns.charge(g.share)
                joining = self._turns.take(Counter(g.share.tenant for g in stay), newcomers_only=bool(self._prefills))
            for command in commands:
                command()
            try:
                self._advance(joining)
            except BaseException:  # a panic in llguidance is not an Exception, and this thread must survive it
                log.exception("engine step failed; its requests end with an error")
                self._fail(joining)
            self._score_slice()
        self._fail(self._turns)
        for scoring in self._scorings:
            scoring.emit(None)

    def _score_slice(self) -> None:
        """Score the next slice of a prompt of the tenant that received the fewest tokens."""
        with self._wake:
            for gone in [s for s in self._scorings if s.cancelled.is_set()]:
                self._scorings.remove(gone)
                self._turns.end(gone.share)
            scoring = min(self._scorings, key=lambda s: self._turns.received(s.share), default=None)
            if scoring is None:
                return
            self._turns.charge(scoring.share, SLICE * PROMPT_TOKEN)
        adapter = scoring.row.adapter
        try:
            if adapter is not None and adapter not in self._attached:
                raise RuntimeError(f"adapter {adapter} was detached")
            logits = next(scoring.slices)
            at = scoring.num_scored + 1
            scoring.num_scored += len(logits)
            scoring.emit(logprobs_of(logits, scoring.row.prompt[at : at + len(logits)], top=scoring.top))
            if scoring.num_scored + 1 >= len(scoring.row.prompt):
                scoring.cancel()
        except BaseException:
            log.exception("scoring a prompt failed; its request ends with an error")
            scoring.cancel()
            scoring.emit(None)

    def _advance(self, joining: list[Generation]) -> None:
        """Compute a slice of each prefill, and the first token of those that end, so that it waits for no other row; then run one step of
        all rows."""
        self._drop([g for g in self._active.values() if g.cancelled.is_set()])
        lost = [g for g in joining if g.row.adapter is not None and g.row.adapter not in self._attached]
        self._end_with_error(lost)
        joining = [g for g in joining if g not in lost]
        if joining:
            self._active |= {id(g.row): g for g in joining}
            self._prefills.insert(0, self._prefill(joining))
        for prefill in list(self._prefills):
            logits = next(prefill.slices)
            if logits is not None:
                self._prefills.remove(prefill)
                self._accept(prefill.generations, logits)
        if self._batch.rows:
            self._accept([self._active[id(r)] for r in self._batch.rows], self._batch.step())

    def _prefill(self, generations: list[Generation]) -> Prefill:
        return Prefill(generations=generations, slices=self._batch.prefill([g.row for g in generations]))

    def _accept(self, generations: Sequence[Generation], logits: torch.Tensor) -> None:
        self._drop([g for g, row_logits in zip(generations, logits, strict=True) if self._pick_token(g, row_logits)])

    def _pick_token(self, g: Generation, logits: torch.Tensor) -> bool:
        """Pick the next token of an answer and add it; True if the answer has ended."""
        try:
            wanted = g.sampling.adjusted(logits, g.row.generated)
            allowed = wanted if g.constraint is None else g.constraint.mask(wanted)
            token = pick(allowed, g.sampling, g.source)
            if g.sampling.top_logprobs is not None:
                g.unsent += logprobs_of(logits[None], [token], top=g.sampling.top_logprobs)
            return self._add_token(g, token)
        except TooComplex as e:
            log.warning("the constraint of an answer exceeded its limits: %s", e)
            g.emit(Piece(text="", completion_tokens=len(g.row.generated), finish_reason="too_complex"))
            return True

    def _add_token(self, g: Generation, token: int) -> bool:
        """Add a token to an answer and emit the text that it completes; True if the answer has ended."""
        if token in self._ends:
            return self._end(g, "stop", g.text.finish())
        g.row.generated.append(token)
        complete = g.constraint is not None and g.constraint.take(token)
        last = complete or len(g.row.generated) >= g.max_tokens
        new = g.text.add(token) + (g.text.finish() if last else "")
        if last:
            return self._end(g, "stop" if complete else "length", new)
        shown, stopped = g.stops.add(new)
        if stopped or shown:
            self._emit(g, shown, "stop" if stopped else None)
        return stopped

    def _end(self, g: Generation, reason: str, text: str) -> bool:
        shown, stopped = g.stops.add(text)
        rest = "" if stopped else g.stops.finish()
        self._emit(g, shown + rest, "stop" if stopped else reason)
        return True

    def _emit(self, g: Generation, text: str, finish_reason: str | None) -> None:
        unsent, g.unsent = tuple(g.unsent), []
        g.emit(Piece(text=text, completion_tokens=len(g.row.generated), finish_reason=finish_reason, logprobs=unsent))

    def _drop(self, generations: Sequence[Generation]) -> None:
        for g in generations:
            self._active.pop(id(g.row), None)
        self._batch.leave([g.row for g in generations])
        rests = [(p, [g for g in p.generations if id(g.row) in self._active]) for p in self._prefills]
        self._prefills = [p if len(rest) == len(p.generations) else self._prefill(rest) for p, rest in rests if rest]

    def _fail(self, joining: Iterable[Generation]) -> None:
        self._end_with_error(list({id(g): g for g in [*self._active.values(), *joining]}.values()))
        self._active, self._prefills = {}, []
        self._batch = self._make_batch()

    def _end_with_error(self, generations: Sequence[Generation]) -> None:
        for g in generations:
            g.emit(Piece(text="", completion_tokens=len(g.row.generated), finish_reason="error"))


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the model's, the tokenizer's, and the end of a ChatML turn if there is one."""
    given = model.generation_config.eos_token_id
    found = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    return frozenset(i for i in found if i is not None)
