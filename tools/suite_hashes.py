"""Generates the hashes of an evaluation suite that ship with the platform, from a local copy of the suite.

``python -m tools.suite_hashes gsm8k PATH/TO/test.jsonl MIT``: rows of ``question`` and ``answer``. Each answer is hashed twice, as
published and without GSM8K's calculator annotations (``<<16-3=13>>``), because most derived datasets omit them. Only for suites whose
licence allows it; put its notice into ``ft_assets/datasets/checks/contamination/hashed_suites/NAME.license.txt``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from ft_assets.datasets.checks.contamination.overlap import VERSION, SuiteGrams
from ft_assets.datasets.checks.contamination.shipped_suites import DIRECTORY, ShippedSuite, write_suite

ANNOTATION = re.compile(r"<<[^<>]*>>")


def hashed(name: str, path: Path, license_name: str) -> tuple[ShippedSuite, SuiteGrams]:
    """Returns the suite in `path`, with its hashes."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    items = [f"{row['question']}\n{row['answer']}" for row in rows]
    both = SuiteGrams.of(text for item in items for text in (item, ANNOTATION.sub("", item)))
    grams = replace(both, num_items=len(items), unmatchable=SuiteGrams.of(items).unmatchable)
    suite = ShippedSuite(
        name=name,
        field="question,answer",
        num_items=grams.num_items,
        unmatchable=grams.unmatchable,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        version=VERSION,
        license=license_name,
    )
    return suite, grams


if __name__ == "__main__":
    made, its_grams = hashed(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    write_suite(DIRECTORY, made, its_grams)
    sys.stdout.write(f"{made.name}: {made.num_items} items, {len(its_grams.grams)} hashes\n")
