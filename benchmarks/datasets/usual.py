"""The pipeline as most people would write it, one library call a row, and the same one tuned by somebody who knows the libraries.

Both keep the rows that pass, drop exact and near duplicates, and mark contaminated rows and rows with personal data. Neither says
what is wrong with a row beyond the library's message, looks at duplicate keys, verifies a near duplicate or checks a digit.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ValidationError

from benchmarks.datasets.measure import Clock

PATTERNS = {
    "email": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}",
    "phone": r"(?:\+\d{1,3}[ .-]?)?\(?\d{3}\)?[ .-]?\d{3}[ .-]\d{4}",
    "card": r"\b(?:\d[ -]?){13,16}\b",
    "iban": r"\b[A-Z]{2}\d{2}[A-Z0-9]{11,30}\b",
    "ssn": r"\b\d{3}-\d{2}-\d{4}\b",
    "ip": r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    "key": r"\b(?:sk-[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36})\b",
}
COMPILED = {kind: re.compile(pattern) for kind, pattern in PATTERNS.items()}
DIGIT = re.compile(r"\d")
GRAM = 13
PERMUTATIONS = 128
BANDS = (12, 10)
"""(b, r) of the tuned pipeline: finds 0.9995 of the pairs at Jaccard 0.9; datasketch's own choice for 0.9 is (5, 25)."""

Chats = list[list[dict[str, Any]]]
Tokenize = Callable[[Chats], int]


