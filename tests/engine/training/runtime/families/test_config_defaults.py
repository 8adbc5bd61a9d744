"""Configs that state only what differs from transformers' defaults, as repositories of nested models do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from transformers import CONFIG_MAPPING, AutoConfig  # noqa: E402

from core.base_models import Catalogue, config_defaults, text_config, ties_embeddings  # noqa: E402
from engine.training import model_shapes  # noqa: E402
from engine.training.runtime.model import decoder  # noqa: E402
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip
"""The sizes that google/gemma-3-4b-it states; the rest is left to transformers."""
GEMMA_3_12B_TEXT = {"hidden_size": 3840, "intermediate_size": 15_360, "model_type": "gemma3_text", "num_attention_heads": 16,
                    "num_hidden_layers": 48, "num_key_value_heads": 8}  # fmt: skip


@pytest.mark.parametrize("family", sorted(config_defaults()))
def test_the_defaults_are_those_of_transformers(family: str) -> None:
    name = next(n for n in (f"{family}_text", family) if n in CONFIG_MAPPING)
    theirs = CONFIG_MAPPING[name]()
    assert {key: getattr(theirs, key) for key in config_defaults()[family]} == dict(config_defaults()[family])


@pytest.mark.parametrize("config", [GEMMA_3_4B, {**GEMMA_3_4B, "text_config": GEMMA_3_12B_TEXT}], ids=["4b", "12b"])
def test_a_config_that_states_few_sizes_has_the_shape_of_the_model_that_transformers_builds(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = decoder.auto_class(known).from_config(known)
    built = sum(p.numel() for p in decoder.text_decoder(model).parameters())
    shape = model_shapes.from_config(config)
    assert (shape.decoder_parameters, shape.tied_embeddings, shape.head_dim) == (built, True, 256)
    assert shape.context_length == 131_072
    assert text_config(config)["vocab_size"] == known.get_text_config().vocab_size
    assert ties_embeddings(config)


def test_a_known_model_whose_config_states_no_context_has_the_one_that_was_read(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["max_position_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    name = "microsoft/phi-4"
    assert Catalogue({name: ({"id": name, "path": "base"}, tmp_path)}).get(name).context_length == 16_384
