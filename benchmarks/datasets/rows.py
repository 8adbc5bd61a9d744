"""Generates labelled chat rows of about 1 KB, any number of them, the same for the same seed.

    python -m benchmarks.datasets.rows --rows 10000000 --seed 1 --output /tmp/rows.jsonl

Of the rows, 10 % are not ASCII (five scripts, a third of them escaped as \\uXXXX), 5 % copy an earlier row exactly (some with other white
space), 5 % nearly (0.3 to 4.5 % of the words replaced, removed or added), 2 % hold personal data, 0.3 % repeat an item of an
evaluation suite and 1.5 % are malformed in one of 30 ways. What was done to which row goes to ``<output>.labels`` as lines of
``row kind source detail``; rows without a line are plain. Blocks of 20,000 rows depend on nothing but the seed and their number,
so any number of processes writes the same file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.datasets.bad_rows import bad_row
from benchmarks.datasets.personal import personal
from benchmarks.datasets.suites import SIZES, escaped_items
from benchmarks.datasets.text import draw_words, lines_of_words, spell, trimmed
from benchmarks.datasets.vocabulary import SCRIPTS, table

VERSION = 1
"""Of everything that decides the rows; a change makes files anew."""
BLOCK_ROWS = 20_000
MEAN_WORDS, SIGMA = 120, 0.8
"""Lognormal lengths: a median of 87 words, and some rows of thousands, as in chats; 1,000 bytes a row in the mean."""
MIN_WORDS, MAX_WORDS = 16, 4_000
EXACT, NEAR, BAD, PERSONAL, CONTAMINATED, OTHER_SCRIPT = 0.05, 0.05, 0.015, 0.02, 0.003, 0.10
ESCAPED = 0.33
"""Of the rows in other scripts."""
EDIT_RATES = (0.003, 0.006, 0.01, 0.015, 0.02, 0.03, 0.045)
"""Share of a near copy's words that are edited: true Jaccard indexes of 0.7 to 0.99."""
SYSTEM_PROMPTS = (b"You are a helpful assistant.", b"You are a concise expert. Answer in English.", b"Answer truthfully; say when unsure.")

Turns = tuple[tuple[bytes, bytes], ...]
"""Role and content (escaped for JSON) of each message."""


@dataclass(frozen=True, slots=True)
class Label:
    row: int
    kind: str
    """exact, near, bad, pii or contaminated."""
    source: int
    """The row that was copied; -1 for none."""
    detail: str
    """Edit rate, fault, kind of personal data, suite."""


@dataclass(frozen=True, slots=True)
class Block:
    lines: list[bytes]
    labels: list[Label]
    originals: list[tuple[int, Turns, str]]
    """Rows that copies are made from: number, messages and script."""


def _to_line(turns: Turns) -> bytes:
    return b'{"messages": [' + b", ".join([b'{"role": "%b", "content": "%b"}' % turn for turn in turns]) + b"]}"


def _plain_rows(rng: np.random.Generator, r: random.Random) -> list[tuple[Turns, str]]:
    """A block of rows of text that is nobody's copy, with their scripts."""
    lengths = np.clip(rng.lognormal(np.log(MEAN_WORDS) - SIGMA**2 / 2, SIGMA, BLOCK_ROWS), MIN_WORDS, MAX_WORDS).astype(np.int64)
    scripts = np.where(rng.random(BLOCK_ROWS) < OTHER_SCRIPT, rng.integers(1, len(SCRIPTS) + 1, BLOCK_ROWS), 0)
    rows: list[tuple[Turns, str]] = [((), "")] * BLOCK_ROWS
    for number, script in enumerate(("ascii", *SCRIPTS)):
        where = np.flatnonzero(scripts == number)
        counts = lengths[where]
        data, starts = spell(rng, draw_words(rng, int(counts.sum())), script)
        at = 0
        for row, count in zip(where.tolist(), counts.tolist(), strict=True):
            rows[row] = (_turns(data, starts, at, count, r), script)
            at += count
    return rows


def _turns(data: bytes, starts: np.ndarray[tuple[int], np.dtype[np.int64]], at: int, count: int, r: random.Random) -> Turns:
    """Words `at` to `at + count` as a chat of one to three exchanges."""
    num = 1 if count < 60 else r.choice((1, 1, 2, 3))
    step = count // num
    cuts = [at]
    for turn in range(num):
        begin = at + turn * step
        cuts += [begin + max(2, int(step * r.uniform(0.15, 0.75))), begin + step if turn < num - 1 else at + count]
    edges = starts[cuts].tolist()
    texts = [trimmed(data[a:b]) for a, b in pairwise(edges)]
    chat = tuple((b"assistant" if i % 2 else b"user", text) for i, text in enumerate(texts))
    return ((b"system", r.choice(SYSTEM_PROMPTS)), *chat) if r.random() < 0.5 else chat


def _spaced(turns: Turns) -> Turns:
    """The same text with other white space."""
    return tuple((role, b"  " + text.replace(b" ", b"  ", 1) + b" \\n") for role, text in turns)


def _edited(turns: Turns, rate: float, script: str, r: random.Random) -> Turns:
    """`turns` with a share of its words replaced, removed or added; at least one."""
    spelled = table(script).words
    split = [text.split(b" ") for _, text in turns]
    said = [words for (role, _), words in zip(turns, split, strict=True) if role != b"system"]
    weights = [len(words) for words in said]
    for _ in range(max(1, round(rate * sum(weights) + r.random() - 0.5))):
        words = r.choices(said, weights)[0]
        at, how = r.randrange(len(words)), r.random()
        if how < 0.6 or len(words) < 3:
            words[at] = spelled[r.randrange(5_000)]
        elif how < 0.8:
            del words[at]
        else:
            words.insert(at, spelled[r.randrange(5_000)])
    return tuple((role, b" ".join(words)) for (role, _), words in zip(turns, split, strict=True))


