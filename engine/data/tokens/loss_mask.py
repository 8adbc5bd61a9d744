"""The loss mask: which tokens of an example the model is trained on.

1. Chat: the assistant's turns (see ``assistant_turns``), each with the token that ends it, but not turns that the template rewrites once
   more messages follow, even with `train_on_inputs`.
2. A message of weight 0 carries no loss. With `train_on_inputs` everything else does; ``"auto"`` is no for conversations.
3. Text: every token, and the end-of-sequence token after it.
4. A preference: the answers of each side, nothing of the prompt, whatever its weights; a judged answer likewise.
5. The first token of an example never carries loss: nothing predicts it, and in a packed window its neighbor must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.data.tokens.encoders import Mark

IGNORE = -100
"""The label that carries no loss."""
TrainOnInputs = bool | Literal["auto"]
TurnLoss = Literal["loss", "weight_0", "rewritten_in_history"]
"""Whether an assistant turn carries loss, or why not."""


def turn_loss(weight: bool, rewritten: bool) -> TurnLoss:
    return "weight_0" if not weight else "rewritten_in_history" if rewritten else "loss"


def labels(ids: NDArray[np.int32], marks: Sequence[Mark], turns: Sequence[TurnLoss], *, everywhere: bool) -> NDArray[np.int32]:
    """Returns `ids` where there is loss and -100 elsewhere, not shifted.

    `marks` are the token spans of the `turns`; the other tokens carry loss only if `everywhere`.
    """
    found = ids.copy() if everywhere else np.full(len(ids), IGNORE, dtype=np.int32)
    for turn, start, end in marks:
        if turn >= 0 and (turns[turn] == "loss") != everywhere:
            found[start:end] = IGNORE if everywhere else ids[start:end]
    found[:1] = IGNORE
    return found
