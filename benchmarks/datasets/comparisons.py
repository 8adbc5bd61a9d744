"""The comparisons, each a function that returns what the result file holds of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.datasets import near, ours, usual
from benchmarks.datasets.measure import Clock, cpu_seconds, timed
from benchmarks.datasets.model import model_directory, usual_tokenizer
from benchmarks.datasets.peers.run import run_peer
from benchmarks.datasets.rows import block, read_labels, write_rows
from benchmarks.datasets.suites import suites
from engine.data.packs.best_fit import best_fit_decreasing, fill

Pipeline = Callable[..., usual.Outcome]

SEED = 1
UNSEEN_SEEDS = (977, 1_289, 5_501)
"""Of the files on which recall and precision are measured; nothing was tuned on them."""
TRAINING_SEED = 99
"""Of the text that the tokenizer is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Rows of each comparison, so that none takes over two minutes."""

    usual: int = 500
    usual_tokens: int = 300
    tuned: int = 10_000
    tuned_tokens: int = 10_000
    ours: int = 100_000
    near: int = 10_000
    unseen: int = 100_000
    personal: int = 10_000
    contaminated: int = 100_000
    packed: int = 1_000_000
    packed_trl: int = 20_000


QUICK = Sizes(
    usual=100,
    usual_tokens=50,
    tuned=1_000,
    tuned_tokens=1_000,
    ours=20_000,
    near=2_000,
    unseen=20_000,
    personal=2_000,
    contaminated=20_000,
    packed=200_000,
    packed_trl=5_000,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What all comparisons stand on: files that are made once."""

    scratch: Path
    sizes: Sizes
    suites: Path
    model_dir: Path
    suites_cpu_s: float

    def rows(self, number: int, seed: int = SEED) -> Path:
        return write_rows(self.scratch / f"rows-{number}-{seed}.jsonl", num_rows=number, seed=seed)


def prepare(scratch: Path, sizes: Sizes) -> Ground:
    index, cpu_s = ours.saved_suites(suites(), scratch / "suites")
    model_dir = model_directory(scratch / "model-32k", _training_texts)
    ground = Ground(scratch=scratch, sizes=sizes, suites=index, model_dir=model_dir, suites_cpu_s=cpu_s)
    ours.warm_up(ground.rows(1_000), scratch, index, model_dir)
    return ground


def _training_texts() -> Iterator[str]:
    for _, turns, _ in block(TRAINING_SEED, 0).originals[:10_000]:
        yield from (json.loads(b'"' + text + b'"') for _, text in turns)


def pipelines(ground: Ground) -> dict[str, Any]:
    """The whole way of the rows, by the usual pipeline, the tuned one and ours; rows per CPU second, whole and by stage."""
    sizes, scratch = ground.sizes, ground.scratch
    items = suites()
    tokenize = usual_tokenizer(ground.model_dir)
    path = ground.rows(sizes.ours)
    measured = _ours(ground, path)  # first: sets of millions of strings would slow the garbage collector of whoever comes after
    naive_grams, tuned_grams = usual.usual_index(items), usual.tuned_index(items)
    both: tuple[tuple[str, Pipeline, int, int], ...] = (
        ("usual", partial(usual.usual, path, grams=naive_grams), sizes.usual, sizes.usual_tokens),
        ("tuned", partial(usual.tuned, path, grams=tuned_grams), sizes.tuned, sizes.tuned_tokens),
    )
    found: dict[str, Any] = {}
    for name, pipeline, number, with_tokens in both:
        pipeline(limit=50, tokenize=tokenize, output=scratch / "warm.jsonl")
        out = pipeline(limit=number, tokenize=None, output=scratch / f"{name}.jsonl")
        full = pipeline(limit=with_tokens, tokenize=tokenize, output=scratch / f"{name}.jsonl")
        stages = _per_second(out.clock, dict.fromkeys(out.clock.seconds, number))
        stages["template, tokens and mask"] = len(full.kept) / full.clock.seconds["template, tokens and mask"]
        found[name] = {
            "rows": number,
            "rows_with_tokens": with_tokens,
            "without_tokens": number / out.clock.total,
            "with_tokens": with_tokens / full.clock.total,
            "stages": stages,
            "did": {k: len(getattr(out, k)) for k in ("bad", "kept", "exact", "near", "contaminated", "personal")},
        }
    return found | {"ours": measured}


