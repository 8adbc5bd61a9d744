"""The memory estimate of a small model, part by part, against sums made by hand."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from engine.training.memory import GPUS, Case, Placement, estimate
from engine.training.memory.estimates import backward_working_bytes
from engine.training.model_shapes import ModelShape

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
    two = Case(shape=SMALL, adapter="lora", max_seq_len=16, per_device_batch_size=2, rank=4, gradient_checkpointing=True)
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
        assert (whole["reserve"], whole["context"]) == (round(0.06 * tensors), context * 2**30)
    on_cpu = estimate(Case(shape=SMALL, adapter="lora", max_seq_len=16, on_cpu=True)).parts
    assert on_cpu["context"] == 700 * 2**20


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    normed = dataclasses.replace(SMALL, qk_norm=True)
    for adapter, each in (("lora", 4), ("full", 6)):
        with_, without = (small(shape=s, adapter=adapter, gradient_checkpointing=False)["activations"] for s in (normed, SMALL))
        assert with_ - without == 3 * each * 32 * (12 + 6)


def test_ranks_of_a_sharded_mixture_may_read_all_of_it_and_the_note_says_how_much() -> None:
    mixture = replace(SMALL, num_moe_layers=3, num_experts=4, experts_per_token=2, expert_intermediate=5, other_parameters=2**30)
    given = Placement(gpu=GPUS["h100-80gb"], max_gpus=4, num_gpus=4, global_batch=4, strategy="fsdp2")
    [note] = given.fit(Case(shape=mixture, adapter="full", max_seq_len=16)).notes
    assert "each of the 4 ranks reads the whole model" in note and "about 4 GiB per rank" in note
    assert not replace(given, strategy="ddp").fit(Case(shape=mixture, adapter="full", max_seq_len=16)).notes
