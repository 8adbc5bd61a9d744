"""Imported once by the parent of forked trainings: all that a training without quantization or DeepSpeed imports."""

from __future__ import annotations

from ft_assets import logs, parent_death, tracing  # noqa: F401
from ft_assets.training import methods
from ft_assets.training.runtime import imports, stopping  # noqa: F401

imports.import_stack(methods.get("sft"), quantized=False, deepspeed=False)

import torch.distributed.tensor  # noqa: E402, F401

from ft_assets.training.runtime import train  # noqa: E402, F401
