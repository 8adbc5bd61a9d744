"""Prints what a module finds when it is run, as a line of JSON: ``python -m tests.support.processes.process_environment [WORD ...]``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    found = {
        "arguments": sys.argv[1:],
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "group": os.getpgid(0),
        "handlers": {s.name: str(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "output": [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (1, 2)],
        "niceness": os.nice(0),
    }
    sys.stdout.write(json.dumps(found, sort_keys=True) + "\n")
    sys.stderr.write("and this is an error\n")
    sys.exit(int(sys.argv[1]))
