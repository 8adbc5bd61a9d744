"""The evaluation process: ``python -m engine.evals.run.runner RUN.json``.

It loads the base once, has it answer every suite (unless its answers are known), applies the adapter, verifies that it is applied, and has
it and the last accepted adapter answer the same. All decoding is greedy.

Leaves ``eval-result.json`` in the run's ``out_dir`` (written atomically), ``heartbeat.json`` every second, and ``journal.jsonl`` with every
answer as it is given: killed and started again with the same run file, it continues and leaves the same result. Exit codes: 0 evaluated (an
adapter that changes nothing or cannot be loaded is not scored: the result's ``error`` says so, and the gate quarantines it); 64 the input
is refused, 70 this program failed (``error`` says why, if known); 75 stopped by SIGTERM, and no result was written.

With several ``replicas`` in the run file this process starts the others: itself, with ``--replica NUMBER``. They leave a result only if it
is an error.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from core.durable_files import write_json
from core.errors import FtError, InvalidRequest
from core.telemetry import logs, spans
from engine.evals.run import replicas, run_file, run_status
from engine.evals.run.evaluation_loop import Evaluation
from engine.evals.run.heartbeat import Heart
from engine.evals.run.journal import Journal
from engine.evals.run.run_file import EvalRun

SERVICE = "ft-evaluation"

log = logging.getLogger("engine.evals.run.runner")


class Stopped(BaseException):
    """SIGTERM was received."""


def _on_sigterm(_signum: int, _frame: FrameType | None) -> None:
    raise Stopped


def main(argv: Sequence[str]) -> int:
    """Evaluates as the run file says; see the module for exit codes."""
    if len(argv) not in (1, 3) or argv[1:2] not in ([], [replicas.OPTION]):
        log.info("usage: python -m engine.evals.run.runner RUN.json [--replica NUMBER]")
        return run_status.EVAL_EXIT_BAD_INPUT
    index = int(argv[2]) if len(argv) == 3 else 0
    if index:
        replicas.end_with_first()
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        run = EvalRun.read(Path(argv[0]))
    except (InvalidRequest, OSError, ValueError, TypeError, json.JSONDecodeError) as e:
        log.info("run file refused: %s", e)
        return run_status.EVAL_EXIT_BAD_INPUT
    out_dir = replicas.directory(run.out_dir, index)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / run_file.RESULT_NAME).unlink(missing_ok=True)  # of an earlier process: this one leaves its own
    heart = Heart(out_dir, beside=[] if index else [replicas.directory(run.out_dir, at) for at in range(1, run.replicas)])
    heart.start()
    own = out_dir / run_file.JOURNAL_NAME
    others = [path for path in replicas.journals(run.out_dir) if path != own]
    try:
        with spans.span("evaluation"), Journal(own, beside=others) as journal:
            if index:
                Evaluation(run, heart, journal, index=index).answer()
            elif run.replicas == 1:
                write_json(out_dir / run_file.RESULT_NAME, Evaluation(run, heart, journal).result())
            else:
                with replicas.Replicas(Path(argv[0]), run.out_dir, num=run.replicas) as started:
                    write_json(out_dir / run_file.RESULT_NAME, Evaluation(run, heart, journal, others=started).result())
        heart.phase("done")
        return run_status.EVAL_EXIT_OK
    except Stopped:
        log.info("stopped; what was answered is kept")
        return run_status.EXIT_STOPPED
    except FtError as e:
        log.info("%s: %s", e.code, e)
        write_json(out_dir / run_file.RESULT_NAME, {"format": run_file.FORMAT, "error": e.to_dict()})
        return run_status.EVAL_EXIT_BAD_INPUT if isinstance(e, InvalidRequest) else run_status.EVAL_EXIT_INTERNAL
    except Exception:
        log.exception("the evaluation failed")
        return run_status.EVAL_EXIT_INTERNAL
    finally:
        heart.close()
        spans.close()


if __name__ == "__main__":
    logs.configure(SERVICE, plain=True)
    spans.configure(SERVICE)
    sys.exit(main(sys.argv[1:]))
