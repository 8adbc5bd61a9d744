"""Log-probabilities in OpenAI's two formats: of chat completions, and of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resources.inference.engine.sampler import TokenLogprob
from resources.inference.engine.text import Detokenizer

TokenBytes = Callable[[int], bytes]
"""Bytes of one token, special tokens included."""


def text_of(token: bytes) -> str:
    """Return the text of a token; one that holds a part of a character is written as OpenAI's API writes it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def of_chat(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        found = token_bytes(token)
        return {"token": text_of(found), "logprob": logprob, "bytes": list(found)}

    content = [{**entry(t.token, t.logprob), "top_logprobs": [entry(*one) for one in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def of_first(token: int, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the entry of a prompt's first token, which nothing predicts, in the format of completions."""
    return {"tokens": [text_of(token_bytes(token))], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


def of_completion(tokens: Sequence[TokenLogprob], offsets: Sequence[int], token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the entries of tokens that begin at these characters of the text."""

    def likeliest(token: TokenLogprob) -> dict[str, float]:
        """Return texts with log-probabilities: the likeliest, and the token itself. Of tokens with one text the likeliest counts."""
        found: dict[str, float] = {}
        for one, logprob in (*token.top, (token.token, token.logprob)):
            text = text_of(token_bytes(one))
            found[text] = max(logprob, found.get(text, logprob))
        return found

    return {
        "tokens": [text_of(token_bytes(t.token)) for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [likeliest(t) for t in tokens],
        "text_offset": list(offsets),
    }


class TextOffsets:
    """Counts where in its text each generated token begins; a character of several tokens counts with the last of them."""

    def __init__(self, decode: Callable[[list[int]], str], *, start: int) -> None:
        self._text, self._at = Detokenizer(decode), start

    def take(self, tokens: Sequence[TokenLogprob]) -> list[int]:
        return [self._take(token.token) for token in tokens]

    def _take(self, token: int) -> int:
        before, self._at = self._at, self._at + len(self._text.add(token))
        return before


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return consecutive parts as one; both formats are objects of lists, but for null."""
    return {name: None if parts[0][name] is None else [one for part in parts for one in part[name]] for name in parts[0]}