def _ours(ground: Ground, path: Path) -> dict[str, Any]:
    sizes, output = ground.sizes, ground.scratch / "ours.parquet"
    result, cpu_s = timed(lambda: ours.whole(path, output, suites=ground.suites), repeats=2)
    _, parallel_s = timed(lambda: ours.whole(path, ground.scratch / "ours-2.parquet", suites=ground.suites, workers=2))
    _, single_s = timed(lambda: ours.rows_only(path))
    few = ground.rows(sizes.tuned)
    _, few_s = timed(lambda: ours.whole(few, ground.scratch / "few.parquet", suites=ground.suites), repeats=2)
    counted: dict[str, Any] = {"model_dir": ground.model_dir, "max_seq_len": ours.WINDOW}
    _, counted_s = timed(lambda: ours.whole(few, ground.scratch / "few.parquet", suites=ground.suites, **counted))
    number = 0

    def validate_and_pack() -> None:
        nonlocal number
        number += 1
        ours.whole(few, ground.scratch / "few.parquet", suites=ground.suites)
        ours.packed(ground.scratch / "few.parquet", ground.model_dir, ground.scratch / f"pack-{number}-{cpu_seconds()}")

    _, with_tokens_s = timed(validate_and_pack)
    clock, counts = ours.stages(output, ground.suites, ground.model_dir, num_tokenized=sizes.tuned_tokens)
    report = result.report
    return {
        "rows": sizes.ours,
        "without_tokens": sizes.ours / cpu_s,
        "without_tokens_in_2_workers": sizes.ours / parallel_s,
        "without_tokens_at_the_size_of_tuned": sizes.tuned / few_s,
        "with_tokens": sizes.tuned / with_tokens_s,
        "with_tokens_counted_only": sizes.tuned / counted_s,
        "read, validate and hash only": sizes.ours / single_s,
        "stages": _per_second(clock, counts),
        "did": {"kept": report.examples, "errors": report.error_counts, "removed": report.stats["dedup_removed"]},
        "bad_rows_reported": _bad_rows(path, report),
        "suite_index_cpu_s": ground.suites_cpu_s,
    }


def _bad_rows(path: Path, report: Any) -> dict[str, int]:
    """Rows that were made bad, and rows that the report counts as bad; a report names up to 1,000 of them."""
    labelled = {label.row + 1 for label in read_labels(path) if label.kind == "bad"}
    named = {error.row for error in report.errors}
    return {"labelled": len(labelled), "counted": report.stats["bad_rows"], "named": len(named), "named_wrongly": len(named - labelled)}


def _per_second(clock: Clock, counts: dict[str, int]) -> dict[str, float]:
    return {name: counts[name] / seconds for name, seconds in clock.seconds.items() if seconds}


def near_duplicates(ground: Ground) -> dict[str, Any]:
    """Each tool on the same texts, with its own settings and with ours: recall, precision and speed."""
    found = near.truth(ground.rows(ground.sizes.near, UNSEEN_SEEDS[0]))
    texts = near.write_texts(found, ground.scratch / "near.texts.jsonl")
    rows = list(found.texts)
    results: dict[str, Any] = {"rows": len(rows), "labelled_pairs": len(found.pairs)}

    def judge(name: str, settings: str, removed: Collection[int], cpu_s: float, **more: Any) -> None:
        score = near.score(found, removed)
        results[name] = {"settings": settings, "rows_per_cpu_s": len(rows) / cpu_s, **score, **more}

    gone, cpu_s = timed(lambda: ours.near_removed(list(found.texts.values())))
    judge("ours", "character 5-grams, true Jaccard >= 0.9", [rows[i] for i in gone.tolist()], cpu_s)
    for kind, params in (("default", None), ("equal", (14, 9))):
        removed, cpu_s = timed(lambda params=params: _datasketch(found.texts, params))  # type: ignore[misc]
        settings = f"character 5-grams, update_batch, xxh32, {'threshold 0.9' if params is None else '14 x 9'}, candidates as they are"
        judge(f"datasketch, {kind}", settings, removed, cpu_s)
    for peer, script, kinds in (
        ("rensa", "rensa_minhash.py", ("default", "equal", "deduplicator")),
        ("datatrove", "datatrove_minhash.py", ("default", "equal")),
    ):
        for kind in kinds:
            out = run_peer(peer, script, texts, kind)
            if "skipped" in out:
                results[f"{peer}, {kind}"] = out
            else:
                judge(f"{peer}, {kind}", out["settings"], out["removed"], out["cpu_s"], version=out["version"])
    return results


