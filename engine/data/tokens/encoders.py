"""Converts pieces of text to token ids, and assigns ids to turns: by segments where that is exact, else by offsets.

1. The tokenizer finds its added tokens first and tokenizes the text between them separately: the ids of a text are the ids of its segments,
   and a segment between two control tokens of a template needs to be tokenized only once.
2. In byte-level BPE an id stands for a fixed number of bytes, so a turn that starts inside a segment starts at a known id.
3. Other tokenizers (a space put before the first word, lossy normalization, tokens that absorb adjacent white space) are asked for the
   offsets of the whole text. Both ways give the same ids; tests compare them.
4. If only the first ids are needed, a long text is tokenized up to a prefix that has them (:func:`encode_prefix`).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from core.errors import InvalidDataset
from engine.data.tokens.escapes import spell_out
from engine.data.tokens.patterns import Piece
from engine.data.tokens.probes import Slot
from engine.data.tokens.words import Words

ID_BYTES = 4
"""Bytes of one id in the packed form of segments."""

UNCUT = 1 << 62
"""As a number of tokens: all of them."""
PREFIX_CHARS = 8
"""Characters of the first prefix per wanted id: English text has 4 to 5 per token."""
MARGIN_CHARS = 1024
"""Characters at the end of a prefix whose ids may differ from those of the whole text: longer than any pre-tokenizer's piece of ordinary
text."""
WORD_EDGE = re.compile(r"(?<=\S) (?=\S)")

Mark = tuple[int, int, int]
"""A turn (-1: none) and its ids, from start to end (exclusive); a token shared by two turns belongs to the later, and to any turn before
none."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Ids that are the same in every text of the plan."""

    ids: bytes
    turn: int


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two control tokens."""

    pieces: tuple[Piece, ...]
    turn: int | None
    """Turn of all pieces; None if they differ."""
    lead: bytes
    """Ids of the first piece alone if it is a literal of another turn than the only other turn after it."""


Plan = tuple[Fixed | Run, ...]
"""A text as fixed ids and runs, in order."""


@dataclass(frozen=True, slots=True)
class Job:
    """One text to encode."""

    plan: Plan
    contents: Sequence[str]
    """Contents of the plan's slots."""
    spelled: Mapping[str, str]
    """Placeholders in the contents and the control tokens they stand for, to be tokenized as plain text."""


