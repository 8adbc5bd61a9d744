"""Predicts how long a training takes from its operations and what a GPU sustains, without history or measurements of this installation.

1. Operations per token: 2 per weight forward, 2 for the gradients of activations, 2 for those of trained weights; one more forward pass of
   the blocks where activations are recomputed; attention's own products with the keys that its kernel computes.
2. A micro-batch takes its operations at the sustained rate, plus the time to unpack 4-bit weights; never less than launching its kernels.
3. Ranks exchange weights and gradients meanwhile; a share of the shorter of the two is not hidden. Waiting for each other costs a tenth.
4. A training is its micro-batches plus the set-up of its processes.

`benchmarks/estimates` compares the result with published throughputs; the one that determined a number is named beside it and in
`benchmarks/estimates/published.yaml`. Real durations of this installation correct it (`control_plane.jobs.estimates.rules`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.training import methods
from engine.training.memory.cases import REPLICATED, Case
from engine.training.memory.estimates import quantized_bytes
from engine.training.memory.gpus import GPUS_PER_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Sustained rates of one GPU."""

    half_flops: float
    """Operations per second in bf16 (fp16 where there is none), including recomputed ones, when all parameters are trained."""
    fp32_flops: float
    """Operations per second in float32 without tensor cores: the runtime leaves TF32 off."""
    memory_bytes_per_s: float
    """From NVIDIA's data sheets."""
    link_bytes_per_s: float
    """Bytes per second to the GPUs of its node, one direction, from the data sheets: NVLink, or PCIe on boards without it."""


