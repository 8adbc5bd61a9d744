"""In place of ``ft_assets.training.runtime.reference``: that module, run by a process that has the imports done."""

from __future__ import annotations

import sys

from tests.support.processes.forked_modules import stand_in

MODULE = "ft_assets.training.runtime.reference"

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--die-with-parent=")]  # its parent is the server that forks
    sys.exit(stand_in(module=MODULE, argv=[MODULE, *words]))
