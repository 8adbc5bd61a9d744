"""Log-probabilities by a model on one pretended GPU and split over two, as JSON.

python -m tests.engine.training.runtime.split_reference BASE ADAPTER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes.pretended_gpus import register

DEVICES = register(480_000)
"""Less than the tiny model in float32."""

import numpy as np  # noqa: E402
import torch  # noqa: E402

from engine.training.runtime.reference import Model  # noqa: E402


def logps(base: Path, adapter: Path | None, devices: Sequence[torch.device]) -> list[float]:
    model = Model(
        base, precision="fp32", attention="sdpa", quantization=None, adapter_dir=adapter, batch_tokens=100, devices=devices,
        touch=lambda: None,
    )  # fmt: skip
    assert {parameter.device for parameter in model._model.parameters()} == set(devices)
    ids = [np.arange(5, 5 + n, dtype=np.int32) for n in (40, 8, 30, 21)]
    labels = [np.where(i % 3, i, -100) for i in ids]
    found: list[float] = model.sequence_logps(ids, labels).tolist()
    model.close()
    return found


if __name__ == "__main__":
    base, adapter = map(Path, sys.argv[1:])
    split = {name: [logps(base, of, gpus) for gpus in (DEVICES[:1], DEVICES)] for name, of in (("base", None), ("adapter", adapter))}
    sys.stdout.write(json.dumps(split))
