"""Removes near duplicates with datatrove: `python datatrove_minhash.py TEXTS RESULT default|equal`.

default: its own settings (word 5-grams, 14 x 8). equal: character 5-grams and 14 x 9, as ours.
"""

# The peer is installed in an environment of its own.
# mypy: ignore-errors

import json
import logging
import resource
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from loguru import logger


class CharacterSignature(MinhashDedupSignature):
    """The same over character 5-grams of the text as it is."""

    def get_shingles(self, text: str) -> np.ndarray:
        grams = {text[i : i + 5] for i in range(max(1, len(text) - 4))}
        return np.fromiter((self._hash_func(gram) for gram in grams), dtype=np.uint64).reshape((-1, 1))


def cpu_seconds() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


def main(texts: str, result: str, settings: str) -> None:
    logger.remove()
    logging.disable(logging.CRITICAL)
    equal = settings == "equal"
    config = MinhashConfig(hash_config=HashConfig(precision=32), num_buckets=14, hashes_per_bucket=9) if equal else MinhashConfig()
    signature = CharacterSignature if equal else MinhashDedupSignature
    with tempfile.TemporaryDirectory() as scratch:
        start = cpu_seconds()
        source = {"data_folder": str(Path(texts).parent), "glob_pattern": Path(texts).name}
        steps = [
            ("signatures", [JsonlReader(**source), signature(f"{scratch}/signatures", config=config)], 1),
            ("buckets", [MinhashDedupBuckets(f"{scratch}/signatures", f"{scratch}/buckets", config=config)], config.num_buckets),
            ("clusters", [MinhashDedupCluster(f"{scratch}/buckets", f"{scratch}/remove", config=config)], 1),
            (
                "filter",
                [JsonlReader(**source), MinhashDedupFilter(f"{scratch}/remove"), JsonlWriter(f"{scratch}/kept", compression=None)],
                1,
            ),
        ]
        stages = {}
        for name, pipeline, tasks in steps:
            before = cpu_seconds()
            LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, logging_dir=f"{scratch}/log-{name}").run()
            stages[name] = cpu_seconds() - before
        cpu_s = cpu_seconds() - start
        kept = {json.loads(line)["id"] for file in Path(scratch, "kept").glob("*.jsonl") for line in file.open()}
    with open(texts) as lines:
        every = [json.loads(line)["id"] for line in lines]
    found = {"version": version("datatrove"), "rows": len(every), "cpu_s": cpu_s, "stages": stages}
    found["removed"] = [int(i) for i in every if i not in kept]
    found["settings"] = f"{'character' if equal else 'word'} 5-grams, {config.num_buckets} x {config.hashes_per_bucket}, no verification"
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
