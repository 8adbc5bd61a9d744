"""Flash attention over packed windows, and compiled blocks. The kernel itself only runs on GPUs, where each run's self-test verifies it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from engine.training.runtime.model import attention
from engine.training.runtime.model.compilation import compile_blocks
from engine.training.runtime.objectives.tokens import collate
from engine.training.runtime.self_test import Window
from tests.engine.training.attempts import SPEC
from tests.engine.training.runtime.model import flash_kernels

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by the compiler's own modules
LONGEST = 40
SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FLASH = replace(SPEC, attention="flash_attention_2", gradient_checkpointing=False)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    flash_kernels.register()
    AttentionInterface.register(attention.VARLEN, functools.partial(attention.varlen_attention, longest=LONGEST))


def model_of(config: Any) -> Any:
    torch.manual_seed(1)
    config._attn_implementation = attention.VARLEN
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # so that attention is far from even
    model.config.use_cache = False
    return model.train()


def windows(*lengths: Sequence[int]) -> list[Window]:
    rng = np.random.default_rng(2)
    found = []
    for parts in lengths:
        ids = rng.integers(0, 97, sum(parts), dtype=np.int32)
        found.append(Window(input_ids=ids, labels=ids, seq_lengths=np.array(parts, np.int32)))
    return found


def gradients(model: Any) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SHAPE), MistralConfig(**SHAPE, sliding_window=9), Qwen3Config(**SHAPE)],
    ids=["grouped keys", "sliding window", "normed keys"],
)
def test_joined_windows_give_each_example_the_logits_and_gradients_that_it_has_alone(config: Any) -> None:
    model = model_of(config)
    rows = windows([17, 5, 1], [23, 12])
    batch = collate(rows, pad=0, joined=True)
    assert batch["cu_seq_lens_q"].tolist() == [0, 17, 22, 23, 46, 58]
    packed = model(**{name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}).logits[0]
    weights = torch.randn_like(packed)
    (packed * weights).sum().backward()
    found = gradients(model)
    with attention.reference(model):
        parts = [ids for w in rows for ids in np.split(w.input_ids, np.cumsum(w.seq_lengths)[:-1])]
        alone = torch.cat([model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in parts])
    (alone * weights).sum().backward()
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, gradients(model), rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation == attention.VARLEN


def test_a_boundary_that_is_missing_is_seen_by_the_comparison() -> None:
    model = model_of(LlamaConfig(**SHAPE))
    batch = collate(windows([17, 5], [12]), pad=0, joined=True)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}
    right = model(**inputs).logits
    leaking = model(**inputs | {"cu_seq_lens_q": torch.tensor([0, 22, 34], dtype=torch.int32)}).logits
    torch.testing.assert_close(leaking[0, :17], right[0, :17])
    assert (leaking[0, 17:22] - right[0, 17:22]).abs().max() > 0.1


def test_rows_padded_on_the_right_need_no_mask() -> None:
    model = model_of(LlamaConfig(**SHAPE))
    ids = torch.randint(1, 97, (2, 20))
    there = torch.ones_like(ids)
    there[1, 13:] = 0
    flash = model(input_ids=ids, attention_mask=there).logits
    with attention.reference(model):
        expected = model(input_ids=ids, attention_mask=there).logits
    torch.testing.assert_close(flash[there == 1], expected[there == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_a_cpu_gets_sdpa_instead(name: str) -> None:
    found = attention.chosen(name, torch.device("cpu"), LlamaConfig(), precision="bf16", packed=True)
    assert (found.kernel, attention.register(found, max_seq_len=LONGEST)) == ("sdpa", "sdpa")
    assert f"{name} has no kernels for a CPU" in found.reason


def test_blocks_with_another_attention_are_not_compiled() -> None:
    model = model_of(LlamaConfig(**SHAPE))
    model.config._attn_implementation = "sdpa"
    found = compile_blocks(model, FLASH, CPU, total_steps=MANY)
    assert (found.blocks, found.reason) == (0, "sdpa attention: only flash attention has rows of any length, and no exchange between ranks")


CPU = torch.device("cpu")
MANY = 10**12
"""Steps after which even this model was worth compiling."""


@pytest.mark.parametrize(
    ("changes", "total_steps", "compiled", "because"),
    [
        pytest.param({}, MANY, 2, "repay compiling", id="a long run with flash attention"),
        pytest.param({"strategy": "ddp", "world_size": 2}, MANY, 2, "repay compiling", id="copies on several GPUs"),
        pytest.param({}, 100, 0, "fewer than the 1.5e\\+17", id="a short run"),
        pytest.param({"strategy": "fsdp2"}, MANY, 0, "fsdp2 gathers shards", id="shards"),
        pytest.param({"gradient_checkpointing": True}, MANY, 0, "dropout 0.1 would be recomputed", id="recomputed dropout"),
        pytest.param(
            {"gradient_checkpointing": True, "lora": None, "adapter": "full"}, MANY, 2, "repay compiling", id="recomputed without dropout"
        ),
    ],
)
def test_blocks_are_compiled_where_that_works_and_pays(changes: dict[str, Any], total_steps: int, compiled: int, because: str) -> None:
    model = model_of(LlamaConfig(**SHAPE))
    found = compile_blocks(model, replace(FLASH, **changes), CPU, total_steps=total_steps)
    assert found.blocks == compiled
    assert re.search(because, found.reason)
    assert sum(m._compiled_call_impl is not None for m in model.modules()) == compiled


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_blocks_train_alike_on_rows_of_any_length() -> None:
    """In float32: what rounds differently is in the last digits. Blocks are compiled once for all lengths."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(model_of(LlamaConfig(**SHAPE)), config)
    batches = [collate(windows(*lengths), pad=0, joined=True) for lengths in ([[17, 5], [23]], [[31]], [[9, 9, 9, 9]])]

    def trained() -> list[torch.Tensor]:
        found = []
        for batch in batches:
            logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", "cu_seq_lens_q")}).logits
            torch.nn.functional.cross_entropy(logits[0, :-1], batch["input_ids"][0, 1:]).backward()
            found.append(gradients(model))
        return found

    plain = trained()
    assert compile_blocks(model, FLASH, CPU, total_steps=MANY).blocks == 2
    torch._dynamo.utils.counters.clear()
    first, second = trained(), trained()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for expected, found, again in zip(plain, first, second, strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()
        assert torch.equal(found, again)