H100, A100 = 5.5e14, 2.3e14
"""Set so that modelled over published is 1 on average for llm-foundry's MPT models and VectorLM's Llama 3 8B (`published.yaml`)."""
MATMUL_SHARE = 0.67
"""Share of the best matrix product measured on a board, for boards without a published training throughput: the H100's 550 of 821
TFLOP/s (the A100's is 230 of 268). The products are those of github.com/mag-/gpu_benchmark (October 2024)."""
FP32_SHARE = 0.67
"""Share of the data sheet's float32 peak; derived like :data:`MATMUL_SHARE`."""
GPU_SPEEDS: Mapping[str, Speed] = {
    name: Speed(half_flops=half, fp32_flops=FP32_SHARE * fp32 * 1e12, memory_bytes_per_s=memory * 1e12, link_bytes_per_s=link * 1e9)
    for name, (half, fp32, memory, link) in {
        "h100-80gb": (H100, 67.0, 3.35, 450),
        "h100-94gb": (MATMUL_SHARE * 488.5e12, 60.0, 3.9, 64),
        "h200-141gb": (H100, 67.0, 4.8, 450),
        "a100-40gb": (A100, 19.5, 1.555, 300),
        "a100-80gb": (A100, 19.5, 2.039, 300),
        "l40s-48gb": (MATMUL_SHARE * 252.0e12, 91.6, 0.864, 32),
        "l4-24gb": (MATMUL_SHARE * 91.4e12, 30.3, 0.3, 32),
        "t4-16gb": (MATMUL_SHARE * 65.0e12, 8.1, 0.32, 16),
        "v100-16gb": (MATMUL_SHARE * 96.1e12, 15.7, 0.9, 150),
        "v100-32gb": (MATMUL_SHARE * 94.0e12, 15.7, 0.9, 150),
    }.items()
}
"""An H200 computes like an H100. No product was measured for the T4: its data sheet's peak."""
CPU_FLOPS = 8.5e10
"""One thread in any precision: 2,996 tokens a second on the demo model's LoRA (`benchmarks/training_overhead_cpu_202611.json`)."""
ADAPTER_SHARE = 0.87
"""Share of the rate with all parameters: small products and float32 adapters beside each linear layer. VectorLM, Llama 3 8B on one A100:
4,079 tokens a second with LoRA, 3,550 without, where two thirds of the operations remain."""
LAUNCH_S = 1.6e-3
"""Seconds of host time for one pass through one block with adapters: Qwen's profile of LoRA at 256 tokens, where the GPU waits: 1.0, 1.2
and 1.6 s for 8 micro-batches of three passes through 24, 32 and 40 blocks. Without adapters half of the kernels remain."""
UNPACK_SHARE = 0.5
"""Share of memory bandwidth that unpacking 4-bit weights reaches. Assumed: QLoRA is 7 % slower than LoRA in LLaMA-Factory's table for
Unsloth, 2 % in torchtune's."""
LINK_SHARE = 0.5
"""Share of the link's peak that gathering weights reaches: Qwen 72B in ZeRO-3 on four A100s gathers 216 GB in 1.5 s at 256 tokens."""
NETWORK_BYTES_PER_S = 25e9
"""Bytes per second from node to node for each GPU: 1,600 Gbit/s for eight, as in MosaicML's cluster of `published.yaml`."""
NOT_HIDDEN = 0.3
"""Hidden share of the shorter of computing and exchanging: MPT 70B on 32 H100s loses 15 % where a micro-batch is 2 windows instead of 8."""
PACE_OF_SEVERAL = 0.9
"""Remaining share of each rank's pace when it waits for others: VectorLM from one to two A100s (0.89 and 0.88), and no less on four."""
SETUP_S = 30.0
"""Seconds of a training process before its first step, without loading weights: imports, the run's files, the self-test."""
READ_BYTES_PER_S, NODE_READ_BYTES_PER_S = 0.4e9, 0.9e9
"""Bytes per second of weights from storage: one process, and all of a node together (`engine.scheduler.simulation.costs`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    setup_s: float
    """Seconds until the first step."""
    steps_s: float
    """Seconds for all steps."""

    @property
    def total_s(self) -> float:
        """Seconds for which the training holds its GPUs."""
        return self.setup_s + self.steps_s


def training_cost(case: Case, gpu_type: str, *, rows: float, tokens: float, accumulation_steps: int = 1) -> Cost:
    """Returns the duration of training on `rows` of the pack with `tokens` tokens, over all epochs and ranks of `case`, on GPUs of
    `gpu_type`.

    A step is `accumulation_steps` micro-batches.
    """
    micro_batches = max(1.0, rows / (case.per_device_batch_size * case.data_ranks))
    each = tokens / (micro_batches * case.world_size)
    one = micro_batch_s(case, gpu_type, tokens=each, accumulation_steps=accumulation_steps)
    return Cost(setup_s=setup_s(case), steps_s=micro_batches * one)


def tokens_per_second(case: Case, gpu_type: str) -> float:
    """Tokens per second of all ranks together, in full micro-batches."""
    return case.world_size * case.tokens / micro_batch_s(case, gpu_type, tokens=case.tokens)


def micro_batch_s(case: Case, gpu_type: str, *, tokens: float, accumulation_steps: int = 1) -> float:
    """Returns the mean seconds of one micro-batch of `tokens` on each rank, forward and backward, over a step's `accumulation_steps`."""
    speed = GPU_SPEEDS.get(gpu_type)
    if speed is None:  # CPU: ranks exchange through its memory
        return tokens * flops_per_token(case) / CPU_FLOPS / (PACE_OF_SEVERAL if case.world_size > 1 else 1.0)
    rate = speed.half_flops if case.half else speed.fp32_flops
    computing = tokens * flops_per_token(case) / (rate * (1.0 if case.full else ADAPTER_SHARE)) + _unpacking_s(case, speed)
    launching = LAUNCH_S * (0.5 if case.full else 1.0) * case.shape.num_layers * (_passes(case) + case.gradient_checkpointing)
    busy, exchanging = max(computing, launching), _exchange_s(case, speed, accumulation_steps)
    overlapped = max(busy, exchanging) + NOT_HIDDEN * min(busy, exchanging)
    return overlapped / (PACE_OF_SEVERAL if case.world_size > 1 else 1.0)


