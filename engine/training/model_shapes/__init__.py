"""Shapes of text decoders: from a ``config.json``, and those of well-known models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from engine.training.model_shapes.configs import from_config, max_packed_len
from engine.training.model_shapes.shape import ModelShape
from engine.training.model_shapes.well_known import WELL_KNOWN_SHAPES, well_known_shape

__all__ = ["WELL_KNOWN_SHAPES", "ModelShape", "from_config", "max_packed_len", "shape_of", "well_known_shape"]


def shape_of(model_id: str, *, directory: Path | None = None, repo: str = "", num_parameters: int = 0) -> ModelShape:
    """Returns the shape of a base model, from its ``config.json``, its name, or a similar model (then ``assumed``).

    Parameters that a config with a nested text decoder leaves unexplained are those of other parts. Raises ``ValueError`` if there is a
    config whose sizes are not known here.
    """
    if directory is not None and (directory / "config.json").is_file():
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shape = from_config(config)
        nested = isinstance(config.get("text_config"), dict)
        return replace(shape, other_parameters=max(0, num_parameters - shape.decoder_parameters)) if nested else shape
    found = well_known_shape(model_id) or well_known_shape(repo)
    if found is not None:
        return found
    by_size = sorted(WELL_KNOWN_SHAPES.values(), key=lambda s: s.num_parameters)
    return replace(next((s for s in by_size if s.num_parameters >= num_parameters), by_size[-1]), assumed=True)
