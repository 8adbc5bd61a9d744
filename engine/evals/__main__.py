"""``python -m engine.evals score FILE``: compare two models' answers to the same prompts.

FILE has one JSON object a line, with ``expected``, ``base`` and ``adapter``: the reference and both answers. Prints the mean of each model,
the difference with its 95 % interval, and the one-sided p-values of a paired sign-flip test.
"""

import argparse
import json
import sys
from pathlib import Path

from engine.evals.scoring.significance import difference
from engine.evals.suites.answer_metrics import METRICS, mean


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.evals")
    commands = parser.add_subparsers(required=True)
    score = commands.add_parser("score", help="compare the answers of two models with the references")
    score.add_argument("file", type=Path)
    score.add_argument("--metric", choices=METRICS, default="exact_match")
    args = parser.parse_args(argv)
    metric, scores = METRICS[args.metric], {"base": list[float](), "adapter": list[float]()}
    for number, line in enumerate(args.file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            for name, values in scores.items():
                values.append(metric(str(row[name]), str(row["expected"])))
        except (ValueError, KeyError, TypeError) as error:
            parser.error(f"line {number} is no object with expected, base and adapter: {error}")
    found = difference([a - b for a, b in zip(scores["adapter"], scores["base"], strict=True)])
    sys.stdout.write(
        f"{args.metric} over {len(scores['base'])} answers: base {mean(scores['base']):.3f}, adapter {mean(scores['adapter']):.3f}\n"
        f"difference {found.mean:+.3f}, 95 % interval {found.interval.low:+.3f} to {found.interval.high:+.3f}, "
        f"p better {found.p_better:.4f}, p worse {found.p_worse:.4f}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
