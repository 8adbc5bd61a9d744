"""Verifies the assumptions of preference training on this model before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from engine.training.runtime.objectives import Batch
from engine.training.runtime.objectives.batches import Rows, Scored, Unpadded
from engine.training.runtime.run_errors import BadInput, PackingRefused
from engine.training.runtime.self_test import TOLERANCE, plain_loss
from engine.training.spec import TrainingSpec

REFERENCE_TOLERANCE: Mapping[str, float] = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
"""Largest difference per token between the model's log-probability of an answer and the reference, by the digits of each precision;
another model differs by a tenth or more."""
REFERENCE_ROWS = 8

Put = Callable[[Batch], Batch]
"""Moves a batch to the model's device."""


def check_padding(model: Any, rows: Rows, *, batch_size: int, spec: TrainingSpec, put: Put) -> float:
    """Returns the largest difference of a sequence's mean log-probability between a padded batch in the training's own pass and the
    sequence alone by the model's plain logits; raises ``PackingRefused`` if padding matters. The loss is a function of these numbers.

    The batch includes the shortest and the longest row.
    """
    order = np.argsort(rows.lengths, kind="stable")
    chosen = sorted({int(order[0]), int(order[-1]), *range(min(max(batch_size, 2), rows.num_rows) - 2)})
    batch = put(rows.collate(chosen))
    together = torch.cat([log_probabilities(model, s) for s in rows.scored(batch)]).tolist()
    worst = 0.0
    for number, (total, sequence) in enumerate(zip(together, rows.alone(chosen), strict=True)):
        scored = np.flatnonzero(sequence.scored[1:])
        found, expected = total / len(scored), -plain_loss(model, sequence.input_ids, scored, batch["input_ids"].device)
        difference = abs(found - expected) / max(abs(expected), 1.0)
        worst = max(worst, difference)
        if not (math.isfinite(difference) and difference <= TOLERANCE[spec.precision]):
            cause, because = _cause(model, sequence, expected, spec=spec, device=batch["input_ids"].device)
            raise PackingRefused(
                f"sequence {number} of rows {chosen} has mean log-probability {found:.6f} in a padded batch and {expected:.6f} alone: "
                f"the difference {difference:.1e} exceeds {TOLERANCE[spec.precision]:.0e}; {because}",
                cause=cause,
            )
    return worst


def _cause(model: Any, sequence: Unpadded, expected: float, *, spec: TrainingSpec, device: torch.device) -> tuple[str, str]:
    """Returns the cause of a sequence's difference from `expected`, its mean log-probability by plain logits: a code and a sentence."""
    ids, scored = (torch.from_numpy(part.astype(np.int64))[None].to(device) for part in sequence)
    alone = float(log_probabilities(model, Scored(ids, torch.ones_like(ids), scored))) / int(scored.sum())
    if not abs(alone - expected) / max(abs(expected), 1.0) <= TOLERANCE[spec.precision]:
        return "output_layer", (
            f"padding is not the cause: without it training scores {alone:.6f}, so it does not compute the model's own logits; report this "
            "base model"
        )
    return "padding", "padding changes what the model sees; report this base model"


def check_reference(model: Any, rows: Rows, *, batch_size: int, spec: TrainingSpec, put: Put) -> float | None:
    """Returns the largest difference per token between log-probabilities of `model`, before its first step, and the reference, on rows
    from the whole pack; None if the method has no reference. Raises ``BadInput`` if they are not the same model's."""
    tolerance = REFERENCE_TOLERANCE[spec.precision]
    chosen = sorted(set(np.linspace(0, rows.num_rows - 1, REFERENCE_ROWS).astype(int).tolist()))
    worst = None
    for first in range(0, len(chosen), batch_size):
        batch = put(rows.collate(chosen[first : first + batch_size]))
        reference = rows.reference(batch)
        if reference is None:
            return None
        scored = rows.scored(batch)
        found = torch.cat([log_probabilities(model, s) for s in scored])
        differences = (found - reference).abs() / torch.cat([_tokens(s) for s in scored])
        worst = max(worst or 0.0, float(differences.max()))
        if not worst <= tolerance:
            at = int(differences.argmax())
            raise BadInput(
                f"the reference log-probabilities are not those of the model that training starts from: for one of rows "
                f"{chosen[first : first + batch_size]} the reference is {float(reference[at]):.3f}, the model gives {float(found[at]):.3f} "
                f"(difference {worst:.1e} a token, limit {tolerance:.0e}); compute the reference log-probabilities again"
            )
    return worst


def log_probabilities(model: Any, sequences: Scored) -> torch.Tensor:
    """Returns the sum over the scored tokens of each sequence, by the pass that TRL's losses use."""
    labels = sequences.input_ids.masked_fill(sequences.completion_mask == 0, -100)
    out = model(input_ids=sequences.input_ids, attention_mask=sequences.attention_mask, labels=labels, use_cache=False, fused_lm_head=True)
    found: torch.Tensor = out.log_probs.float().sum(dim=1)
    return found


def _tokens(sequences: Scored) -> torch.Tensor:
    return sequences.completion_mask[:, 1:].sum(dim=1).clamp(min=1)
