"""The daemon of ``ft up --detach``."""

from __future__ import annotations

import argparse
import sys

from deploy.local.lifecycle import load_settings, run_daemon


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__)
    parser.add_argument("--report-fd", type=int, required=True, help="file descriptor to which JSON reports are written at every change")
    return run_daemon(load_settings(), parser.parse_args().report_fd)


if __name__ == "__main__":
    sys.exit(main())
