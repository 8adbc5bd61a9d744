"""Log-probabilities in OpenAI's two formats: of chat completions, and of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resources.inference.engine.sampler import TokenLogprob

Decode = Callable[[int], str]
"""Text of one token, control tokens included; ``\\ufffd`` where it holds a part of a character."""
BROKEN = "\ufffd"


def of_chat(tokens: Sequence[TokenLogprob], decode: Decode) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}

    content = [{**entry(t.token, t.logprob), "top_logprobs": [entry(*one) for one in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds the log-probabilities of one choice of a completion, piece by piece; `text_offset` goes on from piece to piece."""

    def __init__(self, decode: Decode) -> None:
        self._decode, self._offset = decode, 0

    def first(self, token: int) -> dict[str, Any]:
        """Return the entry of a prompt's first token, which nothing predicts."""
        return self._listed([self._decode(token)], [None], [None])

    def of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._decode(t.token) for t in tokens]
        return self._listed(texts, [t.logprob for t in tokens], [self._likeliest(t) for t in tokens])

    def _likeliest(self, token: TokenLogprob) -> dict[str, float]:
        """Return texts with log-probabilities: the likeliest, and the token itself. Of tokens with one text the likeliest counts."""
        found: dict[str, float] = {}
        for one, logprob in (*token.top, (token.token, token.logprob)):
            text = self._decode(one)
            found[text] = max(logprob, found.get(text, logprob))
        return found

    def _listed(self, texts: list[str], logprobs: list[Any], top: list[Any]) -> dict[str, Any]:
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return consecutive parts as one; both formats are objects of lists, but for null."""
    return {name: None if parts[0][name] is None else [one for part in parts for one in part[name]] for name in parts[0]}
