"""The memory estimate: what grows with what, what sharding divides, known figures, and what is chosen or refused because of it."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.memory_cpu import Trial
from ft_assets.errors import InvalidRequest
from ft_assets.training.cost_model import micro_batch_s
from ft_assets.training.memory import GPUS, Case, Fit, Placement, estimate
from ft_assets.training.memory.estimates import MEANINGS, backward_working_bytes, quantized_bytes
from ft_assets.training.memory.gpu_fit import MICRO_BATCH_S
from ft_assets.training.model_shapes import NAMED, ModelShape
from ft_assets.training.spec import Quantization

GIB = 2**30
B8 = NAMED["llama-3.1-8b"]
RESULTS = sorted((Path(__file__).parents[3] / "benchmarks").glob("training_memory_cpu_*.json"))


def case(**fields: Any) -> Case:
    return Case(**{"shape": B8, "adapter": "lora", "max_seq_len": 2048, **fields})


def total(**fields: Any) -> int:
    return estimate(case(**fields)).total_bytes


def placed(model: str, adapter: str, **fields: Any) -> Fit:
    return fit(NAMED[model], **{"adapter": adapter, "max_seq_len": 4096, **fields})


def fit(
    shape: ModelShape, *, gpu: str = "h100-80gb", max_gpus: int = 32, global_batch: int = 64, num_gpus: int | None = None,
    strategy: Any = None, memory_bytes: int = 0, context_sizes: tuple[int, ...] = (1,), **fields: Any,
) -> Fit:  # fmt: skip
    place = Placement(
        gpu=GPUS[gpu], max_gpus=max_gpus, global_batch=global_batch, num_gpus=num_gpus, strategy=strategy, memory_bytes=memory_bytes,
        context_sizes=context_sizes,
        micro_batch_s=lambda tried: micro_batch_s(tried, gpu, tokens=tried.tokens),
        fixed_batch="per_device_batch_size" in fields, fixed_checkpointing="gradient_checkpointing" in fields,
    )  # fmt: skip
    return place.fit(Case(**{"shape": shape, "gradient_checkpointing": fields["max_seq_len"] > 1024, **fields}))


@pytest.mark.parametrize("adapter", ["lora", "qlora", "full"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_longer_rows_and_larger_batches_take_more(adapter: str, checkpointing: bool) -> None:
    fields = {"adapter": adapter, "gradient_checkpointing": checkpointing}
    lengths = [total(max_seq_len=n, **fields) for n in (512, 1024, 2048, 4096)]
    batches = [total(per_device_batch_size=n, **fields) for n in (1, 2, 4, 8)]
    assert lengths == sorted(set(lengths)) and batches == sorted(set(batches))


def test_a_higher_rank_takes_more_and_a_dropout_keeps_its_mask() -> None:
    ranks = [total(rank=n) for n in (8, 16, 64, 128)]
    assert ranks == sorted(set(ranks))
    assert total(dropout=0.05, gradient_checkpointing=False) > total(dropout=0.0, gradient_checkpointing=False)


def test_checkpointing_a_smaller_optimizer_and_4_bits_take_less() -> None:
    assert total(gradient_checkpointing=True) < total(gradient_checkpointing=False)
    optimizers = [total(adapter="full", optimizer=name) for name in ("adafactor", "adamw_8bit", "adamw_torch")]
    assert optimizers == sorted(set(optimizers))
    assert total(adapter="qlora") < total(adapter="lora") < total(adapter="full")


def test_a_pair_takes_both_of_its_answers() -> None:
    pairs, two = case(method="dpo"), case(method="dpo", per_device_batch_size=2)
    assert pairs.tokens == 2 * case().tokens and two.tokens == 2 * pairs.tokens
    assert estimate(pairs).total_bytes > estimate(case()).total_bytes


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_each_row_of_a_batch_has_a_mask_of_its_own(method: str) -> None:
    masks = [case(method=method, per_device_batch_size=n).mask_elements for n in (1, 2, 4)]
    assert [m // masks[0] for m in masks] == [1, 2, 4]
    assert total(attention="flash_attention_2", max_seq_len=16_384) < total(attention="sdpa", max_seq_len=16_384)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero2", "zero3"])
def test_sharding_divides_what_it_shards_and_only_that(strategy: str) -> None:
    sharded = {"fsdp2": {"weights", "gradients", "optimizer"}, "zero1": {"optimizer", "master_weights"}}
    sharded["zero2"] = sharded["zero1"] | {"gradients"}
    sharded["zero3"] = sharded["zero2"] | {"weights"}
    four, eight = (estimate(case(adapter="full", strategy=strategy, world_size=n)).parts for n in (4, 8))
    for part in ("weights", "master_weights", "gradients", "optimizer"):
        assert eight[part] == pytest.approx(four[part] / 2 if part in sharded[strategy] else four[part])
    assert any(four[part] for part in sharded[strategy])


def test_copies_of_ddp_share_nothing_but_take_nccl() -> None:
    one, two = estimate(case()), estimate(case(strategy="ddp", world_size=2))
    assert {k: v for k, v in one.parts.items() if k != "context"} == {k: v for k, v in two.parts.items() if k != "context"}
    assert two.parts["context"] > one.parts["context"]


def test_full_fine_tuning_of_8b_with_adamw_takes_16_bytes_a_parameter_before_activations() -> None:
    """ZeRO (Rajbhandari et al. 2020, section 3.1): 16 bytes a parameter with Adam; 128 GB for 8B."""
    for strategy in ("single", "zero1"):
        parts = estimate(case(adapter="full", strategy=strategy)).parts
        held = sum(parts[name] for name in ("weights", "master_weights", "gradients", "optimizer"))
        assert held == 16 * B8.num_parameters
        assert held == pytest.approx(128e9, rel=0.01)


def test_double_quantization_saves_the_0_37_bits_a_parameter_of_the_paper() -> None:
    """QLoRA (Dettmers et al. 2023, section 3): constants take 0.5 bits a parameter, doubly quantized 0.127."""
    assert 8 * (quantized_bytes(double=False) - 0.5) == 0.5
    assert 8 * (quantized_bytes(double=True) - 0.5) == pytest.approx(0.127, abs=0.001)
    single, double = (estimate(case(adapter="qlora", quantization=Quantization(double=d))).parts["weights"] for d in (False, True))
    assert 8 * (single - double) / B8.linear_parameters == pytest.approx(0.373, abs=0.001)


def test_qlora_leaves_embeddings_and_norms_in_half_precision() -> None:
    weights = estimate(case(adapter="qlora")).parts["weights"]
    assert weights == pytest.approx(
        B8.linear_parameters * quantized_bytes(double=True) + 2 * (B8.num_parameters - B8.linear_parameters), abs=1
    )
    assert weights / GIB == pytest.approx(5.3, abs=0.1)


def test_the_parts_add_up_and_are_explained() -> None:
    found = estimate(case(adapter="full"))
    assert set(found.parts) == set(MEANINGS) and sum(found.parts.values()) == found.total_bytes
    assert all(value >= 0 for value in found.parts.values())
    lines = found.explain()
    assert len(lines) == 1 + sum(1 for value in found.parts.values() if value) and lines[-1].startswith("total: ")


@pytest.mark.skipif(not RESULTS, reason="no measurement of this code is kept")
def test_the_estimate_is_within_15_percent_of_measured_peaks() -> None:
    """What ``python -m benchmarks.training.memory_cpu`` measured, against the estimate of today's code."""
    kept = json.loads(RESULTS[-1].read_text())
    errors = []
    for measured in kept["cases"]:
        found = estimate(Trial(**measured["settings"]).case, overheads=False).total_bytes
        errors.append(abs(found / measured["measured_bytes"] - 1))
    assert len(errors) >= 8
    assert sum(errors) / len(errors) <= 0.15
    assert max(errors) <= 0.25


