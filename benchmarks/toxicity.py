"""How good the builtin toxicity classifier is: red-team conversations against harmless questions.

    python -m benchmarks.toxicity --pairs hh_rlhf_harmless_test.jsonl.gz --harmless banking77_train.csv gsm8k_train.jsonl

Pairs: JSONL (gzip) of `chosen` and `rejected` conversations, of which only the last answers differ (HH-RLHF, harmless split).
Harmless: CSV with a column `text`, JSONL with `question` and `answer`. Writes ``benchmarks/toxicity_cpu_<yyyymm>.json`` and prints it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.checks.toxicity import LexiconClassifier

THRESHOLDS = (0.5, 0.9)


def load_pairs(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def load_harmless(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        if path.suffix == ".csv":
            return [row["text"] for row in csv.DictReader(lines)]
        return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]


def flagged(scores: Sequence[float]) -> dict[str, float]:
    return {f"share_at_{threshold}": round(float(np.mean(np.asarray(scores) >= threshold)), 4) for threshold in THRESHOLDS}


def compared(classifier: LexiconClassifier, pairs: Sequence[dict[str, str]], *, answers_only: bool) -> dict[str, Any]:
    """Scores of the rejected side against the chosen one."""

    def part(text: str) -> str:
        return text.rsplit("\n\nAssistant:", 1)[-1] if answers_only else text

    chosen = np.asarray(classifier.scores([part(pair["chosen"]) for pair in pairs]))
    rejected = np.asarray(classifier.scores([part(pair["rejected"]) for pair in pairs]))
    higher, lower = float(np.mean(rejected > chosen)), float(np.mean(rejected < chosen))
    return {
        "rejected_higher": round(higher, 4),
        "rejected_lower": round(lower, 4),
        "equal": round(1.0 - higher - lower, 4),
        "chosen": flagged(chosen.tolist()),
        "rejected": flagged(rejected.tolist()),
    }


def asked(pairs: Sequence[dict[str, str]]) -> list[str]:
    """What the red team wrote, without any answer."""
    turns = [pair["chosen"].split("\n\nHuman:")[1:] for pair in pairs]
    return ["\n".join(turn.split("\n\nAssistant:", 1)[0] for turn in one) for one in turns]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the builtin toxicity classifier")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--harmless", type=Path, nargs="+", default=[])
    options = parser.parse_args()
    classifier, pairs = LexiconClassifier(), load_pairs(options.pairs)
    harmless = {path.name: load_harmless(path) for path in options.harmless}
    results: dict[str, Any] = {
        "classifier": classifier.name,
        "pairs": {"name": options.pairs.name, "count": len(pairs)},
        "last_answers": compared(classifier, pairs, answers_only=True),
        "whole_conversations": compared(classifier, pairs, answers_only=False),
        "red_team_turns": flagged(classifier.scores(asked(pairs))),
        "harmless": {name: {"count": len(texts), **flagged(classifier.scores(texts))} for name, texts in harmless.items()},
    }
    texts = [text for many in harmless.values() for text in many] or [pair["chosen"] for pair in pairs]
    start = time.process_time()
    classifier.scores(texts)
    spent_s = time.process_time() - start
    results["mb_per_cpu_second"] = round(sum(map(len, texts)) / spent_s / 1e6, 2)
    results["machine"] = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    target = Path(__file__).parent / f"toxicity_cpu_{time.strftime('%Y%m')}.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
