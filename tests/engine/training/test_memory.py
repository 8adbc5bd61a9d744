"""The memory estimate: what grows with what, what sharding divides, known figures, and what is chosen or refused because of it."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.memory_cpu import Trial
from core.errors import InvalidRequest
from engine.training.cost_model import micro_batch_s
from engine.training.memory import GPUS, Case, Fit, Placement, estimate
from engine.training.memory.estimates import MEANINGS, quantized_bytes
from engine.training.memory.gpu_fit import MICRO_BATCH_S
from engine.training.model_shapes import WELL_KNOWN_SHAPES, ModelShape
from engine.training.spec import Quantization

GIB = 2**30
B8 = WELL_KNOWN_SHAPES["llama-3.1-8b"]
RESULTS = sorted((Path(__file__).parents[3] / "benchmarks").glob("training_memory_cpu_*.json"))


def case(**fields: Any) -> Case:
    return Case(**{"shape": B8, "adapter": "lora", "max_seq_len": 2048, **fields})


def total(**fields: Any) -> int:
    return estimate(case(**fields)).total_bytes


def placed(model: str, adapter: str, **fields: Any) -> Fit:
    return fit(WELL_KNOWN_SHAPES[model], **{"adapter": adapter, "max_seq_len": 4096, **fields})


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


def test_ranks_of_a_large_sharded_model_start_empty() -> None:
    assert any("zero_init" in note for note in placed("qwen2.5-14b", "full").notes)
    assert not placed("llama-3.1-8b", "full").notes
    assumed = dataclasses.replace(WELL_KNOWN_SHAPES["llama-3.1-8b"], assumed=True)
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
    widest = fit(
        WELL_KNOWN_SHAPES["llama-3.1-70b"], adapter="full", max_seq_len=4096, global_batch=512, num_gpus=32, attention="flash_attention_2"
    )
    tried = Case(
        shape=WELL_KNOWN_SHAPES["llama-3.1-70b"], adapter="full", max_seq_len=4096, world_size=32, strategy="fsdp2",
        attention="flash_attention_2", per_device_batch_size=widest.per_device_batch_size,
        gradient_checkpointing=widest.gradient_checkpointing,
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
        fit(WELL_KNOWN_SHAPES["llama-3.1-70b"], max_seq_len=32_768, **long)
    assert refused.value.code == "micro_batch_too_long"
    found = re.search(r"max_seq_len to (\d+)", refused.value.message)
    assert found is not None
    assert fit(WELL_KNOWN_SHAPES["llama-3.1-70b"], max_seq_len=int(found[1]), **long).strategy == "fsdp2"


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