@pytest.mark.parametrize(
    ("model", "adapter", "num_gpus", "strategy"),
    [
        ("llama-3.2-1b", "lora", 1, "single"),
        ("llama-3.2-1b", "full", 1, "single"),
        ("llama-3.1-8b", "lora", 1, "single"),
        ("llama-3.1-8b", "qlora", 1, "single"),
        ("llama-3.1-8b", "full", 4, "fsdp2"),
        ("qwen2.5-14b", "full", 8, "fsdp2"),
        ("qwen2.5-32b", "qlora", 1, "single"),
        ("qwen2.5-32b", "full", 16, "fsdp2"),
        ("llama-3.1-70b", "lora", 4, "fsdp2"),
        ("llama-3.1-70b", "qlora", 1, "single"),
        ("llama-3.1-70b", "full", 32, "fsdp2"),
    ],
)
def test_the_smallest_number_of_h100_that_holds_the_job_is_chosen(model: str, adapter: str, num_gpus: int, strategy: str) -> None:
    chosen = placed(model, adapter)
    assert (chosen.num_gpus, chosen.strategy) == (num_gpus, strategy)
    assert chosen.estimate.total_bytes <= 0.95 * GPUS["h100-80gb"].memory_bytes
    assert 64 % (chosen.num_gpus * chosen.per_device_batch_size) == 0
    if num_gpus > 1:
        with pytest.raises(InvalidRequest):
            placed(model, adapter, max_gpus=num_gpus // 2)


def test_the_micro_batch_is_the_largest_divisor_that_fits() -> None:
    chosen = placed("llama-3.1-8b", "lora", global_batch=48)
    sizes = [n for n in range(1, 49) if 48 % n == 0 and n > chosen.per_device_batch_size]
    assert chosen.per_device_batch_size > 1 and sizes
    for size in sizes:
        with pytest.raises(InvalidRequest):
            placed("llama-3.1-8b", "lora", global_batch=48, per_device_batch_size=size)


def test_short_windows_are_not_recomputed_unless_memory_needs_it() -> None:
    assert not placed("llama-3.1-8b", "lora", max_seq_len=1024).gradient_checkpointing
    assert placed("llama-3.1-8b", "lora", max_seq_len=2048).gradient_checkpointing
    assert placed("qwen2.5-7b", "lora", max_seq_len=1024, gpu="l4-24gb").gradient_checkpointing
    assert not placed("llama-3.1-8b", "lora", max_seq_len=1024, gradient_checkpointing=False).gradient_checkpointing


def test_what_is_asked_for_is_kept() -> None:
    copies = placed("llama-3.1-8b", "lora", num_gpus=8)
    assert (copies.num_gpus, copies.strategy) == (8, "ddp")
    assert placed("llama-3.1-8b", "full", num_gpus=8, strategy="zero3").strategy == "zero3"
    with pytest.raises(InvalidRequest, match="batch_size 6 is not divisible by num_gpus 4"):
        placed("llama-3.1-8b", "lora", num_gpus=4, global_batch=6)


@pytest.mark.parametrize("fields", [{"precision": "fp16"}, {"optimizer": "adamw_8bit"}])
def test_what_the_runtime_cannot_shard_is_copied_or_refused(fields: dict[str, Any]) -> None:
    assert placed("llama-3.1-8b", "lora", num_gpus=4, **fields).strategy == "ddp"
    with pytest.raises(InvalidRequest, match="use adapter qlora"):
        placed("llama-3.1-70b", "lora", **fields)


def test_qlora_is_never_sharded() -> None:
    assert placed("llama-3.1-70b", "qlora", num_gpus=4).strategy in ("ddp", "zero2")
    with pytest.raises(InvalidRequest) as refused:
        placed("llama-3.1-70b", "qlora", gpu="l40s-48gb", max_seq_len=32_768)
    assert "GPUs" not in refused.value.message.split(";")[-1]


def test_ranks_of_a_sharded_mixture_may_read_all_of_it_and_the_note_says_how_much() -> None:
    mixture = replace(SMALL, num_moe_layers=3, num_experts=4, experts_per_token=2, expert_intermediate=5, other_parameters=2**30)
    given = Placement(gpu=GPUS["h100-80gb"], max_gpus=4, num_gpus=4, global_batch=4, strategy="fsdp2")
    [note] = given.fit(case(shape=mixture, adapter="full", max_seq_len=16)).notes
    assert "each of the 4 ranks reads the whole model" in note and "about 4 GiB per rank" in note
    assert not replace(given, strategy="ddp").fit(case(shape=mixture, adapter="full", max_seq_len=16)).notes


def test_ranks_of_a_large_sharded_model_start_empty() -> None:
    assert any("zero_init" in note for note in placed("qwen2.5-14b", "full").notes)
    assert not placed("llama-3.1-8b", "full").notes
    assumed = dataclasses.replace(NAMED["llama-3.1-8b"], assumed=True)
    given = {"method": "sft", "adapter": "lora", "precision": "bf16", "max_seq_len": 512, "rank": 8, "optimizer": "adamw_torch"}
    assert "shape is unknown" in fit(assumed, gpu="h100-80gb", max_gpus=1, global_batch=1, **given).notes[0]


def test_a_refusal_names_estimate_limit_and_changes_that_really_fit() -> None:
    with pytest.raises(InvalidRequest) as refused:
        placed("llama-3.1-8b", "full", max_gpus=1)
    error = refused.value
    assert (error.code, error.http_status) == ("memory_exceeded", 400)
    assert "full at max_seq_len 4096 needs about" in error.message and "each GPU of 1 x h100-80gb" in error.message
    assert "only 75.7 GiB is usable" in error.message
    assert "use adapter lora" in error.message and "use 4 GPUs (this pool allows at most 1 per job)" in error.message
    assert placed("llama-3.1-8b", "lora", max_gpus=1) and placed("llama-3.1-8b", "full", max_gpus=4).num_gpus == 4


def test_a_refusal_for_length_names_the_length_that_fits() -> None:
    with pytest.raises(InvalidRequest) as refused:
        placed("llama-3.1-8b", "lora", gpu="l4-24gb", max_gpus=1, max_seq_len=32_768)
    length = int(refused.value.message.partition("lower max_seq_len to ")[2].partition(",")[0])
    assert placed("llama-3.1-8b", "lora", gpu="l4-24gb", max_gpus=1, max_seq_len=length)
    with pytest.raises(InvalidRequest):
        placed("llama-3.1-8b", "lora", gpu="l4-24gb", max_gpus=1, max_seq_len=2 * length)


LONG: dict[str, Any] = {"max_seq_len": 131_072, "attention": "flash_attention_2", "global_batch": 8, "max_gpus": 8}
SHARED = (1, 2, 4, 8)


def test_a_window_that_no_gpu_holds_is_shared_by_as_few_as_hold_it() -> None:
    with pytest.raises(InvalidRequest, match=r"needs about 1\d\d\.\d GiB on each GPU of 8 x h100-80gb .* lower max_seq_len to 65536"):
        placed("llama-3.1-8b", "lora", **LONG)
    found = placed("llama-3.1-8b", "lora", context_sizes=SHARED, **LONG)
    assert (found.num_gpus, found.context_parallel, found.strategy) == (2, 2, "ddp")
    assert placed("llama-3.1-8b", "lora", context_sizes=SHARED, **LONG | {"max_seq_len": 65_536}).num_gpus == 1
    smaller = placed("llama-3.1-8b", "lora", gpu="a100-40gb", context_sizes=SHARED, **LONG)
    assert (smaller.num_gpus, smaller.context_parallel) == (8, 8)
    full = placed("llama-3.1-8b", "full", context_sizes=SHARED, **LONG)
    assert (full.num_gpus, full.context_parallel, full.strategy) == (8, 8, "fsdp2")
    with pytest.raises(InvalidRequest, match=r"8 x l4-24gb.*lower max_seq_len to 32768"):
        placed("llama-3.1-8b", "lora", gpu="l4-24gb", context_sizes=SHARED, **LONG)


def test_ranks_that_share_a_window_hold_their_part_of_its_tokens_and_buffers_for_the_exchange() -> None:
    whole = case(max_seq_len=4096, attention="flash_attention_2", strategy="ddp", world_size=4)
    split = replace(whole, context_parallel=4)
    assert (whole.tokens, split.tokens, split.data_ranks) == (4096, 1024, 1)
    parts = {name: (estimate(whole).parts[name], estimate(split).parts[name]) for name in ("activations", "weights", "gathered")}
    assert parts["activations"][0] == 4 * parts["activations"][1] and parts["weights"][0] == parts["weights"][1]
    assert parts["gathered"] == (0, 2 * 2 * 1024 * (2 * 4096 + 2 * 1024)), "sent and received: queries, keys, values and the result"
    assert replace(split, context_parallel=16).kv_size == 2 * split.shape.kv_size


def test_a_sharded_micro_batch_is_short_enough_for_a_stop() -> None:
    widest = fit(NAMED["llama-3.1-70b"], adapter="full", max_seq_len=4096, global_batch=512, num_gpus=32, attention="flash_attention_2")
    tried = Case(
        shape=NAMED["llama-3.1-70b"], adapter="full", max_seq_len=4096, world_size=32, strategy="fsdp2", attention="flash_attention_2",
        per_device_batch_size=widest.per_device_batch_size, gradient_checkpointing=widest.gradient_checkpointing,
    )  # fmt: skip
    assert widest.strategy == "fsdp2" and micro_batch_s(tried, "h100-80gb", tokens=tried.tokens) <= MICRO_BATCH_S
    wider = replace(tried, per_device_batch_size=2 * tried.per_device_batch_size)
    too_long = micro_batch_s(wider, "h100-80gb", tokens=wider.tokens) > MICRO_BATCH_S
    assert too_long or estimate(wider).total_bytes > 0.95 * GPUS["h100-80gb"].memory_bytes, "no larger one would do"


def test_a_sharded_micro_batch_that_no_stop_can_wait_for_is_refused_with_a_length_that_is_short_enough() -> None:
    long = {
        "adapter": "full",
        "attention": "flash_attention_2",
        "strategy": "fsdp2",
        "num_gpus": 32,
        "global_batch": 32,
        "gpu": "h200-141gb",
    }
    with pytest.raises(InvalidRequest, match=r"about \d+ s on 32 x h200-141gb.*lower max_seq_len to (\d+)") as refused:
        fit(NAMED["llama-3.1-70b"], max_seq_len=32_768, **long)
    assert refused.value.code == "micro_batch_too_long"
    found = re.search(r"max_seq_len to (\d+)", refused.value.message)
    assert found is not None
    assert fit(NAMED["llama-3.1-70b"], max_seq_len=int(found[1]), **long).strategy == "fsdp2"


def test_a_cpu_takes_the_recipes_batch_and_refuses_only_what_clearly_exceeds_its_memory() -> None:
    given = {"gpu": "local", "precision": "fp32", "max_seq_len": 512, "per_device_batch_size": 2}
    chosen = placed("qwen2.5-0.5b", "lora", **given)
    assert (chosen.num_gpus, chosen.strategy, chosen.per_device_batch_size) == (1, "single", 2)
    need = chosen.estimate.total_bytes
    assert placed("qwen2.5-0.5b", "lora", memory_bytes=int(need / 1.2), **given)
    with pytest.raises(InvalidRequest, match="on this machine") as refused:
        placed("qwen2.5-0.5b", "lora", memory_bytes=need // 2, **given)
    assert "GPUs" not in refused.value.message


def test_the_dictionary_of_a_fit_is_what_the_estimate_of_a_job_shows() -> None:
    shown = placed("llama-3.1-8b", "lora").to_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["per_gpu_bytes"] == sum(shown["parts"].values())  # type: ignore[attr-defined]
    assert (shown["gpu_type"], shown["num_gpus"], shown["strategy"]) == ("h100-80gb", 1, "single")


SMALL = ModelShape(
    num_layers=3, hidden=10, num_heads=4, num_kv_heads=2, head_dim=3, intermediate=14, vocab=50, tied_embeddings=False, context_length=64
)
"""Queries are 12 wide, keys and values 6. Linear layers of a block: 10x12, 10x6, 10x6, 12x10, 10x14, 10x14, 14x10: 780 weights, 76 inputs,
72 outputs. Parameters: 3 x 780 linear, 2 x 50 x 10 of embeddings, 7 x 10 of norms, 3410 in all."""
ALL_PARAMETERS, OF_LINEARS, LORA_4 = 3410, 2340, 3 * 4 * (76 + 72)
GPU_TILE = 32_768
"""Columns of logits that a GPU allocates at a time."""


def small(**fields: Any) -> dict[str, int]:
    """The parts that are not nothing; 2 windows of 16 tokens, an adapter of rank 4 in bf16 on a GPU."""
    given = {"shape": SMALL, "adapter": "lora", "max_seq_len": 16, "per_device_batch_size": 2, "rank": 4, **fields}
    parts = estimate(Case(**given), overheads=False).parts
    return {name: value for name, value in parts.items() if value}


def test_parts_of_an_adapter_by_hand() -> None:
    """32 tokens; 2 bytes a number. The blocks are recomputed, so that 3 block inputs and that of the output are kept."""
    outside = 32 * 10 * 2 + 32 * 10 * 4 + 2 * 16 * 16 + 2 * 2 * 32 * 3  # last block, final norm in float32, mask, sines and cosines
    again = block(inputs=7 * 4 * 2 * 32 + (2 + 1) * 32 * 76)
    expected = {
        "weights": 2 * ALL_PARAMETERS,
        "adapter": 4 * LORA_4,
        "gradients": 4 * LORA_4,
        "optimizer": 8 * LORA_4,
        "compute_copies": 2 * LORA_4,
        "activations": 3 * 32 * 10 * 2 + outside,
        "working": 3 * 2 * 32 * 14 + 8 * 32 * 14 + 2 * 2 * 32 * 10 + again,
    }
    assert small(gradient_checkpointing=True) == expected
    assert small(gradient_checkpointing=True, adapter="qlora") == expected | {
        "weights": round(OF_LINEARS * (0.5 + 1 / 64 + 4 / 16384)) + 2 * (ALL_PARAMETERS - OF_LINEARS),
        "gathered": 2 * 140,
    }


def test_a_mixture_holds_all_of_its_experts_and_quantizes_none() -> None:
    """3 blocks of 4 experts of 3 x 10 x 5 weights instead of MLPs, and a router of 4 x 10; attention has 360 weights in a block."""
    mixture = replace(SMALL, num_moe_layers=3, num_experts=4, experts_per_token=2, expert_intermediate=5)
    rest = 3 * 4 * 10 + 2 * 50 * 10 + 7 * 10
    assert (mixture.expert_parameters, mixture.num_parameters) == (3 * 4 * 150, 3 * 360 + 3 * 4 * 150 + rest)
    assert small(shape=mixture)["weights"] == 2 * mixture.num_parameters
    four_bits = round(3 * 360 * (0.5 + 1 / 64 + 4 / 16384))
    assert small(shape=mixture, adapter="qlora")["weights"] == four_bits + 2 * (3 * 4 * 150 + rest)
    trained = {frozen: small(shape=mixture, adapter="full", train_experts=not frozen)["gradients"] for frozen in (False, True)}
    assert trained[False] - trained[True] == 4 * 3 * 4 * 150
    assert trained[False] == 4 * (mixture.num_parameters - 3 * 4 * 10), "routers are frozen"


def test_attention_that_no_kernel_computes_holds_its_weights_for_every_pair_of_tokens() -> None:
    kept = {kind: small(attention=kind, gradient_checkpointing=False)["activations"] for kind in ("eager", "sdpa")}
    assert kept["eager"] - kept["sdpa"] == 3 * (4 + 2 * 2) * 4 * 2 * 16**2
    two = case(max_seq_len=16, per_device_batch_size=2, rank=4, gradient_checkpointing=True)
    working = {kind: backward_working_bytes(replace(two, shape=SMALL, attention=kind)) for kind in ("eager", "sdpa")}
    recomputed = (4 + 2 * 2) * 4 * 2 * 16**2
    assert working["eager"] - working["sdpa"] == recomputed + 8 * 4 * 2 * 16**2


def block(*, tokens: int = 32, inputs: int, mask: int = 2 * 16 * 16, keys: int = 12, norms: int = 0, b: int = 2) -> int:
    """What one block keeps: norms in float32, queries and output, keys and values, a float32 for each head, mask, MLP, linear inputs."""
    attention = b * tokens * (12 + 12 + keys + keys) + 4 * 4 * tokens
    return 2 * 4 * tokens * 10 + norms + attention + b * mask + 3 * b * tokens * 14 + inputs


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({}, block(inputs=7 * 4 * 2 * 32 + (2 + 1) * 32 * 76), id="each of seven pairs has a dropout of its own"),
        pytest.param({"dropout": 0.0}, block(inputs=7 * 4 * 2 * 32 + 2 * 32 * 76), id="without dropout each casts its own copy"),
        pytest.param(
            {"dropout": 0.0, "precision": "fp32"},
            block(b=4, inputs=7 * 4 * 4 * 32 + 4 * 32 * (2 * 10 + 14)),
            id="in float32 they share it",
        ),
        pytest.param(
            {"attention": "flash_attention_2"},
            block(inputs=7 * 4 * 2 * 32 + 3 * 32 * 76, mask=0, keys=6),
            id="flash attention repeats no keys and has no mask",
        ),
        pytest.param({"method": "dpo"}, block(tokens=64, inputs=7 * 4 * 2 * 64 + 3 * 64 * 76, mask=4 * 16 * 16), id="four padded answers"),
    ],
)
def test_activations_of_blocks_that_are_not_recomputed_by_hand(fields: dict[str, Any], kept: int) -> None:
    tokens = 64 if fields.get("method") == "dpo" else 32
    b = 4 if fields.get("precision") == "fp32" else 2
    mask = {"dpo": 4 * 16 * 16}.get(str(fields.get("method")), 0 if "attention" in fields else 2 * 16 * 16)
    outside = tokens * 10 * b + tokens * 10 * 4 + mask + 2 * b * tokens * 3
    assert small(gradient_checkpointing=False, **fields)["activations"] == 3 * kept + outside


