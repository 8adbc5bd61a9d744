"""What near-duplicate removal is judged by: true Jaccard indexes of labelled copies, computed with Python sets and none of our code."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.datasets.rows import read_labels

THRESHOLD = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    texts: dict[int, str]
    """Folded text of each good row that is no exact copy, by row: the input of every tool."""
    copies: dict[int, tuple[int, float]]
    """Near copies among them: the row that was copied and the true Jaccard index with it."""

    @property
    def pairs(self) -> dict[int, int]:
        """Copies that must be found: those at 0.9 and above."""
        return {row: source for row, (source, likeness) in self.copies.items() if likeness >= THRESHOLD}


def said(line: bytes) -> str:
    """All messages of a row but the system's."""
    return "\n".join(m["content"] for m in json.loads(line)["messages"] if m["role"] != "system")


def folded(text: str) -> str:
    """What is compared: NFKC, case folded, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def good_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The rows that were not made bad."""
    bad = {label.row for label in read_labels(path) if label.kind == "bad"}
    with path.open("rb") as lines:
        yield from ((row, line) for row, line in enumerate(lines) if row not in bad)


def grams(text: str) -> frozenset[str]:
    return frozenset(text[i : i + 5] for i in range(len(text) - 4)) or frozenset((text,))


def jaccard(a: str, b: str) -> float:
    left, right = grams(a), grams(b)
    return len(left & right) / len(left | right)


def truth(path: Path) -> Truth:
    """Of a file of rows with labels."""
    texts: dict[int, str] = {}
    seen: set[str] = set()
    for row, line in good_lines(path):
        text = folded(said(line))
        if text not in seen:
            seen.add(text)
            texts[row] = text
    labels = [label for label in read_labels(path) if label.kind == "near"]
    near = {label.row: label.source for label in labels if label.row in texts and label.source in texts}
    return Truth(texts=texts, copies={row: (source, jaccard(texts[row], texts[source])) for row, source in near.items()})


def write_texts(found: Truth, path: Path) -> Path:
    with path.open("w") as out:
        out.writelines(json.dumps({"id": str(row), "text": text}) + "\n" for row, text in found.texts.items())
    return path


def score(found: Truth, removed: Collection[int]) -> dict[str, float]:
    """Recall: labelled pairs of which not both rows are left. Precision: removed rows that are truly like a row of their family."""
    gone = set(removed)
    pairs = found.pairs
    hits = sum(row in gone or source in gone for row, source in pairs.items())
    families: dict[int, list[int]] = {}
    for row, (source, _) in found.copies.items():
        families.setdefault(source, [source]).append(row)
    family_of = {row: source for source, rows in families.items() for row in rows}
    right = sum(_has_twin(row, families.get(family_of.get(row, -1), ()), found) for row in gone)
    return {
        "pairs": len(pairs),
        "removed": len(gone),
        "recall": hits / len(pairs),
        "precision": right / len(gone) if gone else 1.0,
    }


def _has_twin(row: int, family: Iterable[int], found: Truth) -> bool:
    return any(jaccard(found.texts[row], found.texts[other]) >= THRESHOLD for other in family if other != row)
