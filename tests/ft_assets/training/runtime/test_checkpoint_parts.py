"""The parts that a resume needs are known without torch, and they are those that the strategies read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft_assets.training.checkpoints import STATE, checkpoint_parts
from ft_assets.training.runtime import parallel
from ft_assets.training.spec import Strategy
from tests.training_specs import SPEC


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2"])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_strategy_and_its_followers_agree_on_the_parts_of_a_checkpoint(strategy: Strategy, adapter: str) -> None:
    world_size = 1 if strategy == "single" else 2
    spec = replace(SPEC, strategy=strategy, world_size=world_size)
    if adapter == "full":
        spec = replace(spec, adapter="full", lora=None)
    own = parallel.build(spec).checkpoint_parts
    known = checkpoint_parts(spec)
    assert known[-1] == STATE
    assert [p.replace("adapter_model", "*model*") for p in known[:-1]] == [p.replace("adapter_model", "*model*") for p in own]
