"""What the ``checkpoint`` asset does, as a process of its own that may be killed: claim the attempt, follow it, finish it.

FT_HOME=... FT_DATABASE_URL=... python -m benchmarks.training.kill_step TENANT JOB
"""

from __future__ import annotations

import logging
import signal
import sys

from control_plane.attempts import follow
from control_plane.attempts import service as attempts
from control_plane.composition import open_platform
from control_plane.platform import settings
from resources.launcher import LocalLauncher


def main(tenant: str, job_id: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an orchestrator's interrupt is an exception too
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    loaded = settings.load()
    platform = open_platform(loaded)
    held = attempts.claim(platform, tenant, job_id)
    ending = follow.follow(platform, LocalLauncher(loaded.work_dir / "launcher"), held, say=logging.info)
    state = attempts.finish(platform, held, ending)
    logging.info("attempt %d ended as %s; the job is %s", held.attempt, ending.outcome, state)


if __name__ == "__main__":
    main(*sys.argv[1:])
