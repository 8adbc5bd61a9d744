"""``ft``: the command line over the REST API, and the embedded stack's switch.

Exit codes: 0 done; 1 refused or failed, with one message that says what to do next; 2 a usage error (for ``ft check``: an
unreadable file); 3 the job was cancelled; 4 the API or the stack can not be reached; 130 interrupted.
``--json`` puts one JSON document (or one a line, where it streams) on stdout; everything else goes to stderr.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``ft`` script."""
    from control_plane.cli.command_tree import run

    run()


__all__ = ["main"]