def test_parts_of_full_fine_tuning_by_hand() -> None:
    """Parameters and what flows between blocks are float32; autocast makes half-precision copies, which recomputation does not keep."""
    expected = {
        "weights": 4 * ALL_PARAMETERS,
        "gradients": 4 * ALL_PARAMETERS,
        "optimizer": 8 * ALL_PARAMETERS,
        "activations": 3 * 32 * 10 * 4 + (32 * 10 * 4 + 32 * 10 * (4 + 4) + 2 * 16 * 16 + 2 * 4 * 32 * 3),
        "logits": 32 * 10 * (4 + 2 + 4) + 2 * 50 * 10 + 3 * 4 * 32 * 50,
    }
    assert small(adapter="full", gradient_checkpointing=True) == expected
    kept = small(adapter="full", gradient_checkpointing=False)
    inputs = 2 * 32 * (76 - 12)  # each layer casts its own copy; that of the output projection is what attention keeps
    assert kept["compute_copies"] == 2 * OF_LINEARS
    assert kept["activations"] == expected["activations"] - 3 * 32 * 10 * 4 + 3 * block(inputs=inputs, norms=2 * 4 * 32 * 10)


SLICE = 2**29
"""Bytes of logits, in float32, that a GPU holds of windows at a time."""


def test_the_output_layer_of_slices_of_windows_and_of_tiles_of_answers_by_hand() -> None:
    """2,048 tokens and a vocabulary of 2^17: 2^30 bytes of logits, two slices. Hidden states and their gradients stand beside them."""
    narrow, wide = (dataclasses.replace(SMALL, vocab=2**17, hidden=hidden) for hidden in (10, 4096))
    given = {"max_seq_len": 1024, "attention": "flash_attention_2", "gradient_checkpointing": True}
    assert small(**given, shape=narrow)["logits"] == 8 * 2048 * 10 + 3 * SLICE
    assert small(**given, shape=narrow, method="orpo")["logits"] == 8 * 4096 * 10 + 4096 * GPU_TILE * 2
    weight = 2**17 * 10
    assert small(**given, shape=narrow, adapter="full")["logits"] == 10 * 2048 * 10 + 4 * weight + 2 * weight + 3 * SLICE
    weight = 2**17 * 4096
    assert small(**given, shape=wide, adapter="full")["logits"] == 10 * 2048 * 4096 + 4 * weight + (2 + 4) * weight, "gradients, no logits"