class UsualMessage(BaseModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class UsualRow(BaseModel):
    messages: list[UsualMessage]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a pipeline did with the rows, by number."""

    clock: Clock
    num_rows: int
    bad: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    exact: list[int] = field(default_factory=list)
    near: list[int] = field(default_factory=list)
    contaminated: list[int] = field(default_factory=list)
    personal: list[int] = field(default_factory=list)
    tokens: int = 0


def whole_text(messages: Iterable[dict[str, Any]]) -> str:
    return "\n".join(m["content"] for m in messages if m["role"] != "system")


def usual_index(suites: dict[str, list[str]]) -> set[str]:
    grams: set[str] = set()
    for items in suites.values():
        for item in items:
            words = re.findall(r"\w+", usual_normal(item))
            grams.update(" ".join(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1))
    return grams


def share(text: str, grams: set[str]) -> float:
    """Of the 13-grams of a text, those in `grams`."""
    words = re.findall(r"\w+", text)
    found = [" ".join(words[i : i + GRAM]) in grams for i in range(len(words) - GRAM + 1)]
    return sum(found) / len(found) if found else 0.0


def usual_normal(text: str) -> str:
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip().lower()


def usual(path: Path, *, limit: int, grams: set[str], tokenize: Tokenize | None, output: Path) -> Outcome:
    """json, pydantic, hashlib, datasketch with its defaults, a set of 13-grams, re: row by row."""
    from datasketch import MinHash, MinHashLSH

    clock, chats, rows = Clock(), [], []
    out = Outcome(clock=clock, num_rows=limit)
    with clock.stage("read and validate"), path.open("rb") as lines:
        for number, line in zip(range(limit), lines, strict=False):
            try:
                row = UsualRow.model_validate(json.loads(line)).model_dump()["messages"]
                if row[-1]["role"] != "assistant" or not all(m["content"] for m in row):
                    raise ValueError("the last message is not the assistant's, or one is empty")
            except (ValueError, ValidationError, IndexError, RecursionError):
                out.bad.append(number)
                continue
            chats.append(row)
            rows.append(number)
    with clock.stage("normal text and exact duplicates"):
        texts = [usual_normal(whole_text(chat)) for chat in chats]
        seen: set[str] = set()
        fresh = []
        for at, text in enumerate(texts):
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            (out.exact.append(rows[at]) if digest in seen else fresh.append(at))
            seen.add(digest)
    with clock.stage("near duplicates"):
        lsh, kept = MinHashLSH(threshold=0.9, num_perm=PERMUTATIONS), []
        for at in fresh:
            sketch = MinHash(num_perm=PERMUTATIONS)
            for i in range(len(texts[at]) - 4):
                sketch.update(texts[at][i : i + 5].encode("utf-8", "surrogatepass"))
            if lsh.query(sketch):
                out.near.append(rows[at])
            else:
                lsh.insert(at, sketch)
                kept.append(at)
    with clock.stage("contamination"):
        for at in kept:
            if share(texts[at], grams) > 0.5:
                out.contaminated.append(rows[at])
    with clock.stage("personal data"):
        for at in kept:
            text = whole_text(chats[at])
            if any([re.search(pattern, text) for pattern in PATTERNS.values()]):  # noqa: C419 - each kind is reported
                out.personal.append(rows[at])
    if tokenize is not None:
        with clock.stage("template, tokens and mask"):
            out.tokens = sum(tokenize([chats[at]]) for at in kept)
    with clock.stage("write"), output.open("w") as file:
        for at in kept:
            file.write(json.dumps({"messages": chats[at]}) + "\n")
    out.kept = [rows[at] for at in kept]
    return out


def tuned_index(suites: dict[str, list[str]]) -> set[int]:
    grams: set[int] = set()
    for items in suites.values():
        for item in items:
            grams.update(_gram_hashes(tuned_normal(item)))
    return grams


def tuned_normal(text: str) -> str:
    folded = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split())


WORD = re.compile(r"\w+").findall


def _gram_hashes(text: str) -> list[int]:
    """Of each 13 words, from the cached hashes of the words."""
    words = WORD(text)
    return list(map(hash, zip(*(words[i:] for i in range(GRAM)), strict=False)))


def tuned(path: Path, *, limit: int, grams: set[int], tokenize: Tokenize | None, output: Path) -> Outcome:
    """msgspec without a schema, one normal form for all stages, update_batch with xxh32, better bands, gated patterns, batches."""
    import xxhash
    from datasketch import MinHash, MinHashLSH

    clock = Clock()
    out = Outcome(clock=clock, num_rows=limit)
    chats: Chats = []
    rows: list[int] = []
    decode = msgspec.json.Decoder().decode
    with clock.stage("read and validate"), path.open("rb") as lines:
        for number, line in zip(range(limit), lines, strict=False):
            try:
                messages = decode(line)["messages"]
                good = _acceptable(messages)
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, RecursionError):
                good = False
            if good:
                chats.append(messages)
                rows.append(number)
            else:
                out.bad.append(number)
    with clock.stage("normal text and exact duplicates"):
        texts = [tuned_normal(whole_text(chat)) for chat in chats]
        seen: set[bytes] = set()
        fresh = []
        for at, text in enumerate(texts):
            digest = hashlib.sha256(text.encode()).digest()
            if digest in seen:
                out.exact.append(rows[at])
            else:
                seen.add(digest)
                fresh.append(at)
    with clock.stage("near duplicates"):
        lsh, kept = MinHashLSH(num_perm=PERMUTATIONS, params=BANDS), []
        first = MinHash(num_perm=PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest, scheme="affine32")
        for at in fresh:
            text, sketch = texts[at], first.copy()
            sketch.update_batch([gram.encode() for gram in {text[i : i + 5] for i in range(max(1, len(text) - 4))}])
            if lsh.query(sketch):
                out.near.append(rows[at])
            else:
                lsh.insert(at, sketch, check_duplication=False)
                kept.append(at)
    with clock.stage("contamination"):
        for at in kept:
            hashes = _gram_hashes(texts[at])
            if hashes and sum(map(grams.__contains__, hashes)) / len(hashes) > 0.5:
                out.contaminated.append(rows[at])
    with clock.stage("personal data"):
        out.personal = [rows[at] for at in kept if _personal(whole_text(chats[at]))]
    if tokenize is not None:
        with clock.stage("template, tokens and mask"):
            out.tokens = sum(tokenize([chats[at] for at in kept[i : i + 256]]) for i in range(0, len(kept), 256))
    with clock.stage("write"), output.open("wb") as file:
        encode = msgspec.json.Encoder().encode
        file.writelines(encode({"messages": chats[at]}) + b"\n" for at in kept)
    out.kept = [rows[at] for at in kept]
    return out


ROLES = frozenset(("system", "user", "assistant", "tool"))


def _acceptable(messages: Any) -> bool:
    if not isinstance(messages, list) or messages[-1]["role"] != "assistant":
        return False
    return all(m["role"] in ROLES and isinstance(m["content"], str) and m["content"] for m in messages)


def _personal(text: str) -> list[str]:
    kinds: Sequence[str] = []
    if "@" in text:
        kinds = ["email"]
    if DIGIT.search(text):
        kinds = [*kinds, "phone", "card", "iban", "ssn", "ip", "key"]
    return [kind for kind in kinds if COMPILED[kind].search(text)]
