"""Ids of texts by their words, each tokenized once: byte-pair encoding is most of the cost of a pack, and words repeat.

A text is cut at single spaces between two characters that are no white space. Every pre-tokenizer in :data:`SPLITS` starts a new piece
at such a space and looks neither behind a piece nor past one character of white space, and BPE never merges across pieces: so the ids of
the parts are the ids of the whole. With any other pre-tokenizer texts are tokenized whole.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

MAX_WORDS = 1 << 18
"""Words remembered of each kind: about 60 MB when all are in use."""
MAX_WORD_CHARACTERS = 64
"""Longer parts (addresses, Chinese or Thai sentences) hardly repeat and are not remembered."""
CUT = re.compile(r"(?<=\S) (?=\S)")
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, PUNCTUATION, SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPLITS = frozenset(
    (
        *(f"{CONTRACTION}|{WORD}|{digits}|{PUNCTUATION}|{SPACES}" for digits in (r"\p{N}", r"\p{N}{1,3}")),
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{c}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{c}|{d}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
            for c, d in ((f"{CONTRACTION}?", r"\p{N}{1,3}"), ("", r"\p{N}"))
        ),
        *(rf"\{c}{{1,{n}}}" for c in ("d", "p{N}") for n in (1, 2, 3)),
        r"\d",
        r"\p{N}",
    )
)
"""Split patterns of GPT-2, Llama 3 (cl100k), Qwen 2 to 3, GPT-4o (o200k), Mistral (tekken), and of digits alone."""


class Words:
    """Ids of texts that hold no edge of a special token. Not safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = _cuts_at_spaces(tokenizer)
        self._firsts: dict[str, bytes] = {}
        self._others: dict[str, bytes] = {}
        """Keyed without the space before them."""

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as little-endian 32-bit integers."""
        out = [self._known(text) for text in texts]
        late = [index for index, ids in enumerate(out) if ids is None]
        for index, ids in zip(late, self._learn([texts[i] for i in late]), strict=True):
            out[index] = ids
        return [ids for ids in out if ids is not None]

    def _known(self, text: str) -> bytes | None:
        """Ids of a text of known words with single spaces between them."""
        if not self._cuts:
            return self._firsts.get(text)
        first, gap, rest = text.partition(" ")
        try:
            head = self._firsts[first]
            return head + b"".join(map(self._others.__getitem__, rest.split(" "))) if gap else head
        except KeyError:
            return None

    def _learn(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of texts with words that are new, or that stand between other white space than single spaces."""
        split = [CUT.split(text) if self._cuts else [text] for text in texts]
        firsts = {parts[0] for parts in split}
        others = {part for parts in split for part in parts[1:]}
        for known, wanted, before in ((self._firsts, firsts, ""), (self._others, others, " ")):
            if len(known) > MAX_WORDS:
                known.clear()
            new = [part for part in wanted if part not in known]
            ids = [array("i", e.ids).tobytes() for e in self._tokenizer.encode_batch_fast([before + n for n in new], add_special_tokens=False)]
            known.update(zip(new, ids, strict=True))
        out = [b"".join((self._firsts[parts[0]], *map(self._others.__getitem__, parts[1:]))) for parts in split]
        for known, wanted in ((self._firsts, firsts), (self._others, others)):
            for part in wanted:
                if len(part) > MAX_WORD_CHARACTERS or part[:1].isspace() or part[-1:].isspace():
                    del known[part]
        return out


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the parts of a text cut by :data:`CUT` have the ids of the whole."""
    added = tokenizer.get_added_tokens_decoder().values()
    steps = [] if tokenizer.pre_tokenizer is None else _leaves(json.loads(tokenizer.pre_tokenizer.__getstate__()))
    return bool(steps) and all(" " not in t.content for t in added) and any(map(_splits_words, steps)) and all(map(_is_known, steps))


def _leaves(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [leaf for s in step["pretokenizers"] for leaf in _leaves(s)] if step["type"] == "Sequence" else [step]


def _splits_words(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "ByteLevel" and step["use_regex"]) or (step["type"] == "Split" and " ?" in _regex(step) + "[^")


def _is_known(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return step["behavior"] == "Isolated" and not step["invert"] and _regex(step) in SPLITS
    return bool(step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"]))


def _regex(step: dict[str, Any]) -> str:
    return str(step["pattern"].get("Regex", ""))
