"""The training process, scoring a few tokens at once as it would with a large vocabulary.

python -m tests.engine.training.runtime.parallel.small_slices RUN.json
"""

from __future__ import annotations

import sys

from engine.training.runtime.__main__ import main
from engine.training.runtime.imports import go_offline
from tests.support.models.tiny_model import VOCAB

ROWS = 16
"""Labelled tokens of a slice."""

if __name__ == "__main__":
    go_offline(unused=("bitsandbytes", "scipy"))  # before the import below: transformers remembers which modules it saw
    from engine.training.runtime.objectives import token_logps  # here: it needs torch, which tests that read ROWS may lack

    token_logps.MAX_LOGIT_BYTES["cpu"] = ROWS * 4 * VOCAB
    main(sys.argv[1:])