def flops_per_token(case: Case) -> float:
    """Returns the operations per token, forward and backward, including recomputed ones.

    Of experts only those that the router chooses count. A preference pair's tokens are those of both answers; the reference has scored them
    before. For each judged answer, another prompt's is scored too, forward only.
    """
    shape = case.shape
    adapter = 0 if case.full else shape.lora_parameters(case.rank)
    head = shape.vocab * shape.hidden
    attention = 4.0 * shape.num_attention_layers * shape.q_size * _keys(case)
    twice = 2.0 * shape.active_parameters if case.use_dora and case.dropout else 0.0  # DoRA drops out inputs of the base too
    blocks = 2.0 * (shape.active_parameters + adapter) + attention + twice
    trained = shape.active_parameters + head - (0 if case.train_experts else shape.active_expert_parameters) if case.full else adapter
    backward = 2.0 * (shape.active_parameters + adapter + head + trained) + 2.0 * attention + twice
    recomputed = blocks if case.gradient_checkpointing else 0.0
    again = (_passes(case) - 2) * (blocks + 2.0 * head)
    return blocks + 2.0 * head + backward + recomputed + again


def _passes(case: Case) -> int:
    """Passes over the weights: forward and backward, and one more forward for judged answers; recomputation is not counted."""
    return 3 if methods.method_named(case.method).pack == "judged" else 2


def _keys(case: Case) -> float:
    """Returns the mean number of keys that a token's query is multiplied with: with a mask (``sdpa``) its whole row, else those before it.

    Shorter documents in a window leave fewer to the kernels that skip the others; how many is not known here.
    """
    if case.masked:
        return case.mask_elements / case.tokens
    return case.max_seq_len / 2


def _unpacking_s(case: Case, speed: Speed) -> float:
    """Seconds to read 4-bit weights and write them in half precision for each pass through the blocks; limited by memory bandwidth."""
    if case.adapter != "qlora":
        return 0.0
    moved = case.shape.linear_parameters * (quantized_bytes(double=case.quantization.double) + 2)
    return (_passes(case) + case.gradient_checkpointing) * moved / (UNPACK_SHARE * speed.memory_bytes_per_s)


def _exchange_s(case: Case, speed: Speed, accumulation_steps: int) -> float:
    """Seconds to gather sharded weights forward and backward, to sum gradients of trained weights over the ranks, and to exchange tokens
    between ranks that share windows.

    DDP and ZeRO-1 sum once a step; the others after each micro-batch, so that a rank holds only its share. Every node receives what it does
    not hold over the network of all of its GPUs; every GPU then gets it over the node's links.
    """
    each_step = case.strategy in (*REPLICATED, "zero1")
    world, gradients = case.world_size, 4.0 * case.trained_parameters / (accumulation_steps if each_step else 1)
    if world == 1:
        return 0.0
    gathered = 0.0 if case.strategy in (*REPLICATED, "zero1", "zero2") else _passes(case) * case.shape.num_parameters * case.compute_bytes
    moved = gathered + gradients * (1.0 if gathered else 2.0)  # reduce-scattered to shards, or all-reduced to every rank
    tokens = (_passes(case) + case.gradient_checkpointing) * case.shape.num_layers * case.exchanged_bytes
    shared = tokens * (1 - 1 / case.context_parallel)
    within = (moved * (1 - 1 / world) + shared) / (LINK_SHARE * speed.link_bytes_per_s)
    nodes = math.ceil(world / GPUS_PER_NODE)
    return max(within, moved * (1 - 1 / nodes) / (LINK_SHARE * NETWORK_BYTES_PER_S * GPUS_PER_NODE))


def setup_s(case: Case) -> float:
    """Returns the seconds until the first step: processes start and read the base model's weights."""
    weights = case.shape.num_parameters * 2
    return SETUP_S + weights / (READ_BYTES_PER_S if case.world_size == 1 else NODE_READ_BYTES_PER_S)
