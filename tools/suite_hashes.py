"""Makes the hashes of a contamination list that ships with the platform, from local copies of a benchmark's published files.

``python -m tools.suite_hashes mmlu LICENSE test-00000-of-00001.parquet``: the benchmark, the text of its licence, and its test split as
Parquet, JSONL or CSV with a header (several files are one split). Nothing is downloaded, and no text of the benchmark is kept. Each answer
of GSM8K is hashed twice, as published and without its calculator annotations (``<<16-3=13>>``), because most derived datasets omit them.

Then run ``python -m tools.licences``, which names the licence in ``THIRD-PARTY.md``, and commit the files: images and wheels hold what is
committed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from core.errors import FtError
from core.typed_json import JsonObject
from engine.data.checks.contamination.benchmarks import field_of, field_text
from engine.data.checks.contamination.overlap import VERSION, SuiteGrams
from engine.data.checks.contamination.shipped_suites import DIRECTORY, ShippedSuite, write_suite
from engine.data.readers.row_stream import open_rows

ANNOTATION = re.compile(r"<<[^<>]*>>")
GSM8K = "gsm8k"
SOURCES: Mapping[str, tuple[str, str]] = {
    GSM8K: ("MIT", "https://github.com/openai/grade-school-math"),
    "mmlu": ("MIT", "https://github.com/hendrycks/test"),
    "hellaswag": ("MIT", "https://github.com/rowanz/hellaswag"),
    "truthfulqa": ("Apache-2.0", "https://github.com/sylinrl/TruthfulQA"),
    "arc_easy": ("CC-BY-SA-4.0", "https://allenai.org/data/arc"),
    "arc_challenge": ("CC-BY-SA-4.0", "https://allenai.org/data/arc"),
}
"""Licence (SPDX) and origin of benchmarks whose licence lets hashes of them ship with its notice; under CC-BY-SA-4.0 the hashes are too."""
MAX_BYTES = 256 << 20


def hashed(name: str, paths: Sequence[Path]) -> tuple[ShippedSuite, SuiteGrams]:
    """Returns the list of the benchmark in `paths`, with its hashes; ``SystemExit`` says what to correct."""
    if name not in SOURCES:
        raise SystemExit(f"{name} is not a benchmark whose hashes may ship; choose one of {', '.join(SOURCES)}")
    rows = [(path, row) for path in paths for row in _rows(path)]
    if not rows:
        raise SystemExit(f"{', '.join(map(str, paths)) or 'no file'}: no rows; name the files of the test split")
    path, first = rows[0]
    field = "question,answer" if name == GSM8K else field_of(name, first, filename=path.name)
    items = [_text(row, field, where=path) for path, row in rows]
    both = SuiteGrams.of(text for item in items for text in ((item, ANNOTATION.sub("", item)) if name == GSM8K else (item,)))
    grams = replace(both, num_items=len(items), unmatchable=SuiteGrams.of(items).unmatchable)
    suite = ShippedSuite(
        name=name,
        field=field,
        num_items=grams.num_items,
        unmatchable=grams.unmatchable,
        sha256=hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest(),
        version=VERSION,
        license=SOURCES[name][0],
    )
    return suite, grams


def _rows(path: Path) -> Iterator[JsonObject]:
    for row in open_rows(path, filename=path.name, column_map=None, max_bytes=MAX_BYTES).rows:
        if not isinstance(row.value, dict):
            raise SystemExit(f"{path}: row {row.number} cannot be read")
        yield row.value


def _text(row: JsonObject, field: str, *, where: Path) -> str:
    parts = [field_text(row, one) for one in field.split(",")]
    if not all(parts):
        raise SystemExit(f"{where}: a row has no text in {field}")
    return "\n".join(parts)


def make(name: str, licence: Path, paths: Sequence[Path], *, directory: Path = DIRECTORY) -> ShippedSuite:
    """Writes hashes, description and licence notice into `directory`; returns the description."""
    suite, grams = hashed(name, paths)
    spdx, origin = SOURCES[name]
    notice = f"{name}.npz holds hashes of 13-grams of the test split of {name}, {origin},\nand none of its text ({spdx}).\n\n"
    write_suite(directory, suite, grams)
    (directory / f"{name}.license.txt").write_text(notice + licence.read_text())
    return suite


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit("python -m tools.suite_hashes BENCHMARK LICENCE_FILE FILE...")
    try:
        made = make(sys.argv[1], Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
    except FtError as error:
        raise SystemExit(error.message) from error
    sys.stdout.write(f"{made.name}: {made.num_items} items ({made.license}); now run python -m tools.licences\n")
