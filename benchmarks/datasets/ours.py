"""This project's dataset stage: whole, and the parts of it that have a counterpart in the usual pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.measure import Clock, timed
from engine.data import identity
from engine.data.checks.contamination.overlap import SuiteIndex
from engine.data.checks.pii.scanner import PiiScanner
from engine.data.dedup import near_pairs
from engine.data.dedup.normalization import CodePoints, fold, near_text
from engine.data.ingest import IngestResult, validate_file
from engine.data.packs.build import build_pack
from engine.data.packs.manifest import PackManifest
from engine.data.packs.pack_settings import PackSettings
from engine.data.policies import Policies
from engine.data.schema import Example, canonical
from engine.data.stored_rows import load_rows
from engine.data.tokens.chat_tokenizer import ChatTokenizer

WINDOW = 4096
ROWS_PER_BLOCK = 4096
"""As validation takes them: larger arrays would measure page faults."""
CHECKS_OFF: dict[str, Any] = {"exact_duplicates": "warn", "near_duplicates": "off", "contamination": "off", "pii": "off"}


def saved_suites(suites: Mapping[str, Iterable[str]], directory: Path) -> tuple[Path, float]:
    """The index of `suites` in `directory`, and the CPU seconds that building it took."""
    index, cpu_s = timed(lambda: SuiteIndex.build(suites))
    index.save(directory)
    return directory, cpu_s


def whole(path: Path, output: Path, *, suites: Path | None, workers: int | None = 1, **options: Any) -> IngestResult:
    """Every check: bad rows, exact and near duplicates, contamination, personal data, split; good rows as Parquet."""
    policies = Policies(bad_rows="drop", pii="warn")
    return validate_file(path, filename=path.name, output=output, policies=policies, suites=suites, workers=workers, **options)


def rows_only(path: Path) -> IngestResult:
    """Reading and every check of single rows, and their hashes; nothing that compares rows, no output."""
    return validate_file(path, filename=path.name, policies=Policies(bad_rows="drop", **CHECKS_OFF), workers=1)


def packed(rows: Path, model_dir: Path, out_dir: Path) -> PackManifest:
    """Tokens, loss masks, windows and files of a validated dataset."""
    settings = PackSettings(max_seq_len=WINDOW)
    return build_pack(rows, ChatTokenizer.load(model_dir), settings, out_dir, dataset_id="ds_benchmark", workers=1, model_dir=model_dir)


def warm_up(path: Path, scratch: Path, suites: Path, model_dir: Path) -> None:
    """Run everything once on a small file: imports and compiled kernels are loaded before anything is timed."""
    whole(path, scratch / "warm.parquet", suites=suites)
    packed(scratch / "warm.parquet", model_dir, scratch / "warm-pack")
    texts = [near_text(e) for e in load_rows(scratch / "warm.parquet")]
    near_removed(texts)
    PiiScanner().scan(texts)


def stages(rows: Path, suites: Path, model_dir: Path, *, num_tokenized: int) -> tuple[Clock, dict[str, int]]:
    """CPU seconds of each part on the rows that validation kept, one part after the other in this process; and rows of each."""
    examples: list[Example] = list(load_rows(rows))
    index, scanner, tokenizer = SuiteIndex.load(suites), PiiScanner(), ChatTokenizer.load(model_dir)
    clock = Clock()
    decoder = msgspec.json.Decoder(Example)
    folded: list[CodePoints] = []
    keys: list[NDArray[np.uint64]] = []
    for start in range(0, len(examples), ROWS_PER_BLOCK):
        few = examples[start : start + ROWS_PER_BLOCK]
        with clock.stage("canonical form"):
            spelled = [canonical(e) for e in few]
        with clock.stage("decode canonical form"):
            for data in spelled:
                decoder.decode(data)
        with clock.stage("content hash"):
            identity.content_hashes(few)
        with clock.stage("near text and fold"):
            texts = [near_text(e) for e in few]
            folded.append(fold(texts))
        with clock.stage("MinHash band keys"):
            keys.append(near_pairs.band_keys(folded[-1]))
        with clock.stage("contamination"):
            index.shares(folded[-1])
        with clock.stage("personal data"):
            scanner.scan(texts)
    points = CodePoints(np.concatenate([p.codes for p in folded]), _offsets(folded))
    with clock.stage("pairs, true Jaccard, clusters"):
        rows_kept(points, np.concatenate(keys))
    halves = {
        "template, tokens and mask": examples[:num_tokenized],
        "template and count of tokens": examples[num_tokenized:][:num_tokenized],
    }
    for name, few in halves.items():  # rows of their own: the tokenizer remembers words
        work = tokenizer.count_tokens_batch if "count" in name else partial(tokenizer.encode_batch, max_seq_len=WINDOW)
        with clock.stage(name):
            for start in range(0, len(few), 256):
                work(few[start : start + 256])
    counts = dict.fromkeys(clock.seconds, len(examples))
    return clock, counts | {name: len(few) for name, few in halves.items()}


def _offsets(folded: Sequence[CodePoints]) -> NDArray[np.int64]:
    lengths = np.concatenate([np.diff(p.offsets) for p in folded])
    return np.concatenate(([0], np.cumsum(lengths)))


def rows_kept(points: CodePoints, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Rows kept, from keys to verified pairs, all texts in memory."""
    n, found = len(points), np.empty((0, 2), np.int64)
    for band in range(keys.shape[1]):
        found = _with_verified(found, np.stack(near_pairs.candidate_pairs(np.ascontiguousarray(keys[:, band])), axis=1), points)
    while True:
        more = _with_verified(found, np.stack(near_pairs.second_look(n, (found[:, 0], found[:, 1])), axis=1), points)
        if len(more) == len(found):
            return near_pairs.kept(n, (found[:, 0], found[:, 1]))
        found = more


def _with_verified(found: NDArray[np.int64], candidates: NDArray[np.int64], points: CodePoints) -> NDArray[np.int64]:
    fresh = np.unique(candidates, axis=0)
    near = near_pairs.jaccard(points, fresh[:, 0], points, fresh[:, 1]) >= np.float32(near_pairs.THRESHOLD)
    return np.unique(np.concatenate((found, fresh[near])), axis=0)


def near_removed(texts: Sequence[str]) -> NDArray[np.int64]:
    """Indexes of the texts that are near an earlier one that stays."""
    points = fold(texts)
    return np.flatnonzero(~rows_kept(points, near_pairs.band_keys(points)))
