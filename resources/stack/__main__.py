"""The daemon of ``ft up --detach``."""

from __future__ import annotations

import argparse
import sys

from control_plane import settings
from resources.stack.commands import run_daemon


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m resources.stack", description=__doc__)
    parser.add_argument("--report-fd", type=int, required=True, help="file descriptor that gets a JSON report at every change")
    return run_daemon(settings.load(), parser.parse_args().report_fd)


if __name__ == "__main__":
    sys.exit(main())
