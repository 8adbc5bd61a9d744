"""``python -m control_plane.cli``: the same as the ``ft`` script."""

from control_plane.cli import main

main()
