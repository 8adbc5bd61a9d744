"""Throws damaged files at the readers and at validation for as long as it is told to.

    python -m tests.fuzz.readers --seconds 180 [--seed 1] [--whole]

Prints the first input that crashes (its seed gives it again) and ends with 1. `--whole`: through all of validation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.errors import InvalidDataset
from engine.data import shapes
from engine.data.checks import all_codes
from engine.data.checks.turn_order import order_problems
from engine.data.ingest import Policies, validate_file
from engine.data.problems import Problem
from engine.data.readers import kernels_scan as scan
from engine.data.readers.json_rows import parse_json
from engine.data.readers.row_stream import Opened, open_rows
from engine.data.schema import canonical, parse_canonical
from tests.fuzz.files import any_file

MAX_BYTES = 50_000_000
"""Of a decompressed input: a flipped bit can make a container claim gigabytes."""


def read(path: Path, name: str, column_map: dict[str, str] | None) -> Counter[str]:
    """Reads every row as ingest does; the codes met. Raises where a promise of the readers is broken."""
    met: Counter[str] = Counter()
    try:
        opened = open_rows(path, filename=name, column_map=column_map, max_bytes=MAX_BYTES)
        for row in opened.rows:
            met.update(_codes(row.value, row.number))
    except InvalidDataset as refusal:
        if refusal.code not in all_codes():
            raise AssertionError(f"code {refusal.code} has no meaning") from refusal
        met[refusal.code] += 1
        return met
    if opened.consumed() > opened.total_bytes:
        raise AssertionError("more was consumed than there is")
    _check_blocks(opened, path, name)
    return met


def _codes(value: Any, number: int) -> list[str]:
    if isinstance(value, Problem):
        problems = [value]
    elif not isinstance(value, dict):
        return ["not_an_object"]
    elif (found := shapes.detect_shape(value)) is None:
        problems = [shapes.unknown_shape(value)]
    else:
        shapes.advice(value)
        shapes.unknown_fields(value, found[0])
        example, problems = shapes.to_example(value, found[0], row=number)
        if (example is None) != bool(problems):
            raise AssertionError("an example with problems, or none without")
        if example is not None:
            problems = list(order_problems(example))
            if not problems:
                _round_trip(example)
    json.dumps([asdict(p.at(row=number, byte_offset=None)) for p in problems]).encode()
    if unknown := {p.code for p in problems} - set(all_codes()):
        raise AssertionError(f"codes {unknown} have no meaning")
    return [p.code for p in problems] or ["good"]


def _round_trip(example: Any) -> None:
    try:
        spelled = canonical(example)
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
        return  # ingest reports these as wrong_type
    if canonical(parse_canonical(spelled)) != spelled:
        raise AssertionError("an example does not survive being stored")


def _check_blocks(opened: Opened, path: Path, name: str) -> None:
    """Lines of the blocks, scanned and parsed fast, hold what the exact reader finds."""
    if opened.blocks is None:
        return
    exact = {row.number: row for row in open_rows(path, filename=name, max_bytes=MAX_BYTES).rows}
    for block in opened.blocks:
        starts, ends = scan.split_lines(np.frombuffer(block.data, dtype=np.uint8))
        flags = scan.scan_lines(block.data, starts, ends)
        for index, (start, end, flag) in enumerate(zip(starts.tolist(), ends.tolist(), flags.tolist(), strict=True)):
            line, number = block.data[start:end], block.first_line + index
            if (number in exact) != bool(line.strip()) or bool(flag & scan.BLANK) == (number in exact):
                raise AssertionError(f"line {number} is a row to one reader only")
            if number not in exact:
                continue
            if exact[number].byte_offset != block.offset + start:
                raise AssertionError(f"line {number} stands at two places")
            if not flag & ~scan.NON_ASCII:
                _check_fast(line)


def _check_fast(line: bytes) -> None:
    try:
        fast = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if repr(parse_json(line.strip())) != repr(fast):
        raise AssertionError("the fast parser takes what the exact one does not")


def validate(path: Path, name: str, column_map: dict[str, str] | None) -> Counter[str]:
    """The whole of validation: a report in any case, and rows stored only if it is valid."""
    output = path.parent / "out" / "rows.parquet"
    output.parent.mkdir(exist_ok=True)
    output.unlink(missing_ok=True)
    policies = Policies(min_examples=1, max_bytes=MAX_BYTES)
    report = validate_file(path, filename=name, column_map=column_map, policies=policies, output=output).report
    if report.valid != output.exists() or report.valid != (report.dataset_id is not None):
        raise AssertionError("half registered")
    json.dumps(asdict(report), allow_nan=False).encode()
    return Counter(report.error_counts) or Counter(good=1)


def check(seed: int, where: Path, *, whole: bool = False) -> Counter[str]:
    """One input, made from `seed`."""
    data, name, column_map = any_file(random.Random(seed))
    path = where / "upload"
    path.write_bytes(data)
    return validate(path, name, column_map) if whole else read(path, name, column_map)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the next is one more")
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    met: Counter[str] = Counter()
    start, seed = time.process_time(), args.seed
    with tempfile.TemporaryDirectory() as where:
        while time.process_time() - start < args.seconds:
            try:
                met.update(check(seed, Path(where), whole=args.whole))
            except Exception:  # whatever it is, it is the finding
                traceback.print_exc()
                sys.stdout.write(f"seed {seed} crashes; {any_file(random.Random(seed))!r:.2000}\n")
                return 1
            seed += 1
    sys.stdout.write(f"{seed - args.seed} inputs, no crash; outcomes: {dict(met.most_common())}\n")
    sys.stdout.write(f"codes not met: {sorted(set(all_codes()) - set(met))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
