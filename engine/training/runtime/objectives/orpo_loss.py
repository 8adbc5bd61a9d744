"""ORPO with TRL's ``ORPOTrainer``: its odds ratio loss, and the imitation of the chosen answer with its prompt."""

from __future__ import annotations

from typing import Any

import torch
from trl.experimental.orpo.orpo_config import ORPOConfig
from trl.experimental.orpo.orpo_trainer import ORPOTrainer

from engine.training.runtime.objectives import Batch, Ingredients
from engine.training.runtime.objectives.preference import LossOnly, Preference, arguments, fused_forward, pair_objective


class _Trainer(LossOnly, ORPOTrainer):
    def concatenated_forward(self, model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Like the base class with two differences: it builds no logits of the whole batch, and the imitation loss is a mean over pairs
        of each one's mean (equation 6 of the paper), so that a step does not depend on how it is divided into micro-batches."""
        ids, attention, scored = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
        imitated = attention.clone()
        imitated[len(ids) // 2 :] = scored[len(ids) // 2 :]
        out = fused_forward(model, batch, imitated)
        logps = (out.log_probs * scored[:, 1:]).sum(dim=1) / scored[:, 1:].sum(dim=1)
        imitation = out.log_probs.sum(dim=1) / imitated[:, 1:].sum(dim=1)
        return (*logps.chunk(2), *out.mean_logits.chunk(2), -imitation.chunk(2)[0].mean())


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    return pair_objective(given, _Trainer, ORPOConfig(**arguments(given), beta=settings["beta"]))
