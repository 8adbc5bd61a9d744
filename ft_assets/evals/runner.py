"""The evaluation process: ``python -m ft_assets.evals.runner RUN.json``.

It loads the base once, lets it answer (unless its answers are passed in), applies the adapter, proves that it is
applied, and lets it answer the same items. Everything is greedy; batching changes the speed only.

Leaves ``eval-result.json`` in the run's ``out_dir`` (written whole), and ``heartbeat.json`` at least every 5 s.
Exit codes: 0 evaluated (an adapter that changes nothing is not scored: the result's ``error`` is ``adapter_not_applied``, and
the gate quarantines it); 64 the input is refused (``error`` says why); 70 this program failed; 75 stopped by SIGTERM, and
nothing was written.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ft_assets.errors import FtError, InvalidRequest
from ft_assets.evals import preferences, run_file, suites
from ft_assets.evals.run_file import EvalRun

HEARTBEAT_S = 2.0

Section = dict[str, Any]
NOTHING = preferences.HeldOut(wanted=[], unwanted=[], kind=None)


class Stopped(BaseException):
    """SIGTERM arrived."""


class Heart:
    """Writes ``heartbeat.json`` from its own thread while the work goes on."""

    def __init__(self, out_dir: Path) -> None:
        self._path = out_dir / "heartbeat.json"
        self._state: dict[str, Any] = {"phase": "setup", "step": 0, "total_steps": 0}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def phase(self, phase: str, *, total_steps: int = 0) -> None:
        self._state = {"phase": phase, "step": 0, "total_steps": total_steps}
        self._write()

    def step(self, num: int) -> None:
        self._state = {**self._state, "step": self._state["step"] + num}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        self._write()
        while not self._stop.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        with self._lock:
            run_file.write_json(self._path, {"time": time.time(), "attempt": 1, **self._state})


class Evaluation:
    """One run: the subject, its items, and the sections of the result."""

    def __init__(self, run: EvalRun, heart: Heart) -> None:
        self.run, self.heart = run, heart
        self.suite_digest = run.suite_digest()
        self.holdout = run.holdout_items()
        self.golden = suites.golden_items() if run.golden else []
        self.held_out = preferences.held_out(run.validation_pack_dir, limit=run.max_items) if run.validation_pack_dir else NOTHING
        from ft_assets.evals.subject import Subject  # torch and PEFT take seconds: the heart beats by now

        self.subject = Subject(run.base_model_dir, batch_size=run.batch_size, progress=heart.step)

    def result(self) -> dict[str, Any]:
        started = time.monotonic()
        body: dict[str, Any] = {
            "format": 1,
            "suite_digest": self.suite_digest,
            "base": self._base(),
            "adapter": None,
            "previous": None,
            "applied": None,
            "preferences": self.held_out.kind,
        }
        body["error"] = None
        if self.run.adapter_dir:
            self.subject.add("candidate", self.run.adapter_dir)
            difference = self.subject.difference("candidate")
            body["applied"] = {"applied": difference > 0.0, "max_logit_difference": min(difference, sys.float_info.max)}
            if difference == 0.0:
                message = "training changed nothing: the logits equal the base model's; look at whether training moved the weights"
                return {**body, "error": {"code": run_file.ADAPTER_NOT_APPLIED, "message": message, "param": None}}
            body["adapter"] = self._adapted("candidate", "adapter")
        if self.run.adapter_dir and self.run.previous_adapter_dir:
            self.subject.add("previous", self.run.previous_adapter_dir)
            body["previous"] = self._adapted("previous", "previous")
        return {**body, "seconds": time.monotonic() - started}

    def _base(self) -> Section:
        cached = self.run.base_scores
        if cached and cached.get("suite_digest") == self.suite_digest:
            return dict(cached)
        return self._section("base")

    def _adapted(self, name: str, title: str) -> Section:
        with self.subject.applied(name):
            return self._section(title)

    def _section(self, title: str) -> Section:
        started = time.monotonic()
        wanted, unwanted = self.held_out.wanted, self.held_out.unwanted
        self.heart.phase(title, total_steps=len(self.holdout) + len(self.golden) + len(wanted) + len(unwanted))
        decoding = self.run.decoding
        longest = self.subject.longest([item.expected or "" for item in self.holdout])
        budget = min(decoding.max_new_tokens, longest + longest // 2 + 8)
        section: Section = {
            "suite_digest": self.suite_digest,
            "holdout": self.subject.answer(self.holdout, budget),
            "golden": self.subject.answer(self.golden, decoding.golden_max_new_tokens) if self.golden else None,
            "validation": self.subject.loss(wanted) if wanted else None,
            "unwanted": self.subject.loss(unwanted) if unwanted else None,
        }
        return {**section, "seconds": time.monotonic() - started}


def _on_sigterm(_signum: int, _frame: FrameType | None) -> None:
    raise Stopped


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(argv: Sequence[str]) -> int:
    """Evaluate as the run file says; see the module for exit codes."""
    if len(argv) != 1:
        _say("usage: python -m ft_assets.evals.runner RUN.json")
        return run_file.EXIT_BAD_INPUT
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        run = EvalRun.read(Path(argv[0]))
    except (InvalidRequest, OSError, ValueError, TypeError, json.JSONDecodeError) as e:
        _say(f"run file refused: {e}")
        return run_file.EXIT_BAD_INPUT
    heart = Heart(run.out_dir)
    run.out_dir.mkdir(parents=True, exist_ok=True)
    heart.start()
    try:
        result = Evaluation(run, heart).result()
        heart.phase("done")
        run_file.write_json(run.out_dir / run_file.RESULT_NAME, result)
        return run_file.EXIT_OK
    except Stopped:
        _say("stopped by SIGTERM; nothing was written")
        return run_file.EXIT_STOPPED
    except FtError as e:
        _say(f"refused: {e}")
        run_file.write_json(run.out_dir / run_file.RESULT_NAME, {"format": 1, "error": e.to_dict()})
        return run_file.EXIT_BAD_INPUT
    except Exception:
        traceback.print_exc()
        return run_file.EXIT_INTERNAL
    finally:
        heart.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
