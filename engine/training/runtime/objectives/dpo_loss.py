"""DPO with TRL's ``DPOTrainer``, against precomputed reference log-probabilities."""

from __future__ import annotations

from typing import Any

import trl.trainer.dpo_trainer as library
from trl.trainer.dpo_config import DPOConfig

from engine.training.runtime.objectives import Ingredients
from engine.training.runtime.objectives.batches import Pairs
from engine.training.runtime.objectives.preference import LossOnly, Preference, arguments, parts, reference_trainer


class _Trainer(LossOnly, library.DPOTrainer):
    pass


def losses(name: str, smoothing: float) -> dict[str, Any]:
    """Arguments of the library's configuration. Its sigmoid loss ignores label smoothing; cDPO's loss (Mitchell 2023), for a share e of
    flipped labels, is 2 (1 - e) times the sigmoid loss minus (1 - 2 e) times the robust one."""
    if name == "sigmoid" and smoothing:
        weights = [2.0 * (1.0 - smoothing), 2.0 * smoothing - 1.0]
        return {"loss_type": ["sigmoid", "robust"], "loss_weights": weights, "label_smoothing": smoothing}
    return {"loss_type": [name], "label_smoothing": smoothing}


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    config = DPOConfig(
        **arguments(given),
        beta=settings["beta"],
        **losses(settings["loss_type"], settings["label_smoothing"]),
        precompute_ref_log_probs=True,
    )
    rows = {"prompt_ids": [[0]], "chosen_ids": [[0]], "rejected_ids": [[0]]}
    trainer = reference_trainer(given, library, _Trainer, config, rows)
    return Preference(given, trainer, **parts(given, Pairs))