def _contaminated(rng: np.random.Generator, turns: Turns, r: random.Random) -> tuple[Turns, str]:
    """A row that repeats an item: all of it with an answer of a third of its length, or the first half inside a row of its own."""
    suite = r.choice(tuple(SIZES))
    item = r.choice(escaped_items(suite))
    words = item.split(b" ")
    if r.random() < 0.5:
        answer = lines_of_words(rng, np.array([max(12, len(words) // 3)]))[0]
        return ((b"user", item), (b"assistant", answer)), suite
    (role, text), *rest = turns[-2:]
    return ((role, text + b" " + trimmed(b" ".join(words[: len(words) // 2]))), *rest), f"{suite}:half"


def _with_personal(turns: Turns, r: random.Random) -> tuple[Turns, str]:
    kind, value = personal(r)
    role, text = turns[-1]
    words = text.split(b" ")
    words.insert(r.randrange(len(words) + 1), value.encode())
    return (*turns[:-1], (role, b" ".join(words))), kind


@lru_cache(maxsize=4)
def _first_originals(seed: int) -> list[tuple[int, Turns, str]]:
    return block(seed, 0).originals


def block(seed: int, index: int) -> Block:
    """Rows `index` * 20,000 and on, with their labels. Copies are of earlier rows of the block or of the first block."""
    rng, r = np.random.default_rng([seed, index]), random.Random(f"{seed} {index}")
    far = _first_originals(seed) if index else []
    made = Block([], [], [])
    draws = rng.random(BLOCK_ROWS).tolist()
    limits = np.cumsum((EXACT, NEAR, BAD, PERSONAL, CONTAMINATED)).tolist()
    for number, (turns, script) in enumerate(_plain_rows(rng, r), start=index * BLOCK_ROWS):
        draw, label, line = draws[number - index * BLOCK_ROWS], None, b""
        copied = draw < limits[1] and made.originals
        if copied:
            source, turns, script = r.choice(far if far and r.random() < 0.5 else made.originals)
        if copied and draw < limits[0]:
            turns, label = (_spaced(turns) if r.random() < 0.3 else turns), Label(number, "exact", source, "")
        elif copied:
            rate = r.choice(EDIT_RATES)
            turns, label = _edited(turns, rate, script, r), Label(number, "near", source, str(rate))
        elif limits[1] <= draw < limits[2]:
            fault, line = bad_row([{"role": a.decode(), "content": json.loads(b'"' + b + b'"')} for a, b in turns], r)
            label = Label(number, "bad", -1, fault)
        elif limits[2] <= draw < limits[3]:
            turns, kind = _with_personal(turns, r)
            label = Label(number, "pii", -1, kind)
        elif limits[3] <= draw < limits[4]:
            turns, suite = _contaminated(rng, turns, r)
            label = Label(number, "contaminated", -1, suite)
        else:
            made.originals.append((number, turns, script))
        line = line or _to_line(turns)
        if script != "ascii" and r.random() < ESCAPED and (label is None or label.kind != "bad"):
            line = json.dumps(json.loads(line)).encode()
        made.lines.append(line)
        if label is not None:
            made.labels.append(label)
    return made


def _encoded(index: int, *, seed: int, num_rows: int) -> tuple[bytes, str, int]:
    """A block as the bytes of both files, cut to `num_rows` of the whole file."""
    made = block(seed, index)
    lines = made.lines[: num_rows - index * BLOCK_ROWS]
    labels = [f"{x.row}\t{x.kind}\t{x.source}\t{x.detail}\n" for x in made.labels if x.row < num_rows]
    return b"\n".join(lines) + b"\n", "".join(labels), len(lines)


def encoded_blocks(num_rows: int, seed: int, processes: int) -> Iterator[tuple[bytes, str, int]]:
    indexes = range(-(-num_rows // BLOCK_ROWS))
    work = partial(_encoded, seed=seed, num_rows=num_rows)
    if processes == 1 or len(indexes) == 1:
        yield from map(work, indexes)
        return
    _first_originals(seed)  # before the fork: processes share it, the vocabulary and the suites
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(work, indexes)


def write_rows(path: Path, *, num_rows: int, seed: int, processes: int = 2) -> Path:
    """The file and ``<path>.labels``; both are kept as they are if this size and seed were written before."""
    stamp = path.with_name(path.name + ".stamp")
    wanted = f"{num_rows} rows, seed {seed}, generator {VERSION}"
    if path.exists() and stamp.exists() and stamp.read_text() == wanted:
        return path
    stamp.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as rows, labels_path(path).open("w") as labels:
        for data, lines, _ in encoded_blocks(num_rows, seed, processes):
            rows.write(data)
            labels.write(lines)
    stamp.write_text(wanted)
    return path


def labels_path(path: Path) -> Path:
    return path.with_name(path.name + ".labels")


def read_labels(path: Path) -> list[Label]:
    """The labels of a file of rows, in the order of its rows."""
    with labels_path(path).open() as lines:
        fields = (line.rstrip("\n").split("\t") for line in lines)
        return [Label(int(row), kind, int(source), detail) for row, kind, source, detail in fields]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    start = time.perf_counter()
    write_rows(given.output, num_rows=given.rows, seed=given.seed, processes=given.processes)
    seconds, size = time.perf_counter() - start, given.output.stat().st_size
    print(f"{given.rows:,} rows, {size / given.rows:,.0f} bytes each, {given.rows / seconds:,.0f} rows/s: {given.output}")


if __name__ == "__main__":
    main()
