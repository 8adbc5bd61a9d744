"""The cost model: what a training costs by its method, its GPUs and how many there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest

from engine.training import cost_model, model_shapes
from engine.training.cost_model import flops_per_token, tokens_per_second, training_cost
from engine.training.memory import GANG_SIZES, GPUS, Case
from engine.training.spec import Strategy

EIGHT = model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"]
SEVENTY = model_shapes.WELL_KNOWN_SHAPES["llama-3.1-70b"]
CASE = Case(shape=EIGHT, adapter="lora", max_seq_len=4096, per_device_batch_size=2, attention="flex_attention")
FULL = replace(CASE, adapter="full")


def on(case: Case, count: int, strategy: Strategy = "fsdp2") -> Case:
    return replace(case, world_size=count, strategy="single" if count == 1 else strategy)


def hours(case: Case, gpu: str, tokens: float) -> float:
    return training_cost(case, gpu, rows=tokens / case.max_seq_len, tokens=tokens).total_s / 3600


@pytest.mark.parametrize(
    ("shape", "adapter", "gpu", "strategy"),
    list(itertools.product((EIGHT, SEVENTY), ("lora", "qlora", "full"), ("h100-80gb", "a100-80gb", "l4-24gb"), ("ddp", "fsdp2", "zero2"))),
)
def test_more_gpus_never_take_longer_and_never_cost_less(
    shape: model_shapes.ModelShape, adapter: Literal["lora", "qlora", "full"], gpu: str, strategy: Strategy
) -> None:
    case = replace(CASE, shape=shape, adapter=adapter)
    times = [hours(on(case, n, strategy), gpu, 1e9) for n in GANG_SIZES]
    assert times == sorted(times, reverse=True)
    gpu_hours = [n * took for n, took in zip(GANG_SIZES, times, strict=True)]
    assert gpu_hours == sorted(gpu_hours)
    if strategy == "ddp" and adapter != "full":
        assert times[0] / times[-1] > 0.8 * 32, "adapters exchange next to nothing"


def test_gradients_that_are_exchanged_once_a_step_cost_less_the_more_micro_batches_a_step_has() -> None:
    small = replace(CASE, shape=EIGHT, adapter="full", max_seq_len=512, per_device_batch_size=1)

    def steps_s(strategy: Strategy, accumulation_steps: int) -> float:
        case = on(small, 8, strategy)
        return training_cost(case, "l4-24gb", rows=8e6, tokens=8e6 * 512, accumulation_steps=accumulation_steps).steps_s

    for strategy in ("ddp", "zero1"):
        once, eight = steps_s(strategy, 1), steps_s(strategy, 8)
        assert once / eight > 3, "exchanging takes most of such a micro-batch"
    for strategy in ("fsdp2", "zero2", "zero3"):
        assert steps_s(strategy, 8) == steps_s(strategy, 1)


def test_a_70b_run_on_32_gpus_takes_hours_and_not_days() -> None:
    case = on(replace(FULL, shape=SEVENTY, per_device_batch_size=1), 32)
    took = hours(case, "h100-80gb", 5e8)
    assert 4.0 < took < 8.0
    assert 32 * took < 250


def test_frozen_weights_save_their_gradients_and_recomputation_costs_a_forward_pass() -> None:
    kept = replace(CASE, gradient_checkpointing=False)
    assert flops_per_token(kept) / flops_per_token(replace(kept, adapter="full")) == pytest.approx(2 / 3, abs=0.04)
    assert flops_per_token(CASE) / flops_per_token(kept) == pytest.approx(3 / 2, abs=0.06)
    dense = 6 * (EIGHT.linear_parameters + EIGHT.vocab * EIGHT.hidden)
    assert flops_per_token(replace(kept, adapter="full")) == pytest.approx(dense, rel=0.1)


def test_a_mixture_costs_the_experts_that_a_token_goes_through() -> None:
    """Total parameters take memory, active ones take time."""
    mixture = replace(EIGHT, num_moe_layers=EIGHT.num_layers, num_experts=8, experts_per_token=1, expert_intermediate=EIGHT.intermediate)
    assert mixture.num_parameters > 5 * EIGHT.num_parameters
    case = replace(CASE, adapter="full", gradient_checkpointing=False)
    assert flops_per_token(replace(case, shape=mixture)) == flops_per_token(replace(case, shape=EIGHT))
    frozen = replace(case, shape=mixture, train_experts=False)
    assert flops_per_token(frozen) < 0.85 * flops_per_token(replace(case, shape=mixture))
    assert frozen.trained_parameters < 0.4 * EIGHT.num_parameters


def test_long_windows_cost_attention_and_a_mask_costs_what_it_hides() -> None:
    def attention(case: Case) -> float:
        return flops_per_token(case) - flops_per_token(replace(case, max_seq_len=1))

    long = replace(CASE, max_seq_len=32_768)
    assert attention(long) == pytest.approx(8 * attention(CASE), rel=0.01)
    assert attention(long) > 0.5 * flops_per_token(replace(long, max_seq_len=1))
    masked = replace(CASE, attention="sdpa")
    assert attention(masked) == pytest.approx(2 * attention(CASE), rel=0.01), "of each window's row, all is computed"


def test_pairs_cost_their_tokens_and_judged_answers_a_pass_more() -> None:
    assert flops_per_token(replace(CASE, method="dpo")) == flops_per_token(CASE)
    extra = flops_per_token(replace(CASE, method="kto")) / flops_per_token(CASE)
    assert extra == pytest.approx(4 / 3, abs=0.03)


def test_unpacking_4_bit_weights_costs_little_beside_a_full_micro_batch_and_much_beside_a_small_one() -> None:
    def slower(case: Case) -> float:
        return tokens_per_second(case, "l4-24gb") / tokens_per_second(replace(case, adapter="qlora"), "l4-24gb")

    assert 1.0 < slower(CASE) < 1.1
    assert slower(replace(CASE, max_seq_len=256, per_device_batch_size=1)) > 1.5


def test_small_micro_batches_wait_for_the_host() -> None:
    small = replace(CASE, max_seq_len=256, per_device_batch_size=1)
    floor = cost_model.LAUNCH_S * EIGHT.num_layers * 3
    assert 256 / tokens_per_second(small, "h100-80gb") == pytest.approx(floor)
    assert tokens_per_second(CASE, "h100-80gb") > 2 * tokens_per_second(small, "h100-80gb")


def test_a_slower_gpu_takes_longer_and_float32_longer_still() -> None:
    speeds = [tokens_per_second(CASE, gpu) for gpu in ("h100-80gb", "a100-80gb", "l40s-48gb", "l4-24gb", "local")]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 5 * speeds[3]
    assert tokens_per_second(replace(CASE, precision="fp32"), "h100-80gb") < speeds[0] / 5


def test_every_gpu_has_a_speed_or_is_a_cpu() -> None:
    assert {name for name, gpu in GPUS.items() if not gpu.is_cpu} == set(cost_model.GPU_SPEEDS)


def test_large_weights_take_longer_to_read_before_the_first_step() -> None:
    small, large = cost_model.setup_s(CASE), cost_model.setup_s(on(replace(CASE, shape=SEVENTY), 8))
    assert cost_model.SETUP_S < small < large < 300
    assert training_cost(CASE, "h100-80gb", rows=1, tokens=10).total_s > small
    read = small - cost_model.SETUP_S, cost_model.setup_s(on(CASE, 8)) - cost_model.SETUP_S
    assert [EIGHT.num_parameters * 2 / seconds for seconds in read] == [pytest.approx(0.4e9), pytest.approx(0.9e9)], "a node reads faster"


def test_the_extra_pass_of_judged_answers_is_launched_unpacked_and_gathered_too() -> None:
    small = replace(CASE, max_seq_len=64, per_device_batch_size=1)
    judged = replace(small, method="kto")
    took = [cost_model.micro_batch_s(case, "h100-80gb", tokens=64) for case in (small, judged)]
    assert took[1] / took[0] == pytest.approx(4 / 3), "a small micro-batch waits for four launches where it waited for three"
    wide = [cost_model.micro_batch_s(on(replace(c, shape=SEVENTY), 4), "l4-24gb", tokens=64) for c in (small, judged)]
    assert wide[1] / wide[0] > 1.3, "weights are gathered three times where they were gathered twice"
    quantized = [cost_model.micro_batch_s(replace(c, adapter="qlora"), "t4-16gb", tokens=1) for c in (small, judged)]
    assert quantized[1] / quantized[0] == pytest.approx(4 / 3, rel=0.05)


def test_a_node_that_is_not_full_is_reached_over_the_network_too() -> None:
    small = replace(FULL, shape=SEVENTY, max_seq_len=256, per_device_batch_size=1)
    eight, twelve, sixteen = (cost_model.micro_batch_s(on(small, n), "h100-80gb", tokens=256) for n in (8, 12, 16))
    assert twelve == pytest.approx(sixteen), "two nodes, half of what a node takes in comes over the network"
    assert twelve > 1.2 * eight
