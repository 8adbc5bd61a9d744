"""ORPO with TRL's ``ORPOTrainer``: its odds ratio loss plus the cross entropy of the chosen answer with its prompt."""

from __future__ import annotations

from typing import Any

import torch
from trl.experimental.orpo.orpo_config import ORPOConfig
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ft_assets.training.runtime.objectives import Batch, Ingredients
from ft_assets.training.runtime.objectives.preference import LossOnly, Preference, arguments, pair_objective

HEAD = ("log_probs", "mean_logits")


class _Trainer(LossOnly, ORPOTrainer):
    def concatenated_forward(self, model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Computes the base class's loss with two changes: it avoids building the logits of the whole batch, and the imitation loss is a
        mean over the mean of each pair (equation 6 of the paper), so that a step does not depend on how it is split into micro-batches."""
        ids, attention, scored = batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
        imitated = attention.clone()
        imitated[len(ids) // 2 :] = scored[len(ids) // 2 :]
        out = model(
            input_ids=ids,
            attention_mask=attention,
            labels=ids.masked_fill(imitated == 0, -100),
            use_cache=False,
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        logps = (out.log_probs * scored[:, 1:]).sum(dim=1) / scored[:, 1:].sum(dim=1)
        imitation = out.log_probs.sum(dim=1) / imitated[:, 1:].sum(dim=1)
        found = (*logps.chunk(2), *out.mean_logits.chunk(2), -imitation.chunk(2)[0].mean())
        return (*found, out.aux_loss) if self.aux_loss_enabled else found


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    add_fused_lm_head(given.base, outputs=HEAD)
    return pair_objective(given, _Trainer, ORPOConfig(**arguments(given), beta=settings["beta"]))
