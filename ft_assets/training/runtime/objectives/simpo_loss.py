"""SimPO with TRL's ``CPOTrainer``: mean log-probability as reward, a margin, no reference."""

from __future__ import annotations

from typing import Any

import torch
from trl.experimental.cpo.cpo_config import CPOConfig
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ft_assets.training.runtime.objectives import Batch, Ingredients
from ft_assets.training.runtime.objectives.preference import LossOnly, Preference, arguments, pair_objective

HEAD = ("log_probs", "mean_logits")


class _Trainer(LossOnly, CPOTrainer):
    def concatenated_forward(self, model: Any, batch: Batch) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Computes the base class's loss without building the logits of the whole batch. The imitation loss of CPO-SimPO is a mean over
        the mean of each pair, so that a step does not depend on how it is split into micro-batches."""
        ids, scored = batch["input_ids"], batch["completion_mask"]
        out = model(
            input_ids=ids,
            attention_mask=batch["attention_mask"],
            labels=ids.masked_fill(scored == 0, -100),
            use_cache=False,
            fused_lm_head=True,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        logps = out.log_probs.sum(dim=1) / scored[:, 1:].sum(dim=1)
        chosen, rejected = logps.chunk(2)
        imitation = -chosen.mean() if self.cpo_alpha else torch.zeros((), device=logps.device)
        found = (chosen, rejected, *out.mean_logits.chunk(2), imitation)
        return (*found, out.aux_loss) if self.aux_loss_enabled else found


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    add_fused_lm_head(given.base, outputs=HEAD)
    config = CPOConfig(
        **arguments(given), loss_type="simpo", beta=settings["beta"], simpo_gamma=settings["gamma"], cpo_alpha=settings["cpo_alpha"]
    )
    return pair_objective(given, _Trainer, config)
