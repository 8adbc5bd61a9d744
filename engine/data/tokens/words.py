"""Tokenizes texts by their words, each only once: byte-pair encoding is most of the cost of a pack, and words repeat.

A text is cut at single spaces between two characters that are not white space. Every pre-tokenizer in :data:`SPLITS` starts a new piece at
such a space and looks neither behind a piece nor past one character of white space, and BPE never merges across pieces: so the ids of the
parts are the ids of the whole. With any other pre-tokenizer texts are tokenized as a whole.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Sequence, Set
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from core.typed_json import JsonObject

MAX_WORDS = 1 << 18
"""Words remembered of each kind: about 60 MB when full."""
MAX_WORD_CHARACTERS = 64
"""Longer parts (addresses, Chinese or Thai sentences) hardly repeat and are not remembered."""
JOINED = 512
"""New words tokenized as one text."""
SPACE, END = "\ud800", "\ud801"
"""In marked texts only: a space at which the text is not cut, and an end in white space. Lone surrogates occur in no valid text."""
ODD = re.compile(r" \s+|[^\S ]+ \s*")
"""White space of two characters or more that includes a space."""
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, PUNCTUATION, SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}{upper}{LETTERS[1]}{lower}" for upper, lower in ("*+", "+*"))
SPLITS = frozenset(
    (
        *(f"{CONTRACTION}|{WORD}|{digits}|{PUNCTUATION}|{SPACES}" for digits in (r"\p{N}", r"\p{N}{1,3}")),
        *(
            f"{CASED[0]}{suffix}|{CASED[1]}{suffix}|{digits}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{SPACES}"
            for suffix, digits in ((f"{CONTRACTION}?", r"\p{N}{1,3}"), ("", r"\p{N}"))
        ),
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(f"\\{kind}{{1,{most}}}" for kind in ("d", "p{N}") for most in (1, 2, 3)),
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
        """Returns the byte after the last of each id."""
        return np.cumsum(self._table[ids])


class Words:
    """Ids of texts that contain no edge of a special token. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cuts = _cuts_at_spaces(tokenizer)
        self._firsts: dict[str, bytes] = {}
        """Ids of parts at the start of a text."""
        self._others: dict[str, bytes] = {}
        """Ids of parts after a space, keyed without it."""

    @cached_property
    def id_bytes(self) -> IdBytes:
        return IdBytes(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the ids of each text, as little-endian 32-bit integers."""
        out = [self._find(text) for text in texts]
        late = [index for index, ids in enumerate(out) if ids is None]
        marked = [mark(texts[index]) if self._cuts else texts[index] for index in late]
        new = []
        for index, text in zip(late, marked, strict=True):
            out[index] = self._find(text)
            if out[index] is None:
                new.append((index, text))
        if new:
            for (index, _), ids in zip(new, self._learn([text for _, text in new]), strict=True):
                out[index] = ids
        return [ids for ids in out if ids is not None]

    def _find(self, text: str) -> bytes | None:
        """Returns the ids of a text of known parts."""
        if not self._cuts:
            return self._firsts.get(text)
        first, gap, rest = text.partition(" ")
        try:
            head = self._firsts[first]
            return head + b"".join(map(self._others.__getitem__, rest.split(" "))) if gap else head
        except KeyError:
            return None

    def _learn(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the ids of marked texts of which some parts are new."""
        split = [text.split(" ") if self._cuts else [text] for text in texts]
        firsts = self._ids_of({parts[0] for parts in split}, self._firsts, before="")
        others = self._ids_of({part for parts in split for part in parts[1:]}, self._others, before=" ")
        return [b"".join((firsts[parts[0]], *map(others.__getitem__, parts[1:]))) for parts in split]

    def _ids_of(self, parts: Set[str], known: dict[str, bytes], *, before: str) -> dict[str, bytes]:
        """Returns the ids of `parts`, and remembers new ones."""
        found = {part: known[part] for part in parts & known.keys()}
        new = list(parts - found.keys())
        ended = [part for part in new if part.endswith(END)]
        inner = [part for part in new if not part.endswith(END)] if ended else new
        for start in range(0, len(inner), JOINED):
            group = inner[start : start + JOINED]
            found.update(zip(group, self._encode(group, before), strict=True))
        found.update(zip(ended, self._encode_alone(ended, before), strict=True))
        if len(known) + len(new) > MAX_WORDS:
            known.clear()
        known.update((part, found[part]) for part in new if len(part) <= MAX_WORD_CHARACTERS)
        return found

    def _encode(self, parts: Sequence[str], before: str) -> list[bytes]:
        """Returns the ids of each part: tokenizes all as one text if they can be separated in it, which costs half."""
        if not before:
            return self._encode_alone(parts, before)
        texts = [before + unmark(part) for part in parts]
        (whole,) = self._tokenizer.encode_batch_fast(["".join(texts)], add_special_tokens=False)
        ids = np.asarray(whole.ids, dtype=np.int32)
        ends, wanted = self.id_bytes.ends(ids), np.cumsum([len(text.encode()) for text in texts])
        edges = np.searchsorted(ends, wanted)
        if not len(ends) or ends[-1] != wanted[-1] or not bool(np.all(ends[edges] == wanted)):
            return self._encode_alone(parts, before)
        packed, cuts = ids.tobytes(), [0, *((edges + 1) * ids.itemsize).tolist()]
        return [packed[start:end] for start, end in itertools.pairwise(cuts)]

    def _encode_alone(self, parts: Sequence[str], before: str) -> list[bytes]:
        texts = [before + unmark(part) for part in parts]
        return [array("i", e.ids).tobytes() for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def mark(text: str) -> str:
    """Returns `text` marked so that it can be cut at its spaces and a part means the same wherever it occurs.

    A space next to other white space becomes :data:`SPACE`, and an end in white space is followed by :data:`END`.
    """
    text = ODD.sub(lambda found: found.group().replace(" ", SPACE), text)
    return text + END if text[-1:].isspace() else text


def unmark(part: str) -> str:
    return part.replace(SPACE, " ").replace(END, "")


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Returns whether the parts of a text cut at single spaces have the ids of the whole."""
    added = tokenizer.get_added_tokens_decoder().values()
    steps = [] if tokenizer.pre_tokenizer is None else _leaves(json.loads(tokenizer.pre_tokenizer.__getstate__()))
    return bool(steps) and all(" " not in t.content for t in added) and any(map(_splits_words, steps)) and all(map(_is_known, steps))


def _leaves(step: JsonObject) -> list[JsonObject]:
    return [leaf for s in step["pretokenizers"] for leaf in _leaves(s)] if step["type"] == "Sequence" else [step]


def _splits_words(step: JsonObject) -> bool:
    return bool(step["type"] == "ByteLevel" and step["use_regex"]) or (step["type"] == "Split" and " ?" in _regex(step) + "[^")


def _is_known(step: JsonObject) -> bool:
    if step["type"] == "Split":
        return step["behavior"] == "Isolated" and not step["invert"] and _regex(step) in SPLITS
    return bool(step["type"] == "Digits" or (step["type"] == "ByteLevel" and not step["add_prefix_space"]))


def _regex(step: JsonObject) -> str:
    return str(step["pattern"].get("Regex", ""))
