"""``python -m agent``: runs the workload that the environment names (``FT_WORKLOAD``, ``FT_NODE``, ...)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from agent.api_client import read_token
from agent.evaluation import EvaluationSupervisor, ExportSupervisor
from agent.supervise import Supervisor
from core.telemetry import logs
from core.workload import NODE, NODE_DIR, TOKEN_FILE, VARIABLE, Kind, Workload

SERVICE = "ft-agent"


def main(train: type[Supervisor] = Supervisor, evaluate: type[EvaluationSupervisor] = EvaluationSupervisor) -> int:
    logs.configure(SERVICE)
    workload = Workload.from_json(Path(os.environ[VARIABLE]).read_text())
    token = read_token(Path(os.environ[TOKEN_FILE]))
    of_kind: Mapping[Kind, Callable[..., Supervisor | EvaluationSupervisor]] = {
        Kind.TRAIN: train, Kind.EVALUATE: evaluate, Kind.EXPORT: ExportSupervisor,
    }  # fmt: skip
    supervise = of_kind[workload.kind]
    supervisor = supervise(workload, token=token, node=int(os.environ[NODE]), node_dir=Path(os.environ[NODE_DIR]))

    def stop(_signum: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
