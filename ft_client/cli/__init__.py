"""``ft``: the command line over the REST API, and control of the embedded stack.

Exit codes: 0 done; 1 refused or failed, with a message that names the next step; 2 a usage error (for ``ft check``: an unreadable file); 3
the job was cancelled; 4 the API or the stack cannot be reached; 130 interrupted. ``--json`` writes one JSON document (or one per line, when
streaming) to stdout; everything else goes to stderr.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``ft`` script."""
    from ft_client.cli.command_tree import run

    run()


__all__ = ["main"]
