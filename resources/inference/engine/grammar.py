"""Constrains answers to a JSON schema or a grammar, by a mask of allowed tokens for each step.

`llguidance` computes the masks. Each schema or grammar is compiled once, cached and copied for each request. All limits are counts, not
times: the size of a schema, of its grammar and of its automaton, and the work of one step. Only the request that exceeds a limit ends.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

MAX_SCHEMA_BYTES = 1 << 16
"""Nested alternatives of this size, the slowest schemas found, take 0.1 s to compile on one core."""
MAX_COMPILED = 64
"""Compiled schemas in the cache."""
LIMITS = LLParserLimits(max_grammar_size=50_000, max_lexer_states=10_000, verbose_errors=False)
"""A state takes 1 to 2 kB. For the work of one step, the library's defaults apply: about 15 ms."""
MAX_MULTIPLE = 10_000
"""Largest least common multiple of a schema's ``multipleOf``, in units of their last decimal place. The library's limits do not cover it,
and compilation visits each remainder: 10,007 takes 0.04 s, 1,000,003 takes 7 s and 290 MB."""
OPTIONS: Any = {
    "whitespace_flexible": True,
    # A space, or a line break with indentation. Unbounded, a model may emit spaces until max_tokens.
    "whitespace_pattern": r"\x20|\x0A(\x20{0,24}|\x09{0,12})",
    "lenient": False,
    "coerce_one_of": False,
}
"""Every keyword of a schema is enforced or refused. These options override the schema's ``x-guidance``."""


class SchemaError(Exception):
    """A schema cannot be enforced; the message names the part and the reason."""


class TooComplex(Exception):
    """An answer cannot continue within the limits of one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkTokens:
    """Added tokens that are no text for a grammar; those that end an answer are not among them."""

    ids: Mapping[str, int]
    visible: frozenset[str]
    """Tokens that decoding does not leave out, such as ``<think>``."""


class Constraint:
    """The state of one answer in its grammar. Used by the engine's thread."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `logits` with -inf for tokens that may not come next; end tokens are allowed only if the answer is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise TooComplex(self._matcher.get_error())
        allowed = torch.from_numpy(np.unpackbits(bits, count=len(logits), bitorder="little").astype(np.bool_))
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def fresh(self) -> Constraint:
        """Return the constraint of another answer, in the state of this one."""
        return Constraint(self._matcher.deep_copy())

    def take(self, token: int) -> bool:
        """Advance by a token that :meth:`mask` allowed; True if the answer is complete and nothing can follow."""
        if not self._matcher.consume_token(token):
            raise TooComplex(self._matcher.get_error())
        return self._matcher.is_stopped()


class Grammars:
    """Compiled schemas for one tokenizer. Thread-safe; the first schema triggers the analysis of the tokenizer."""

    def __init__(self, tokenizer: Any, *, ends: Collection[int], vocabulary: int) -> None:
        self._hf, self._ends, self.vocabulary = tokenizer, sorted(ends), vocabulary
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return from_tokenizer(self._hf, n_vocab=max(self.vocabulary, len(self._hf)), eos_token=list(self._ends))

    @cached_property
    def tokens(self) -> MarkTokens:
        added = {int(i): token for i, token in self._hf.added_tokens_decoder.items() if self._tokenizer.is_special_token(int(i))}
        ids = {token.content: i for i, token in added.items() if i not in self._ends}
        return MarkTokens(ids=ids, visible=frozenset(token.content for token in added.values() if not token.special))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, whatever is before it; of a special token, its name."""
        return self._tokenizer.decode_bytes([token])

    def constraint(self, rules: Mapping[str, Any] | str) -> Constraint:
        """Return a new answer's constraint to a JSON schema, or to a grammar in Lark's syntax.

        Raises ``SchemaError`` if it is malformed, too large or cannot be enforced.
        """
        key = rules if isinstance(rules, str) else checked_text(rules)
        if (cached := self._copy(key)) is not None:
            return cached
        matcher = self._compile(key)
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return Constraint(matcher.deep_copy())

    def cached(self, rules: Mapping[str, Any] | str) -> Constraint | None:
        """Return :meth:`constraint` if `rules` are already compiled, else None. Never compiles."""
        return self._copy(rules if isinstance(rules, str) else checked_text(rules))

    def _copy(self, key: str) -> Constraint | None:
        with self._lock:
            if (matcher := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
            return Constraint(matcher.deep_copy())

    def _compile(self, rules: str) -> LLMatcher:
        try:
            is_schema = rules.startswith("{")
            grammar = LLMatcher.grammar_from_json_schema(rules, overrides=OPTIONS) if is_schema else LLMatcher.grammar_from_lark(rules)
        except ValueError as error:  # from its JSON parser
            raise SchemaError(_reason(str(error))) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise SchemaError(_reason(matcher.get_error()))
        return matcher


def checked_text(schema: Mapping[str, Any]) -> str:
    """Return the schema as JSON with its key order, which sets the order of the answer's properties; ``SchemaError`` if it is too large."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise SchemaError("the schema contains half of a surrogate pair; write the character itself") from error
    except RecursionError as error:
        raise SchemaError("the schema is nested too deeply; simplify it") from error
    if size > MAX_SCHEMA_BYTES:
        raise SchemaError(f"the schema has {size} bytes, limit {MAX_SCHEMA_BYTES}; simplify it")
    if _has_large_multiple(schema):
        raise SchemaError(
            f"the least common multiple of its multipleOf exceeds {MAX_MULTIPLE}, in units of their last decimal place; use smaller ones"
        )
    return text


def _has_large_multiple(schema: Mapping[str, Any]) -> bool:
    """Whether the least common multiple of all ``multipleOf`` in `schema` is too large, even if no number has to satisfy them all."""
    divisors = [Decimal(str(abs(number))) for number in _multiples(schema)]
    places = max((-int(divisor.as_tuple().exponent) for divisor in divisors), default=0)
    common = accumulate((int(divisor.scaleb(max(0, places))) for divisor in divisors), math.lcm)
    return any(multiple > MAX_MULTIPLE for multiple in common)


def _multiples(schema: Mapping[str, Any]) -> Iterator[int | float]:
    open_parts: list[Any] = [schema]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            number = part.get("multipleOf")
            if (isinstance(number, int) and not isinstance(number, bool)) or (isinstance(number, float) and math.isfinite(number)):
                yield number or 1  # the library refuses 0
        if isinstance(part, dict | list):
            open_parts += part.values() if isinstance(part, dict) else part


def _reason(error: str) -> str:
    """Return the library's reason on one line, without the names of its options."""
    if error.startswith("oneOf"):
        return "oneOf cannot be enforced, because its alternatives may overlap; use anyOf"
    return f"the schema cannot be enforced: {' '.join(error.split())[:300]}"
