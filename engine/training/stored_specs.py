"""Reads frozen specs as stored, possibly by an older version of the platform, for display.

Training needs a spec in today's format (:meth:`TrainingSpec.from_dict`); finished trainings are shown whatever their format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.training.recipes import load_recipes

FORMER_NAMES = {"windows_per_device": "per_device_batch_size"}


def stored_batch_size(spec: Mapping[str, Any]) -> int | None:
    """Rows per optimizer step; None if the spec does not say."""
    opt = _optimization(spec)
    factors = (opt.get("per_device_batch_size"), opt.get("accumulation_steps"), spec.get("world_size"))
    known = [f for f in factors if isinstance(f, int)]
    return math.prod(known) // int(spec.get("context_parallel") or 1) if len(known) == len(factors) else None


def openai_hyperparameters(spec: Mapping[str, Any], requested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of OpenAI's job object, as resolved: three numbers, and the method's own settings.

    `n_epochs` must be a whole number or ``auto`` there, so a recipe's fraction of an epoch is shown as ``auto`` here and exactly in the
    spec.
    """
    shown = {
        "n_epochs": _epochs(spec, requested),
        "batch_size": stored_batch_size(spec),
        "learning_rate_multiplier": _multiplier(spec, requested),
    }
    return {k: v for k, v in shown.items() if v is not None} | dict(spec.get("method_settings") or {})


def _optimization(spec: Mapping[str, Any]) -> dict[str, Any]:
    found = spec.get("optimization") or {}
    return {FORMER_NAMES.get(name, name): value for name, value in found.items()}


def _epochs(spec: Mapping[str, Any], requested: Mapping[str, Any]) -> float | str | None:
    epochs = _optimization(spec).get("num_epochs")
    if isinstance(epochs, float) and epochs.is_integer():
        return int(epochs)
    return epochs if epochs is None or epochs == requested.get("n_epochs") else "auto"


def _multiplier(spec: Mapping[str, Any], requested: Mapping[str, Any]) -> float:
    """As requested, else the learning rate divided by the recipe's (1 if the recipe no longer exists)."""
    asked = requested.get("learning_rate_multiplier")
    if isinstance(asked, (int, float)):
        return float(asked)
    rate, method = _optimization(spec).get("learning_rate"), spec.get("method")
    recipe = load_recipes().get(str(spec.get("recipe")).partition("@")[0])
    if recipe is None or rate is None or method is None or not isinstance(requested.get("learning_rate"), (int, float)):
        return 1.0
    return float(rate) / float(recipe.learning_rate(method).value)
