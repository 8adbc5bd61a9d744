"""The agent, but that it runs scripted processes, and gives up on a store within a second."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agent.__main__ import main
from agent.evaluation import EvaluationSupervisor
from agent.supervise import Supervisor
from core.retries import RetryPolicy
from core.workload import Workload

SHORT = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)
LIMITS = "limits.json"
"""In a job's directory: time limits of its evaluations."""


class Scripted(Supervisor):
    checkpoint_retries = final_retries = SHORT
    hung_after_s = 15.0

    def command(self, run_file: Path) -> list[str]:
        return [sys.executable, "-m", "tests.support.processes.scripted_training", str(run_file)]


class ScriptedEvaluation(EvaluationSupervisor):
    def __init__(self, workload: Workload, *, token: str, node: int, node_dir: Path) -> None:
        super().__init__(workload, token=token, node=node, node_dir=node_dir)
        if (limits := self.job_dir / LIMITS).exists():
            given = json.loads(limits.read_text())
            self.stall_s, self.total_s = given.get("stall_s", self.stall_s), given.get("total_s", self.total_s)

    def command(self, run_file: Path) -> list[str]:
        return [sys.executable, "-m", "tests.support.processes.scripted_evaluation", str(run_file)]


if __name__ == "__main__":
    sys.exit(main(Scripted, ScriptedEvaluation))
