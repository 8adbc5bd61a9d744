"""Removes near duplicates with rensa: `python rensa_minhash.py TEXTS RESULT default|equal|deduplicator`.

default: RMinHash of words with RMinHashLSH at 0.9, 128 permutations and 16 bands, as in its README. equal: character 5-grams and 14
bands of 9. deduplicator: RMinHashDeduplicator with LSH over character 5-grams, which compares estimates with the threshold.
"""

# The peer is installed in an environment of its own.
# mypy: ignore-errors

import json
import resource
import sys
from importlib.metadata import version
from pathlib import Path

from rensa import RMinHash, RMinHashDeduplicator, RMinHashLSH

SETTINGS = {
    "default": "words, 16 x 8, estimate >= 0.9",
    "equal": "character 5-grams, 14 x 9, candidates as they are",
    "deduplicator": "character 5-grams, RMinHashDeduplicator(0.9, 128, use_lsh=True)",
}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tokens_of(text: str, settings: str) -> list[str]:
    return text.split() if settings == "default" else list({text[i : i + 5] for i in range(max(1, len(text) - 4))})


def sketch_of(text: str, settings: str, permutations: int) -> RMinHash:
    sketch = RMinHash(num_perm=permutations, seed=42)
    sketch.update(tokens_of(text, settings))
    return sketch


def removed_rows(rows: list[tuple[int, str]], settings: str) -> list[int]:
    removed = []
    if settings == "deduplicator":
        deduplicator = RMinHashDeduplicator(threshold=0.9, num_perm=128, use_lsh=True)
        for row, text in rows:
            if not deduplicator.add(str(row), sketch_of(text, settings, 128)):
                removed.append(row)
        return removed
    permutations, bands = (128, 16) if settings == "default" else (126, 14)
    lsh = RMinHashLSH(threshold=0.9, num_perm=permutations, num_bands=bands)
    kept: dict[int, RMinHash] = {}
    for row, text in rows:
        sketch = sketch_of(text, settings, permutations)
        found = [key for key in lsh.query(sketch) if settings == "equal" or kept[key].jaccard(sketch) >= 0.9]
        if found:
            removed.append(row)
        else:
            lsh.insert(row, sketch)
            kept[row] = sketch
    return removed


def main(texts: str, result: str, settings: str) -> None:
    start = cpu_seconds()
    with open(texts) as lines:
        rows = [(int(row["id"]), row["text"]) for row in map(json.loads, lines)]
    removed = removed_rows(rows, settings)
    found = {"version": version("rensa"), "rows": len(rows), "cpu_s": cpu_seconds() - start, "removed": removed}
    Path(result).write_text(json.dumps({**found, "settings": SETTINGS[settings]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