class Encoder(Protocol):
    def plan(self, pieces: Iterable[Piece], *, reused: bool) -> Plan:
        """Returns how to encode texts made of `pieces`; a `reused` plan has its literals tokenized now."""
        ...

    def encode(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[tuple[NDArray[np.int32], list[Mark]]]:
        """Returns the ids of each text, and its turns. Beyond `most` ids, later ones may be wrong or missing; at least one is there."""
        ...

    def count(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[int]:
        """Returns the number of ids of each text; beyond `most`, any number above it."""
        ...

    def offsets(self, text: str, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the first character of `text` that each of its first `ids` touches, and the one after the last: shape (len(ids), 2)."""
        ...


def encoder_for(tokenizer: Tokenizer, control: Iterable[str]) -> Encoder:
    """Returns the fastest encoder that is exact for `tokenizer`."""
    return Segments(tokenizer, control) if is_byte_level(tokenizer) else Offsets(tokenizer)


def exact_chars(most: int) -> int:
    """Characters up to which a text is tokenized as a whole, even if no more than `most` ids of it are needed."""
    return PREFIX_CHARS * (most + MARGIN_CHARS)


def encode_prefix(text: str, most: int, num_ids: Callable[[str], int]) -> str:
    """Returns a prefix of `text` whose first `most` ids are those of `text`, with more than `most` of them; `text` itself if it is short.

    A prefix ends at a space between two words if there is one in its last ``MARGIN_CHARS`` characters. It is long enough once it has more
    than `most` ids and one for each byte of those characters, whose ids may differ from those in the whole text. Otherwise a prefix four
    times as long is tried, so that the work is bounded by `most` and the longest token, not by the text.

    Exact if a pre-tokenizer cuts at such spaces, or into pieces shorter than the margin. In an unbroken run of characters, merges are
    assumed not to depend on text ``MARGIN_CHARS`` further on.
    """
    size = exact_chars(most)
    while size < len(text):
        edges = [found.start() for found in WORD_EDGE.finditer(text, size - MARGIN_CHARS, size)]
        part = text[: edges[-1] if edges else size]
        if num_ids(part) > most + len(part[-MARGIN_CHARS:].encode()):
            return part
        size *= 4
    return text


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that splits a text at these tokens, the longest first, and keeps them at odd places."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "((?!))")


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Returns whether ids stand for fixed bytes of the text and text outside of a segment does not affect its ids."""
    added = tokenizer.get_added_tokens_decoder().values()
    model, normalizer = tokenizer.model, tokenizer.normalizer
    return (
        isinstance(model, BPE)
        and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        and not any(t.lstrip or t.rstrip or t.single_word for t in added)
        and (normalizer is None or json.loads(normalizer.__getstate__())["type"] == "NFC")
        and tokenizer.pre_tokenizer is not None
        and '"ByteLevel"' in (steps := tokenizer.pre_tokenizer.__getstate__().decode()).replace(" ", "")
        and '"add_prefix_space":true' not in steps.replace(" ", "")
        and "Metaspace" not in steps
    )


class Segments:
    """Encodes by segments; for tokenizers that satisfy :func:`is_byte_level`."""

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._words = Words(tokenizer)
        added = list(tokenizer.get_added_tokens_decoder().values())
        self._control = frozenset(control)
        ids = {t.content: number for number, t in tokenizer.get_added_tokens_decoder().items()}
        alone = _stands_alone(added, self._control, unnormalized=tokenizer.normalizer is None)
        self._cut = {token.content: ids[token.content] for token in alone}
        self._cut_pattern = _any_of(self._cut)
        self._other_added = {content: number for content, number in ids.items() if content not in self._control}
        """Added tokens that are no control tokens, such as ``<think>`` of some models: a template may write them beside escaped ones."""
        self._other_pattern = _any_of(self._other_added)
        self._plain: Tokenizer | None = None

    def plan(self, pieces: Iterable[Piece], *, reused: bool) -> Plan:
        ops: list[Fixed | Run] = []
        run: list[Piece] = []
        for piece in pieces:
            text, turn = piece
            if isinstance(text, Slot):
                run.append(piece)
                continue
            for index, part in enumerate(self._cut_pattern.split(text)):
                if index % 2:
                    self._close(ops, run, reused)
                    _append(ops, Fixed(array("i", [self._cut[part]]).tobytes(), turn))
                elif part:
                    run.append((part, turn))
        self._close(ops, run, reused)
        return tuple(ops)

    def _close(self, ops: list[Fixed | Run], run: list[Piece], reused: bool) -> None:
        """Ends `run` and appends it to `ops`."""
        if not run:
            return
        turns = [turn for _, turn in run]
        turn = turns[0] if len(set(turns)) == 1 else None
        first = run[0][0]
        if reused and turn is not None and all(isinstance(text, str) for text, _ in run):
            _append(ops, Fixed(self._words.encode(["".join(str(text) for text, _ in run)])[0], turn))
        else:
            two = reused and isinstance(first, str) and turns[0] != turns[-1] and len(set(turns[1:])) == 1
            ops.append(Run(tuple(run), turn, self._words.encode([str(first)])[0] if two else b""))
        run.clear()

    def encode(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[tuple[NDArray[np.int32], list[Mark]]]:
        runs = iter(self._encode_runs(jobs, most))
        out = []
        for job in jobs:
            parts: list[bytes] = []
            marks: list[Mark] = []
            done = 0
            for op in job.plan:
                if isinstance(op, Fixed):
                    ids, turn = op.ids, op.turn
                    marks.append((turn, done, done + len(ids) // ID_BYTES))
                else:
                    text, ids = next(runs)
                    if op.turn is not None:
                        marks.append((op.turn, done, done + len(ids) // ID_BYTES))
                    elif op.lead and ids.startswith(op.lead):
                        middle = done + len(op.lead) // ID_BYTES
                        marks += (op.pieces[0][1], done, middle), (op.pieces[-1][1], middle, done + len(ids) // ID_BYTES)
                    else:
                        marks += self._marks(op, job, text, ids, done)
                parts.append(ids)
                done += len(ids) // ID_BYTES
            out.append((np.frombuffer(b"".join(parts), dtype="<i4"), marks))
        return out

    def count(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[int]:
        runs = iter(self._encode_runs(jobs, most))
        return [sum(len(op.ids if isinstance(op, Fixed) else next(runs)[1]) for op in job.plan) // ID_BYTES for job in jobs]

    def offsets(self, text: str, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        decoded = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if not text.startswith(decoded.rstrip("\ufffd")):  # normalization changed the text
            found = _asked_offsets(self._tokenizer, text)
            if len(found) >= len(ids):
                return found[: len(ids)]
        raw = np.frombuffer(text.encode(), np.uint8)
        char_ends = np.append(np.flatnonzero(raw & 0xC0 != 0x80)[1:], len(raw))
        ends = self._words.id_bytes.ends(ids)
        first, last = np.searchsorted(char_ends, np.concatenate(([0], ends))[:-1], side="right"), np.searchsorted(char_ends, ends) + 1
        return np.minimum(np.stack((first, last), axis=1), len(text))

    def _encode_runs(self, jobs: Sequence[Job], most: int) -> list[tuple[str, bytes]]:
        """Returns text and ids of every run of `jobs`, in order; for a job of far more than `most` ids, up to that number."""
        groups = [[_text(op.pieces, job) for op in job.plan if isinstance(op, Run)] for job in jobs]
        long = {i for i, texts in enumerate(groups) if sum(map(len, texts)) > exact_chars(most)}
        found = iter(self._encode_texts([(text, job) for i, job in enumerate(jobs) if i not in long for text in groups[i]]))
        out: list[tuple[str, bytes]] = []
        for index, (job, texts) in enumerate(zip(jobs, groups, strict=True)):
            out += self._first_of(job, texts, most) if index in long else [next(found) for _ in texts]
        return out

    def _first_of(self, job: Job, texts: Sequence[str], most: int) -> Iterator[tuple[str, bytes]]:
        """Yields the runs of a long job until there are more than `most` ids."""
        for text in texts:
            part, ids = ("", b"") if most < 0 else self._encode_texts([(self._prefix(text, job, most), job)])[0]
            most -= len(ids) // ID_BYTES
            yield part, ids

    def _prefix(self, text: str, job: Job, most: int) -> str:
        return encode_prefix(text, most, lambda part: len(self._encode_texts([(part, job)])[0][1]) // ID_BYTES)

    def _encode_texts(self, given: Sequence[tuple[str, Job]]) -> list[tuple[str, bytes]]:
        """Returns the texts of runs with their placeholders replaced, and their ids."""
        texts = [spell_out(text, job.spelled) for text, job in given]
        plain = [i for i, (text, job) in enumerate(given) if any(mark in text for mark in job.spelled)]
        if not plain:
            return list(zip(texts, self._words.encode(texts), strict=True))
        escaped = dict(zip(plain, self._encode_plain([texts[i] for i in plain]), strict=True))
        others = iter(self._words.encode([text for i, text in enumerate(texts) if i not in escaped]))
        return [(text, escaped[i] if i in escaped else next(others)) for i, text in enumerate(texts)]

    def _encode_plain(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the ids of texts in which control tokens are plain text; other added tokens stay tokens."""
        if self._plain is None:
            self._plain = Tokenizer.from_str(
                json.dumps({**json.loads(self._tokenizer.to_str()), "added_tokens": [], "post_processor": None})
            )
        split = [self._other_pattern.split(text) for text in texts]
        pieces = iter(self._plain.encode_batch_fast([part for parts in split for part in parts[::2]], add_special_tokens=False))
        encoded: list[list[int]] = []
        for parts in split:
            ids = list[int]()
            for index, part in enumerate(parts):
                ids += [self._other_added[part]] if index % 2 else next(pieces).ids
            encoded.append(ids)
        forbidden = {self._tokenizer.token_to_id(token) for token in self._control}
        if any(forbidden.intersection(ids) for ids in encoded):
            message = (
                "a control token of the base model is a word of its vocabulary and cannot be escaped; choose the policy 'drop' or 'reject'"
            )
            raise InvalidDataset(message, code="control_token_in_content")
        return [array("i", ids).tobytes() for ids in encoded]

    def _marks(self, run: Run, job: Job, text: str, ids: bytes, done: int) -> list[Mark]:
        """Returns the turns of a run whose pieces belong to several; a token across an edge belongs to the turn it touches."""
        numbers = np.frombuffer(ids, dtype="<i4")
        ends = self._words.id_bytes.ends(numbers)
        size = len(text.encode())
        known = len(ends) > 0 and int(ends[-1]) == size
        if known:
            starts = np.concatenate(([0], ends[:-1]))
        else:  # normalization changed the text: ask for offsets
            starts, ends = _asked_offsets(self._tokenizer, text).T
        marks: list[Mark] = []
        place = 0
        for piece, turn in run.pieces:
            said = piece if isinstance(piece, str) else piece.fill(job.contents[piece.index])
            said = spell_out(said, job.spelled)
            start, place = place, place + (len(said.encode()) if known else len(said))
            if turn >= 0 and place > start:
                first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, place, side="left")
                marks.append((turn, done + int(first), done + int(last)))
        return marks


class Offsets:
    """Encodes whole texts and asks for the characters of each id; for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def plan(self, pieces: Iterable[Piece], *, reused: bool) -> Plan:  # noqa: ARG002 - nothing can be tokenized before it is whole
        return (Run(tuple(pieces), None, b""),)

    def encode(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[tuple[NDArray[np.int32], list[Mark]]]:
        filled = [_pieces(job) for job in jobs]
        encoded = self._tokenizer.encode_batch([self._prefix(job, most) for job in jobs], add_special_tokens=False)
        out = []
        for pieces, encoding in zip(filled, encoded, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            marks: list[Mark] = []
            place = 0
            for text, turn in pieces:
                start, place = place, place + len(text)
                if turn >= 0 and place > start:
                    first, last = np.searchsorted(offsets[:, 1], start, side="right"), np.searchsorted(offsets[:, 0], place, side="left")
                    marks.append((turn, int(first), int(last)))
            out.append((np.asarray(encoding.ids, dtype=np.int32), marks))
        return out

    def count(self, jobs: Sequence[Job], *, most: int = UNCUT) -> list[int]:
        return [len(e.ids) for e in self._tokenizer.encode_batch_fast([self._prefix(job, most) for job in jobs], add_special_tokens=False)]

    def offsets(self, text: str, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        found = _asked_offsets(self._tokenizer, text)[: len(ids)]
        return np.concatenate((found, np.full((len(ids) - len(found), 2), len(text))))

    def _prefix(self, job: Job, most: int) -> str:
        text = "".join(text for text, _ in _pieces(job))
        return encode_prefix(text, most, lambda part: len(self._tokenizer.encode(part, add_special_tokens=False).ids))


def _asked_offsets(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).offsets, dtype=np.int64).reshape(-1, 2)


def _pieces(job: Job) -> list[tuple[str, int]]:
    """Returns the pieces of all runs of `job`, filled, and their turns."""
    pieces = (piece for op in job.plan if isinstance(op, Run) for piece in op.pieces)
    return [(p if isinstance(p, str) else p.fill(job.contents[p.index]), turn) for p, turn in pieces]


def _text(pieces: Sequence[Piece], job: Job) -> str:
    return "".join([p if isinstance(p, str) else p.fill(job.contents[p.index]) for p, _ in pieces])


def _append(ops: list[Fixed | Run], op: Fixed) -> None:
    """Appends `op` to `ops`, merged with the previous one if it belongs to the same turn."""
    last = ops[-1] if ops else None
    if isinstance(last, Fixed) and last.turn == op.turn:
        ops[-1] = Fixed(last.ids + op.ids, op.turn)
    else:
        ops.append(op)


def _stands_alone(added: Sequence[AddedToken], control: frozenset[str], *, unnormalized: bool) -> list[AddedToken]:
    """Returns the control tokens that are always found: none overlaps another added token or is changed by normalization."""
    return [
        token
        for token in added
        if token.content in control
        and (unnormalized or not token.normalized)
        and not any(_overlap(token.content, other.content) for other in added if other.content != token.content)
    ]


def _overlap(one: str, other: str) -> bool:
    """Returns whether an occurrence of one can share characters with an occurrence of the other."""
    if one in other or other in one:
        return True
    return any(a[-k:] == b[:k] for a, b in ((one, other), (other, one)) if b[0] in a[1:] for k in range(1, min(len(a), len(b))))
