"""The agent, but that it runs the scripted training without torchrun, and gives up on a store within a second."""

from __future__ import annotations

import sys
from pathlib import Path

from agent.__main__ import main
from agent.supervise import Supervisor
from ft_assets.retries import RetryPolicy

SHORT = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


class Scripted(Supervisor):
    checkpoint_retries = final_retries = SHORT
    hung_after_s = 15.0

    def command(self, run_file: Path) -> list[str]:
        return [sys.executable, "-m", "tests.support.processes.scripted_training", str(run_file)]


if __name__ == "__main__":
    sys.exit(main(Scripted))
