"""KTO with TRL's ``KTOTrainer``, against precomputed reference log-probabilities.

The distance to the reference (the KL term) is estimated once per step, from the mismatched answers in the pack: their mean over all
micro-batches and ranks, so that a step does not depend on how it is divided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import trl.trainer.kto_trainer as library
from trl.trainer.kto_config import KTOConfig

from engine.training.runtime.collectives import reduce_sum
from engine.training.runtime.objectives import Batch, Ingredients, quiet
from engine.training.runtime.objectives.batches import Judged
from engine.training.runtime.objectives.preference import LossOnly, Preference, arguments, parts, reference_trainer
from engine.training.runtime.objectives.preference_self_test import log_probabilities


class _Trainer(LossOnly, library.KTOTrainer):
    kl = torch.zeros(())
    """Mean distance over the rows of the step, before clamping at 0."""

    def _compute_kl_logps(self, *_: Any) -> torch.Tensor:
        return self.kl

    def _compute_loss(self, model: Any, inputs: Batch, return_outputs: bool) -> torch.Tensor:
        """Like the base class, which subtracts the reference of the mismatched answers: `kl` already contains that subtraction."""
        undistanced = inputs | {"ref_KL_logps": torch.zeros_like(self.kl)}
        loss: torch.Tensor = super()._compute_loss(model, undistanced, return_outputs)  # type: ignore[no-untyped-call]
        return loss


class Kto(Preference):
    """Means of good and of bad answers are taken over the number of each."""

    def prepare_step(self, model: Any, batches: Iterable[Batch]) -> None:
        """Estimates the distance over all rows of the step, without dropout, like the reference."""
        total, rows = torch.zeros((), dtype=torch.float64, device=self._device), 0
        with quiet(model):
            for batch in batches:
                mismatched = self._train.scored(batch)[1]
                total += (log_probabilities(model, mismatched) - batch["ref_KL_logps"]).sum().double()
                rows += len(batch["label"])
        total_of_all, rows_of_all = reduce_sum([float(total), float(rows)], self._device)
        self._trainer.kl = torch.tensor(total_of_all / max(rows_of_all, 1.0), dtype=torch.float32, device=self._device)

    def counted(self, name: str, batch: Batch) -> float:
        good = float(batch["label"].sum())
        return {"chosen": good, "rejected": len(batch["label"]) - good}.get(name.rpartition("/")[2], float(len(batch["label"])))

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        sides = [means.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if sides[0] is None or sides[1] is None:
            return {name: value for name, value in means.items() if name != "rewards/margins"}
        return means | {"rewards/margins": sides[0] - sides[1]}


def build(given: Ingredients) -> Preference:
    settings: Any = given.spec.method_settings
    shared = arguments(given)
    # The trainer requires two rows because it would make the mismatched answers from the micro-batch itself.
    shared["per_device_train_batch_size"] = max(2, shared["per_device_train_batch_size"])
    config = KTOConfig(
        **shared,
        beta=settings["beta"],
        desirable_weight=settings["desirable_weight"],
        undesirable_weight=settings["undesirable_weight"],
        precompute_ref_log_probs=True,
    )
    rows = {"prompt_ids": [[0], [0]], "completion_ids": [[0], [0]], "label": [True, False]}
    trainer = reference_trainer(given, library, _Trainer, config, rows)
    return Kto(given, trainer, **parts(given, Judged))
