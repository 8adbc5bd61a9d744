"""Claims about where jobs are placed, for pools that a machine of this size does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.jobs.estimates import expected_time
from control_plane.jobs.estimates.job_plan import Placed, check_frozen_parts, check_target_modules, fit_on, placed_in, unpacked_if_needed
from control_plane.jobs.submission import JobRequest
from core.base_models import BaseModel
from core.errors import InvalidRequest
from engine.scheduler.pools import Pool, equal_nodes
from engine.training import hyperparameters, methods, model_shapes, recipes
from engine.training.hyperparameters import ModelFacts, PackFacts, Plan
from engine.training.memory import GPUS
from engine.training.spec import TrainingSpec

H100 = Pool(name="large", nodes=equal_nodes(64), gpu_type="h100-80gb", max_gpus_per_job=32)
ONE = Pool(name="small", nodes=equal_nodes(8), gpu_type="h100-80gb", max_gpus_per_job=1)
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "mistral-nemo", "qwen2.5-32b", "llama-3.1-70b")


def planned(model: str, requested: dict[str, Any] | None = None, **asked: Any) -> Plan:
    shape = model_shapes.WELL_KNOWN_SHAPES[model]
    facts = ModelFacts(id=model, num_parameters=shape.num_parameters, context_length=shape.context_length, digest="d" * 64)
    return hyperparameters.plan(requested or {}, facts, **asked)


def placed(model: str, requested: dict[str, Any] | None = None, *, pool: Pool = H100, **asked: Any) -> Placed:
    plan = planned(model, requested, **asked)
    return Placed(plan=plan, fit=fit_on(pool, plan, model_shapes.WELL_KNOWN_SHAPES[model]))


def resolved(found: Placed, *, num_rows: int) -> TrainingSpec:
    pack = PackFacts(fingerprint="pk", dataset_id="ds", num_examples=1200, num_windows=num_rows, num_tokens=1, max_seq_len=512)
    return hyperparameters.resolve(found.plan, pack, seed=1, lock_sha256="", commit="", **found.placement)


@pytest.mark.parametrize("adapter", recipes.ADAPTER_KINDS)
@pytest.mark.parametrize("method", sorted(methods.registered_methods()))
@pytest.mark.parametrize("model", MODELS)
def test_every_model_finds_a_place_for_every_method_and_its_batch_is_whole(model: str, method: str, adapter: str) -> None:
    found = placed(model, method=method, adapter=adapter)
    for num_rows in (3, 777, 100_000):
        spec = resolved(found, num_rows=num_rows)
        opt = spec.optimization
        assert opt.global_batch_size(spec.world_size) % spec.world_size == 0
        assert opt.per_device_batch_size <= found.fit.per_device_batch_size
        assert (spec.strategy == "single") == (spec.world_size == 1)
        assert adapter != "qlora" or spec.strategy in ("single", "ddp", "zero2")


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=lambda lora: next(iter(lora)))
def test_adapters_that_read_whole_weights_are_never_sharded(lora: dict[str, Any]) -> None:
    assert placed("llama-3.1-70b", lora, adapter="qlora").fit.strategy == "single"
    assert placed("llama-3.1-70b", adapter="lora").fit.strategy == "fsdp2"
    with pytest.raises(InvalidRequest, match="use adapter qlora") as refused:
        placed("llama-3.1-70b", lora, adapter="lora")
    assert refused.value.code == "memory_exceeded"


def test_a_long_window_is_shared_and_the_step_keeps_its_rows() -> None:
    asked: dict[str, Any] = {"device": GPUS["h100-80gb"].device, "needs": model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"].attention_needs}
    found = placed("llama-3.1-8b", {"max_seq_len": 131_072, "batch_size": 4}, **asked)
    spec = resolved(found, num_rows=100)
    assert (spec.world_size, spec.context_parallel, spec.data_ranks, spec.rows_per_step) == (2, 2, 1, 4)
    assert found.fit.to_dict()["context_parallel"] == 2
    eight = placed("llama-3.1-8b", {"max_seq_len": 131_072, "batch_size": 4}, hardware={"num_gpus": 8, "context_parallel": 4}, **asked)
    assert resolved(eight, num_rows=100).rows_per_step == 4
    assert resolved(eight, num_rows=100).resume_sha256 == spec.resume_sha256, "ranks do not change what is trained"
    with pytest.raises(InvalidRequest, match="they need flash_attention_2, and its attention is computed by sdpa here"):
        placed("llama-3.1-8b", {"attention": "sdpa"}, hardware={"context_parallel": 2}, **asked)
    pairs = replace(H100, nodes=tuple(replace(node, num_gpus=2) for node in H100.nodes))
    with pytest.raises(InvalidRequest, match="cannot be split over 4 GPUs: a node of the pool has 2 GPUs"):
        placed("llama-3.1-8b", {"max_seq_len": 131_072}, hardware={"context_parallel": 4}, pool=pairs, **asked)


def test_the_planned_sizes_take_the_planned_numbers_of_gpus() -> None:
    assert placed("llama-3.1-8b").fit.num_gpus == 1
    assert placed("llama-3.1-70b", adapter="qlora").fit.num_gpus == 1
    assert 2 <= placed("llama-3.1-70b").fit.num_gpus <= 8
    assert placed("llama-3.1-70b", adapter="full").fit.num_gpus >= 8


def test_gpus_and_strategy_asked_for_are_kept() -> None:
    found = placed("llama-3.1-8b", {"batch_size": 96}, hardware={"num_gpus": 8, "strategy": "zero1"})
    spec = resolved(found, num_rows=10_000)
    assert (spec.world_size, spec.strategy, spec.optimization.global_batch_size(8)) == (8, "zero1", 96)


@pytest.mark.parametrize(
    ("asked", "pool", "code", "says"),
    [
        ({"hardware": {"num_gpus": 8}}, ONE, "invalid_hardware", "exceeds the 1 that pool small gives"),
        ({}, ONE, "memory_exceeded", "use adapter qlora"),
        ({"adapter": "full"}, ONE, "memory_exceeded", "this pool allows at most 1 per job"),
        ({"requested": {"per_device_batch_size": 64}}, H100, "memory_exceeded", "leave per_device_batch_size"),
    ],
)
def test_what_fits_nowhere_is_refused_with_what_would_fit(asked: dict[str, Any], pool: Pool, code: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        placed("llama-3.1-70b", pool=pool, **asked)
    assert refused.value.code == code


def test_an_optimizer_that_cannot_be_shared_out_is_refused_where_the_estimate_shares() -> None:
    assert placed("llama-3.2-1b", {"optimizer": "adafactor"}, adapter="full").fit.strategy == "single"
    with pytest.raises(InvalidRequest, match="adafactor needs whole matrices on each GPU, but strategy fsdp2"):
        placed("llama-3.1-70b", {"optimizer": "adafactor"}, adapter="full")


def test_on_a_gpu_activations_are_recomputed_only_if_they_do_not_fit_or_on_request() -> None:
    assert not placed("llama-3.1-8b", {"max_seq_len": 4096}).fit.gradient_checkpointing
    assert placed("llama-3.1-8b", {"max_seq_len": 32_768}).fit.gradient_checkpointing
    asked = placed("llama-3.1-8b", {"max_seq_len": 4096, "gradient_checkpointing": True})
    assert asked.fit.gradient_checkpointing and resolved(asked, num_rows=1000).gradient_checkpointing


@pytest.mark.parametrize(
    ("longest", "max_seq_len", "packs"), [(None, 4096, True), (0, 4096, False), (8192, 8192, True), (8192, 16_384, False)]
)
def test_examples_get_windows_of_their_own_where_the_model_cannot_keep_them_apart(
    longest: int | None, max_seq_len: int, packs: bool
) -> None:
    shape = replace(model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"], max_packed_len=longest)
    plan = unpacked_if_needed(planned("llama-3.1-8b", {"max_seq_len": max_seq_len}), shape)
    assert plan.requested.get("packing", True) == packs
    asked = planned("llama-3.1-8b", {"max_seq_len": max_seq_len, "packing": True})
    if packs:
        assert unpacked_if_needed(asked, shape) == asked
    else:
        with pytest.raises(InvalidRequest, match="set packing to false"):
            unpacked_if_needed(asked, shape)


def test_preference_methods_pack_nothing() -> None:
    shape = replace(model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"], max_packed_len=0)
    plan = planned("llama-3.1-8b", method="dpo")
    assert unpacked_if_needed(plan, shape) == plan


def test_experts_are_chosen_only_where_there_are_some_and_zero_only_where_all_is_trained() -> None:
    dense = model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"]
    mixture = replace(dense, num_moe_layers=32, num_experts=8, experts_per_token=2, expert_intermediate=14_336)
    zero = {"num_gpus": 8, "strategy": "zero3"}
    with pytest.raises(InvalidRequest, match="has no experts"):
        check_frozen_parts(planned("llama-3.1-8b", {"train_experts": False}, adapter="full"), dense)
    with pytest.raises(InvalidRequest, match="use fsdp2"):
        check_frozen_parts(planned("llama-3.1-8b", adapter="full", hardware=zero), mixture)
    check_frozen_parts(planned("llama-3.1-8b", {"train_router": True}, adapter="full", hardware=zero), mixture)
    check_frozen_parts(planned("llama-3.1-8b", adapter="full", hardware=zero), dense)
    check_frozen_parts(planned("llama-3.1-8b", hardware=zero), mixture)


def test_target_modules_are_layers_that_adapters_can_train_in_the_model() -> None:
    dense = model_shapes.WELL_KNOWN_SHAPES["llama-3.1-8b"]
    experts_alone = replace(dense, num_moe_layers=32, num_experts=8, experts_per_token=2, expert_intermediate=14_336)
    fused = replace(dense, fused_projections=True)
    for shape, good, bad in ((dense, "up_proj", "qkv_proj"), (experts_alone, "q_proj", "gate_proj"), (fused, "gate_up_proj", "q_proj")):
        check_target_modules(planned("llama-3.1-8b", {"target_modules": [good]}), shape)
        check_target_modules(planned("llama-3.1-8b", {"target_modules": "all-linear"}), shape)
        with pytest.raises(InvalidRequest, match=f"cannot train {bad} in .*{good}"):
            check_target_modules(planned("llama-3.1-8b", {"target_modules": [good, bad]}), shape)
    check_target_modules(planned("llama-3.1-8b", {"target_modules": ["q_proj"]}), replace(fused, assumed=True))
    qwen = BaseModel(
        id="qwen2.5-0.5b", repo="Qwen/Qwen2.5-0.5B", revision="c" * 40, digest="d" * 64, tokenizer_digest="t" * 64,
        template_digest="e" * 64, license="apache-2.0", context_length=32_768, num_parameters=494_032_768,
        deprecated_since=None, directory=None,
    )  # fmt: skip
    request = JobRequest(model=qwen.id, training_file="any", hyperparameters={"target_modules": ["q_proj"]})
    assert placed_in([H100], request, qwen, tier="premium").plan.requested["target_modules"] == ("q_proj",)
    with pytest.raises(InvalidRequest, match="cannot train qkv_proj in qwen"):
        placed_in([H100], replace(request, hyperparameters={"target_modules": ["qkv_proj"]}), qwen, tier="premium")


def test_a_plan_on_a_cpu_keeps_the_micro_batch_of_its_recipe() -> None:
    local = Pool(name="local", nodes=equal_nodes(1), gpu_type="local", max_gpus_per_job=1)
    facts = ModelFacts(id="demo-llama-3m", num_parameters=3_400_000, context_length=1024, digest="d" * 64)
    shape = model_shapes.shape_of("demo-llama-3m", num_parameters=3_400_000)
    plan = hyperparameters.plan({}, facts)
    spec = resolved(Placed(plan=plan, fit=fit_on(local, plan, shape)), num_rows=300)
    assert (spec.world_size, spec.strategy, spec.optimization.per_device_batch_size, spec.precision) == (1, "single", 1, "fp32")


def test_activations_are_recomputed_as_the_memory_estimate_says_also_on_a_cpu() -> None:
    local = Pool(name="local", nodes=equal_nodes(1), gpu_type="local", max_gpus_per_job=1)
    plan = planned("llama-3.2-1b", {"max_seq_len": 8192})
    found = Placed(plan=plan, fit=fit_on(local, plan, model_shapes.WELL_KNOWN_SHAPES["llama-3.2-1b"]))
    assert not replace(plan, max_seq_len=512).gradient_checkpointing
    assert found.fit.gradient_checkpointing and resolved(found, num_rows=300).gradient_checkpointing


@pytest.mark.parametrize(
    ("method", "num_examples", "tokens", "num_rows", "max_seq_len"),
    [
        pytest.param("cpt", 10, 400_000, 98, 4096, id="long texts are split into more rows than there are"),
        pytest.param("sft", 10, 400_000, 10, 4096, id="long conversations are cut, so a row for each is the most"),
        pytest.param("sft", 1000, 300_000, 167, 2048, id="six whole examples fit into a shortened window"),
        pytest.param("sft", 60, 180_000, 60, 3000, id="an example over a shortened window has one of its own"),
        pytest.param("sft", 30_000, 6_000_000, 1467, 4096, id="windows of max_seq_len are filled"),
    ],
)
def test_an_expected_pack_has_the_rows_that_its_windows_hold(
    method: str, num_examples: int, tokens: int, num_rows: int, max_seq_len: int
) -> None:
    found = placed("llama-3.2-1b", {"max_seq_len": 4096}, method=method)
    spec, rows = expected_time.resolved(found, dataset_id="ds", num_examples=num_examples, tokens=tokens, seed=1)
    assert (rows, spec.max_seq_len) == (num_rows, max_seq_len)