@pytest.mark.parametrize(
    ("optimizer", "adapter", "state"),
    [
        pytest.param("adamw_8bit", "full", round(3410 * 2 * (1 + 4 / 256)), id="two bytes, and a float32 for 256 of each"),
        pytest.param("adafactor", "full", 4 * (3 * (76 + 72) + 2 * 50 + 2 * 10 + 70), id="rows and columns of each matrix, norms whole"),
        pytest.param("adafactor", "lora", 4 * 3 * (76 + 72 + 7 * 2 * 4), id="of both matrices of each pair"),
    ],
)
def test_states_of_smaller_optimizers_by_hand(optimizer: str, adapter: str, state: int) -> None:
    assert small(optimizer=optimizer, adapter=adapter)["optimizer"] == state


@pytest.mark.parametrize(
    ("strategy", "held", "gathered"),
    [
        # A block has 780 + 20 parameters; two of them and the embeddings are gathered, and gradients of one before and after their cast.
        ("fsdp2", {"weights": 4 * 3410 // 2, "gradients": 4 * 3410 // 2, "optimizer": 8 * 3410 // 2}, 2 * (2 * 800 + 1000) + 6 * 1800),
        ("zero1", {"weights": 2 * 3410, "gradients": 2 * 3410, "master_weights": 2 * 3410, "optimizer": 4 * 3410}, 4 * 3410),
        ("zero2", {"weights": 2 * 3410, "gradients": 3410, "master_weights": 2 * 3410, "optimizer": 4 * 3410}, 4 * 3410),
        ("zero3", {"weights": 3410, "gradients": 3410, "master_weights": 2 * 3410, "optimizer": 4 * 3410}, 4 * 3410 + 2 * 3410),
    ],
)
def test_what_two_ranks_hold_by_hand(strategy: str, held: dict[str, int], gathered: int) -> None:
    parts = small(adapter="full", strategy=strategy, world_size=2)
    assert {name: parts.get(name) for name in held} == held
    assert parts["gathered"] == gathered
    assert "compute_copies" not in parts, "they compute with parameters that were cast beforehand"


def test_the_backward_pass_by_hand_where_it_is_the_peak() -> None:
    """On a CPU the tile has the vocabulary's two columns. Three gradients of the MLP's width, two of the stream, the block recomputed."""
    shape = dataclasses.replace(SMALL, vocab=2)
    given = {"shape": shape, "adapter": "lora", "max_seq_len": 16, "per_device_batch_size": 2, "rank": 4, "on_cpu": True}
    found = estimate(Case(**given, precision="fp32"), overheads=False)
    assert found.phase == "backward"
    again = block(b=4, inputs=7 * 4 * 4 * 32 + (4 + 4) * 32 * 76)
    assert found.parts["working"] == 3 * 4 * 32 * 14 + 2 * 4 * 32 * 10 + again
    halves = estimate(Case(**given, precision="bf16"), overheads=False).parts
    assert halves["working"] == 3 * 2 * 32 * 14 + 8 * 32 * 14 + 2 * 2 * 32 * 10 + block(inputs=7 * 4 * 2 * 32 + (2 + 4) * 32 * 76)


def test_the_forward_pass_and_the_step_by_hand_where_they_are_the_peak() -> None:
    """A token or two in a wide model: copies for autocast on a CPU, and Adafactor's three float32 tables of the largest matrix."""
    wide = dataclasses.replace(SMALL, hidden=1000, intermediate=1000, vocab=2)
    given = {"shape": wide, "adapter": "full", "max_seq_len": 1, "per_device_batch_size": 1, "on_cpu": True}
    forward = estimate(Case(**given, precision="bf16"), overheads=False)
    assert (forward.phase, forward.parts["compute_copies"]) == ("forward", 2 * wide.linear_parameters)
    assert forward.parts["logits"] == (2 + 4) * 1000 + 2 * (2 + 4 * 3)
    step = estimate(Case(**given, precision="fp32", optimizer="adafactor"), overheads=False)
    assert (step.phase, step.parts["working"]) == ("step", 3 * 4 * 1000 * 1000)
    plain = estimate(Case(**given, precision="fp32"), overheads=False)
    assert (plain.phase, plain.parts["working"]) == ("step", 2 * 4 * 1000 * 1000), "a loop over the parameters keeps two"


def test_reserve_and_context_by_hand() -> None:
    for world, context in ((1, 0.75), (2, 1.75), (8, 1.75), (9, 2.25)):
        case_ = Case(shape=SMALL, adapter="lora", max_seq_len=16, strategy="ddp" if world > 1 else "single", world_size=world)
        tensors, whole = estimate(case_, overheads=False).total_bytes, estimate(case_).parts
        assert (whole["reserve"], whole["context"]) == (round(0.06 * tensors), context * GIB)
    on_cpu = estimate(Case(shape=SMALL, adapter="lora", max_seq_len=16, on_cpu=True)).parts
    assert on_cpu["context"] == 700 * 2**20


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    normed = dataclasses.replace(SMALL, qk_norm=True)
    for adapter, each in (("lora", 4), ("full", 6)):
        with_, without = (small(shape=s, adapter=adapter, gradient_checkpointing=False)["activations"] for s in (normed, SMALL))
        assert with_ - without == 3 * each * 32 * (12 + 6)
