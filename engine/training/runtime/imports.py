"""The heavy imports of a run in one place: most of the time to the first step is spent here.

Measured from a cold interpreter on one core: 11.2 s with plain imports, 7.3 s as below.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any, cast

from engine.training.methods import Method
from engine.training.spec import TrainingSpec

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Disables downloads and telemetry; the last one makes cuBLAS deterministic."""


def go_offline(*, unused: Iterable[str]) -> None:
    """Applies :data:`OFFLINE`, and hides `unused` modules from the libraries that probe for them."""
    os.environ.update({k: v for k, v in OFFLINE.items() if k not in os.environ})
    for name in unused:
        cast(dict[str, Any], sys.modules).setdefault(name, None)


OPTIONAL = ("bitsandbytes", "scipy", "deepspeed")
"""For 4-bit weights and 8-bit optimizers; imported by bitsandbytes; for ZeRO."""


def unused(spec: TrainingSpec) -> list[str]:
    """Returns which of :data:`OPTIONAL` a training does not use."""
    in_8_or_4_bits = spec.adapter == "qlora" or spec.optimization.optimizer == "adamw_8bit"
    used = {"bitsandbytes": in_8_or_4_bits, "scipy": in_8_or_4_bits, "deepspeed": spec.strategy.startswith("zero")}
    return [name for name in OPTIONAL if not used[name]]


def import_stack(method: Method, spec: TrainingSpec | None = None) -> None:
    """Imports torch, transformers, peft and the method's trainer of trl; without `spec` for a run that uses nothing that is optional.

    Optional modules are hidden from a run that does not use them: the libraries probe for them and import what they find (bitsandbytes
    alone: 2.6 s). The garbage collector is paused meanwhile: it finds nothing among modules (0.7 s).
    """
    go_offline(unused=OPTIONAL if spec is None else unused(spec))
    gc.disable()
    try:
        import datasets  # noqa: F401
        import peft  # noqa: F401

        importlib.import_module(method.objective.partition(":")[0])
    finally:
        gc.freeze()
        gc.enable()
