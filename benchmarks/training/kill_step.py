"""What the ``checkpoint`` asset does, as a process of its own that may be killed: start or adopt the workload, wait for its end.

FT_HOME=... FT_DATABASE_URL=... python -m benchmarks.training.kill_step TENANT JOB
"""

from __future__ import annotations

import logging
import signal
import sys

from control_plane.composition import open_platform
from control_plane.platform import settings
from ft_assets.training import step
from resources.launcher import open_launcher


def main(tenant: str, job_id: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an orchestrator's interrupt is an exception too
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    loaded = settings.load()
    trained = step.train(open_platform(loaded), open_launcher(loaded), tenant, job_id, say=logging.info)
    logging.info("attempt %d ended as %s; the job is %s", trained.held.attempt, trained.outcome, trained.state)


if __name__ == "__main__":
    main(*sys.argv[1:])
