"""SimPO with TRL's ``CPOTrainer``: mean log-probability as reward, a margin, no reference."""

from __future__ import annotations

from typing import Any

import torch
from trl.experimental.cpo.cpo_config import CPOConfig
from trl.experimental.cpo.cpo_trainer import CPOTrainer

from engine.training.runtime.objectives import Batch, Ingredients
from engine.training.runtime.objectives.preference import LossOnly, Preference, arguments, fused_forward, pair_objective


class _Trainer(LossOnly, CPOTrainer):
    def concatenated_forward(self, model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Like the base class, but builds no logits of the whole batch, and the imitation of CPO-SimPO is a mean over pairs of each
        one's mean, so that a step does not depend on how it is divided into micro-batches."""
        scored = batch["completion_mask"]
        out = fused_forward(model, batch, scored)
        logps = out.log_probs.sum(dim=1) / scored[:, 1:].sum(dim=1)
        chosen, rejected = logps.chunk(2)
        imitation = -chosen.mean() if self.cpo_alpha else torch.zeros((), device=logps.device)
        return (chosen, rejected, *out.mean_logits.chunk(2), imitation)


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    config = CPOConfig(
        **arguments(given), loss_type="simpo", beta=settings["beta"], simpo_gamma=settings["gamma"], cpo_alpha=settings["cpo_alpha"]
    )
    return pair_objective(given, _Trainer, config)
