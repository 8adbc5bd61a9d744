"""Ids of texts by their words, each tokenized once: byte-pair encoding is most of the cost of a pack, and words repeat.

A text is cut at single spaces between two characters that are no white space. Every pre-tokenizer in :data:`SPLITS` starts a new piece
at such a space and looks neither behind a piece nor past one character of white space, and BPE never merges across pieces: so the ids of
the parts are the ids of the whole. With any other pre-tokenizer texts are tokenized whole.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence, Set
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MAX_WORDS = 1 << 18
"""Words remembered of each kind: about 60 MB when all are in use."""
MAX_WORD_CHARACTERS = 64
"""Longer parts (addresses, Chinese or Thai sentences) hardly repeat and are not remembered."""
JOINED = 512
"""New words tokenized as one text."""
MARK = "\ue005"
"""A private-use character in place of a space at which a text is not cut."""
ODD = re.compile(r" \s+|[^\S ]+ \s*")
"""White space of two characters or more that holds a space."""
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


class IdBytes:
    """Bytes of text that each id of a byte-level tokenizer stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._table = np.zeros(max(vocabulary.values(), default=0) + 1, dtype=np.int64)
        for token, number in vocabulary.items():
            self._table[number] = len(token)  # one character of the byte-level alphabet for each byte
        for number, added in tokenizer.get_added_tokens_decoder().items():
            self._table[number] = len(added.content.encode())

    def ends(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """The byte after the last of each id."""
        return np.cumsum(self._table[ids])


class _Known:
    """Ids of the parts met so far, which all stand at the start of a text, or all after a space."""

    def __init__(self, before: str) -> None:
        self.before = before
        self.words: dict[str, bytes] = {}
        """Parts that can be looked up by splitting a text at its spaces."""
        self.odd: dict[str, bytes] = {}
        """Parts with white space at an edge, or with marked spaces inside: only valid after :func:`mark`."""

    def get(self, part: str) -> bytes | None:
        return self.words.get(part) or self.odd.get(part)

    def keep(self, part: str, ids: bytes) -> None:
        words = self.odd if MARK in part or not part or part[0].isspace() or part[-1].isspace() else self.words
        if len(words) >= MAX_WORDS:
            words.clear()
        words[part] = ids


class Words:
    """Ids of texts that hold no edge of a special token. Not safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = _cuts_at_spaces(tokenizer)
        self._firsts, self._others = _Known(""), _Known(" ")

    @cached_property
    def id_bytes(self) -> IdBytes:
        return IdBytes(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as little-endian 32-bit integers."""
        out = [self._find(text) for text in texts]
        late = [index for index, ids in enumerate(out) if ids is None]
        if late:
            for index, ids in zip(late, self._learn([texts[i] for i in late]), strict=True):
                out[index] = ids
        return [ids for ids in out if ids is not None]

    def _find(self, text: str) -> bytes | None:
        """Ids of a text of known words with single spaces between them."""
        if not self._cuts:
            return self._firsts.get(text)
        first, gap, rest = text.partition(" ")
        try:
            head = self._firsts.words[first]
            return head + b"".join(map(self._others.words.__getitem__, rest.split(" "))) if gap else head
        except KeyError:
            return None

    def _learn(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of texts with words that are new, or that stand between other white space than single spaces."""
        split = [mark(text).split(" ") if self._cuts else [text] for text in texts]
        firsts = self._ids_of({parts[0] for parts in split}, self._firsts)
        others = self._ids_of({part for parts in split for part in parts[1:]}, self._others)
        return [b"".join((firsts[parts[0]], *map(others.__getitem__, parts[1:]))) for parts in split]

    def _ids_of(self, parts: Set[str], known: _Known) -> dict[str, bytes]:
        """Ids of `parts`; those that were not known are, afterwards."""
        found = {part: known.get(part) for part in parts}
        new = [part for part, ids in found.items() if ids is None]
        for start in range(0, len(new), JOINED):
            group = new[start : start + JOINED]
            for part, ids in zip(group, self._encode(group, known.before), strict=True):
                found[part] = ids
                if len(part) <= MAX_WORD_CHARACTERS:
                    known.keep(part, ids)
        return {part: ids for part, ids in found.items() if ids is not None}

    def _encode(self, parts: Sequence[str], before: str) -> list[bytes]:
        """Ids of each part: of all as one text where they can be told apart in it, which costs half."""
        texts = [before + part.replace(MARK, " ") for part in parts]
        safe = before and not any(p == "" or p[0].isspace() or p[-1].isspace() for p in parts)
        if safe and len(parts) > 1:
            ids = np.asarray(self._tokenizer.encode("".join(texts), add_special_tokens=False).ids, dtype=np.int32)
            starts, wanted = self.id_bytes.ends(ids), np.cumsum([len(text.encode()) for text in texts])
            edges = np.searchsorted(starts, wanted)
            if len(starts) and starts[-1] == wanted[-1] and bool(np.all(starts[edges] == wanted)):
                return [part.tobytes() for part in np.split(ids, edges[:-1] + 1)]
        return [array("i", e.ids).tobytes() for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def mark(text: str) -> str:
    """`text` with :data:`MARK` for every space at which it must not be cut: those next to other white space."""
    return ODD.sub(lambda found: found.group().replace(" ", MARK), text)


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
