"""Ranks that each hold the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.training.attempts import SPEC


@pytest.mark.parametrize(("rank", "written"), [(0, ["adapter_config.json", "adapter_model.safetensors"]), (1, [])])
def test_only_rank_0_writes_the_finished_weights(rank: int, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.training.runtime.parallel.replicated import Replicated

    monkeypatch.setenv("RANK", str(rank))
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))
    strategy = Replicated(replace(SPEC, world_size=2))
    strategy.wrap(get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])), total_steps=1)
    strategy.save_weights(tmp_path, base_model="tiny-base")
    assert sorted(path.name for path in tmp_path.iterdir()) == written