def _datasketch(texts: dict[int, str], params: tuple[int, int] | None) -> list[int]:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=0.9, num_perm=usual.PERMUTATIONS, params=params)
    first = MinHash(num_perm=usual.PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest, scheme="affine32")
    removed = []
    for row, text in texts.items():
        sketch = first.copy()
        sketch.update_batch([gram.encode() for gram in near.grams(text)])
        if lsh.query(sketch):
            removed.append(row)
        else:
            lsh.insert(row, sketch, check_duplication=False)
    return removed


def unseen(ground: Ground) -> list[dict[str, Any]]:
    """Recall and precision of the whole pipeline on files of seeds that nothing was tuned on."""
    return [_unseen(ground, seed) for seed in UNSEEN_SEEDS]


def _unseen(ground: Ground, seed: int) -> dict[str, Any]:
    path, output = ground.rows(ground.sizes.unseen, seed), ground.scratch / "unseen.parquet"
    report = ours.whole(path, output, suites=None).report
    found = near.truth(path)
    kept = {row - 1 for row in pq.read_table(output, columns=["row"]).column("row").to_pylist()}
    labelled = sum(label.kind == "exact" for label in read_labels(path))
    gone = set(found.texts) - kept
    bad = _bad_rows(path, report)
    return {
        "seed": seed,
        "rows": ground.sizes.unseen,
        "exact_labelled": labelled,
        **report.stats["duplicates"],
        **near.score(found, gone),
        "bad": bad,
    }


def personal_data(ground: Ground) -> dict[str, Any]:
    """Who finds the labelled personal data, and who sees some where there is none."""
    path = ground.rows(ground.sizes.personal)
    planted = {label.row: label.detail for label in read_labels(path) if label.kind == "pii"}
    texts = {row: near.said(line) for row, line in near.good_lines(path)}
    file = near.write_texts(near.Truth(texts=texts, copies={}), ground.scratch / "personal.texts.jsonl")
    from engine.data.checks.pii.scanner import PiiScanner

    rows, lines = list(texts), list(texts.values())
    scanner = PiiScanner()
    scanner.scan(lines[:10])
    hits, ours_s = timed(lambda: scanner.scan(lines), repeats=2)
    plain, plain_s = timed(lambda: [[k for k, p in usual.COMPILED.items() if p.search(text)] for text in lines])
    gated, gated_s = timed(lambda: [usual._personal(text) for text in lines])
    results: dict[str, Any] = {"rows": len(rows), "planted": len(planted)}

    def judge(name: str, found: set[int], cpu_s: float, **more: Any) -> None:
        right = len(found & set(planted))
        results[name] = {
            "rows_per_cpu_s": len(rows) / cpu_s,
            "recall": right / len(planted),
            "rows_flagged_without": len(found) - right,
            **more,
        }

    judge("ours", {r for r, h in zip(rows, hits, strict=True) if h}, ours_s)
    judge("re, each pattern", {r for r, h in zip(rows, plain, strict=True) if h}, plain_s)
    judge("re, gated", {r for r, h in zip(rows, gated, strict=True) if h}, gated_s)
    out = run_peer("presidio", "presidio_pii.py", file, "default")
    if "skipped" in out:
        return results | {"presidio": out}
    keys = {row for row, kind in planted.items() if kind == "key"}
    judge("presidio", {int(r) for r in out["found"]}, out["cpu_s"], version=out["version"], settings=out["settings"])
    results["presidio"]["recall_without_keys"] = len({int(r) for r in out["found"]} & set(planted) - keys) / len(set(planted) - keys)
    return results


def contamination(ground: Ground) -> dict[str, Any]:
    """Rows over half of whose 13-grams are in a suite: by our index, and by a Python set of joined words on the same folded texts."""
    from engine.data.checks.contamination.overlap import SuiteIndex
    from engine.data.dedup.normalization import fold

    path = ground.rows(ground.sizes.contaminated)
    texts = {row: near.folded(near.said(line)) for row, line in near.good_lines(path)}
    rows, lines = np.array(list(texts)), list(texts.values())
    grams, index, points = usual.usual_index(suites()), SuiteIndex.load(ground.suites), fold(lines)
    index.shares(fold(lines[:10]))
    (shares, _), ours_s = timed(lambda: index.shares(points), repeats=2)
    reference, usual_s = timed(lambda: [usual.share(text, grams) for text in lines])
    whole_items = {label.row for label in read_labels(path) if label.kind == "contaminated" and not label.detail.endswith(":half")}
    ours_found, reference_found = set(rows[shares > 0.5].tolist()), set(rows[np.array(reference) > 0.5].tolist())
    return {
        "rows": len(rows),
        "repeat_a_whole_item": len(whole_items),
        "ours": {"rows_per_cpu_s": len(rows) / ours_s, "flagged": len(ours_found), "of_whole_items": len(ours_found & whole_items)},
        "set of strings": {
            "rows_per_cpu_s": len(rows) / usual_s,
            "flagged": len(reference_found),
            "of_whole_items": len(reference_found & whole_items),
        },
        "flagged_by_one_only": len(ours_found ^ reference_found),
        "largest_difference_of_shares": float(np.abs(shares - np.array(reference)).max()),
    }


def packing(ground: Ground) -> dict[str, Any]:
    """Placement by lengths, and placement with the tokens moved, against TRL on batches of 1,000 and in one batch."""
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import pack_dataset  # type: ignore[attr-defined]

    disable_progress_bars()
    disable_caching()
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 0.8, ground.sizes.packed), 8, ours.WINDOW).astype(np.int64)
    few = lengths[: ground.sizes.packed_trl]
    windows, place_s = timed(lambda: best_fit_decreasing(lengths, ours.WINDOW), repeats=3)
    _, few_s = timed(lambda: best_fit_decreasing(few, ours.WINDOW), repeats=3)
    results: dict[str, Any] = {"rows": len(lengths), "rows_trl": len(few)}
    results["ours"] = {"rows_per_cpu_s": len(lengths) / place_s, "fill": fill(int(lengths.sum()), len(windows), ours.WINDOW)}
    results["ours"]["rows_per_cpu_s_at_the_size_of_trl"] = len(few) / few_s
    results["ours"]["fill_at_the_size_of_trl"] = fill(int(few.sum()), len(best_fit_decreasing(few, ours.WINDOW)), ours.WINDOW)
    moved, moved_s = timed(lambda: _moved(few), repeats=3)
    results["ours"]["rows_per_cpu_s_with_tokens_moved"] = len(few) / moved_s
    assert moved == int(few.sum())
    ids = [np.zeros(n, np.int32) for n in few]
    for columns in (("input_ids",), ("input_ids", "labels")):
        rows = Dataset.from_dict(dict.fromkeys(columns, ids))
        for batch in (1_000, len(few)):
            packed, cpu_s = timed(lambda rows=rows, batch=batch: pack_dataset(rows, ours.WINDOW, "bfd", map_kwargs={"batch_size": batch}))  # type: ignore[misc]
            name = f"trl bfd, {'one batch' if batch > 1_000 else 'batches of 1,000 (its default)'}, moves {' and '.join(columns)}"
            results[name] = {"rows_per_cpu_s": len(few) / cpu_s, "fill": fill(int(few.sum()), len(packed), ours.WINDOW)}
    return results


def _moved(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Windows of `lengths` with ids and labels gathered by the kernel that packs are built with; the tokens moved."""
    from engine.data.packs.kernels_windows import gather

    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    total = int(lengths.sum())
    ids, loss = np.zeros(total, np.int32), np.ones(total, np.bool_)
    order = best_fit_decreasing(lengths, ours.WINDOW).order
    out_ids, out_labels = np.empty(total, np.int32), np.empty(total, np.int32)
    taken = lengths[order]
    targets = np.concatenate(([0], np.cumsum(taken)))[:-1]
    gather(ids, loss, starts[order], taken, targets, np.int32(-100), out_ids, out_labels)
    return len(out_ids)


COMPARISONS: dict[str, Callable[[Ground], Any]] = {
    "pipelines": pipelines,
    "near_duplicates": near_duplicates,
    "unseen": unseen,
    "personal_data": personal_data,
    "contamination": contamination,
    "packing": packing,
}


def sizes_of(sizes: Sizes) -> dict[str, int]:
    return asdict(sizes)
