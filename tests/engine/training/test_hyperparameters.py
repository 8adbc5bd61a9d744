"""Claims about how a request becomes a spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidRequest
from engine.training import methods
from engine.training.hyperparameters import ModelFacts, PackFacts, Plan, global_batch_size, min_windows, plan, resolve
from engine.training.model_shapes.attention_kernels import Device
from engine.training.spec import LATER_FIELDS, PARTS, EarlyStopping, Quantization, TrainingSpec, WarmStart
from engine.training.stored_specs import openai_hyperparameters

TURING = Device(capability=(7, 5))
DEMO = ModelFacts(id="demo-llama-3m", num_parameters=3_000_000, context_length=512, digest="d" * 64)
SMALL = ModelFacts(id="llama-8b", num_parameters=8_030_000_000, context_length=131072, digest="e" * 64)
LARGE = ModelFacts(id="llama-70b", num_parameters=70_600_000_000, context_length=131072, digest="f" * 64)


def pack(**changes: Any) -> PackFacts:
    facts: dict[str, Any] = {"fingerprint": "pk_1", "dataset_id": "ds_1", "num_examples": 1200, "num_windows": 260, "num_tokens": 132_000}
    return PackFacts(**{**facts, "max_seq_len": 512, **changes})


def spec(requested: dict[str, Any], model: ModelFacts = DEMO, facts: PackFacts | None = None, **others: Any) -> TrainingSpec:
    planned = {name: others.pop(name) for name in ("method", "adapter", "recipe", "hardware", "device", "needs") if name in others}
    arguments = {"seed": 1, "lock_sha256": "0" * 64, "commit": "c" * 40, **others}
    return resolve(plan(requested, model, **planned), facts or pack(), **arguments)


def test_auto_and_absent_are_the_same_spec() -> None:
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert spec(auto) == spec({})
    assert spec(auto).sha256 == spec({}).sha256


def test_a_model_gets_the_recipe_made_for_it_and_others_the_fallback() -> None:
    assert spec({}).recipe == "demo-llama-3m@6"
    assert spec({}, SMALL).recipe == "any-lora@3"


def test_the_small_recipe_is_fp32_with_a_high_rate_on_short_windows() -> None:
    found = spec({})
    assert found.lora is not None
    assert (found.precision, found.max_seq_len, found.gradient_checkpointing) == ("fp32", 512, False)
    assert found.optimization.learning_rate == pytest.approx(1.5e-3)
    assert (found.lora.rank, found.lora.alpha) == (16, 32)


def test_defaults_of_large_models() -> None:
    small, large = spec({}, SMALL, pack(max_seq_len=4096)), spec({}, LARGE, pack(max_seq_len=4096))
    assert small.lora is not None and large.lora is not None
    assert (small.lora.rank, small.lora.alpha, large.lora.rank, large.lora.alpha) == (16, 32, 32, 64)
    assert (small.precision, small.max_seq_len, small.gradient_checkpointing) == ("bf16", 4096, True)


def test_alpha_follows_the_rank_unless_it_is_given() -> None:
    followed, given = spec({"rank": 64}).lora, spec({"rank": 64, "alpha": 16}).lora
    assert followed is not None and given is not None
    assert (followed.alpha, given.alpha) == (128, 16)


def test_the_multiplier_multiplies_the_rate_of_the_recipe() -> None:
    assert spec({"learning_rate_multiplier": 0.5}).optimization.learning_rate == pytest.approx(7.5e-4)
    assert spec({"learning_rate": 1e-3}).optimization.learning_rate == 1e-3


def test_more_than_ten_thousand_rows_are_seen_once() -> None:
    assert spec({}, SMALL, pack(num_examples=10_001)).optimization.num_epochs == 1
    assert spec({}, SMALL, pack(num_examples=10_000)).optimization.num_epochs == 3
    assert spec({"n_epochs": 2}, SMALL, pack(num_examples=10_001)).optimization.num_epochs == 2


def test_a_small_dataset_gets_smaller_batches_rather_than_few_steps() -> None:
    few = spec({}, SMALL, pack(num_windows=100)).optimization
    many = spec({}, SMALL, pack(num_windows=100_000)).optimization
    assert few.per_device_batch_size * few.accumulation_steps == 3
    assert many.per_device_batch_size * many.accumulation_steps == 64


@pytest.mark.parametrize(
    ("requested", "data_ranks", "of_min_steps"),
    [
        pytest.param({}, 1, 1, id="one row a step"),
        pytest.param({}, 4, 4, id="one row for each rank"),
        pytest.param({"per_device_batch_size": 2}, 4, 8, id="a micro-batch for each rank"),
        pytest.param({"batch_size": 8}, 4, 8, id="a requested batch is of all ranks"),
        pytest.param({"n_epochs": 5}, 1, 1, id="trials with more epochs share the pack"),
        pytest.param({"max_steps": 1000}, 1, 0, id="the steps are given"),
        pytest.param({"packing": False}, 1, 0, id="a window for each row"),
    ],
)
def test_enough_windows_for_the_smallest_batch_to_make_the_recipes_steps(
    requested: dict[str, Any], data_ranks: int, of_min_steps: int
) -> None:
    planned = plan(requested, SMALL)
    wanted = of_min_steps * int(planned.value("min_steps"))
    assert min_windows(planned, num_examples=500, data_ranks=data_ranks) == wanted


def test_so_many_rows_that_any_length_makes_enough_windows_leave_the_window_open() -> None:
    planned = plan({}, SMALL)
    wanted = int(planned.value("min_steps"))
    enough = planned.max_seq_len * wanted // 2  # a row has two tokens or more
    assert min_windows(planned, num_examples=enough - 1) == wanted
    assert min_windows(planned, num_examples=enough) == 0


def test_preferences_do_not_share_windows_and_need_no_number_of_them() -> None:
    assert min_windows(plan({}, SMALL, method="dpo"), num_examples=500) == 0


def test_shorter_windows_of_the_pack_are_those_of_the_spec() -> None:
    short, whole = spec({}, SMALL, pack(max_seq_len=512)), spec({}, SMALL, pack(max_seq_len=4096))
    assert (short.max_seq_len, short.gradient_checkpointing) == (512, False)
    assert (whole.max_seq_len, whole.gradient_checkpointing) == (4096, True)


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (6, 1), (8, 2), (64, 4), (96, 8)])
@pytest.mark.parametrize("fits", [None, 1, 2, 5, 64])
def test_the_global_batch_is_what_was_asked_for_whatever_fits(batch_size: int, world_size: int, fits: int | None) -> None:
    found = spec({"batch_size": batch_size}, world_size=world_size, per_device_batch_size=fits)
    opt = found.optimization
    assert opt.per_device_batch_size * opt.accumulation_steps * world_size == batch_size
    assert opt.per_device_batch_size <= (fits or 1)
    assert openai_hyperparameters(found.to_dict(), {})["batch_size"] == batch_size


@pytest.mark.parametrize("world_size", [1, 2, 8, 32])
@pytest.mark.parametrize("num_rows", [1, 7, 999, 100_000])
@pytest.mark.parametrize("method", ["sft", "kto", "dpo"])
def test_a_default_batch_divides_over_ranks_and_micro_batches(method: str, num_rows: int, world_size: int) -> None:
    found = spec({}, SMALL, pack(num_windows=num_rows), method=method, world_size=world_size, per_device_batch_size=4)
    opt = found.optimization
    assert opt.global_batch_size(world_size) >= world_size
    assert opt.per_device_batch_size >= 1
    assert opt.global_batch_size(world_size) <= max(64, world_size * 2)


@pytest.mark.parametrize(
    ("windows", "requested", "steps"),
    [
        (8, {"batch_size": 4, "n_epochs": 1}, 2),
        (9, {"batch_size": 4, "n_epochs": 1}, 3),
        (9, {"batch_size": 4, "n_epochs": 2.5}, 6),
        (9, {"batch_size": 4, "n_epochs": 2, "max_steps": 5}, 5),
        (1, {"batch_size": 64, "n_epochs": 1}, 1),
    ],
)
def test_every_step_is_a_whole_batch_and_every_row_is_seen(windows: int, requested: dict[str, Any], steps: int) -> None:
    assert spec(requested, facts=pack(num_windows=windows)).optimization.total_steps(num_rows=windows, world_size=1) == steps


@pytest.mark.parametrize(("windows", "every"), [(10, 10), (1_000, 100), (10_000, 500)])
def test_short_runs_have_about_ten_checkpoints_and_long_ones_one_in_500_steps(windows: int, every: int) -> None:
    assert spec({"n_epochs": 1}, facts=pack(num_windows=windows)).checkpoint.every_steps == every


@pytest.mark.parametrize(
    ("requested", "says"),
    [
        ({"n_epochs": 0}, "above 0"),
        ({"n_epochs": "three"}, "a number"),
        ({"batch_size": 2.5}, "a whole number"),
        ({"batch_size": True}, "a whole number"),
        ({"learning_rate": float("nan")}, "a number"),
        ({"learning_rate_multiplier": -1}, "above 0"),
        ({"n_epochs": 10**400}, "at most 100"),
        ({"learning_rate": -(10**400)}, "above 0"),
        ({"max_seq_len": 10**400}, "exceeds the 512"),
        ({"rank": 12}, "one of 1, 8, 16"),
        ({"rank": 256}, "exceeds the 128 that this deployment's servers load; use one of 1, 8, 16, 32, 64, 128"),
        ({"dropout": 1.0}, "at most 0.9"),
        ({"max_seq_len": 1024}, "exceeds the 512 that demo-llama-3m can take"),
        ({"schedule": "rex"}, "one of linear, cosine, constant, wsd"),
        ({"checkpoint_every_steps": 501}, "at most 500"),
        ({"precision": "int8"}, "one of fp32"),
        ({"beta": 0.1}, "setting of dpo"),
        ({"beam": 1}, "GET /v1/fine_tuning/model_limits lists all"),
        ({"target_modules": ["lm_head"]}, "not lm_head"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "q_proj"),
        ({"target_modules": []}, "all-linear, or a list"),
        ({"target_modules": ["q_proj", "q_proj"]}, "all-linear, or a list"),
        ({"target_modules": "q_proj"}, "all-linear, or a list"),
        ({"modules_to_save": ["lm_head"]}, "cannot be served"),
        ({"added_tokens": ["<tool>"]}, "ft admin models extend ID --base BASE"),
        ({"init_lora_weights": "olora"}, "one of pissa, pissa_niter_4"),
        ({"loraplus_lr_ratio": 0.5}, "at least 1"),
        ({"use_dora": "yes"}, "true or false"),
        ({"layer_lr_decay": 0.2}, "at least 0.5"),
        ({"min_lr_ratio": 1.5}, "at most 1"),
        ({"min_lr_ratio": 0.1, "schedule": "constant"}, "no effect with schedule constant"),
        ({"adam_beta1": 0.8, "optimizer": "adafactor"}, "no effect with optimizer adafactor"),
        ({"adam_epsilon": 0}, "above 0"),
        ({"rank": 128, "init_lora_weights": "pissa"}, "ends as an adapter of rank 256, and the servers load .*; use one of 8, 16, 32, 64$"),
        ({"rank": 1, "init_lora_weights": "pissa"}, "ends as an adapter of rank 2"),
        ({"alpha": 3000, "init_lora_weights": "pissa"}, "use at most half of that"),
        ({"dropout": 0.1, "init_lora_weights": "pissa"}, "would drop parts of the base's largest singular values"),
        ({"weight_decay": 0.1, "init_lora_weights": "pissa_niter_16"}, "would shrink"),
        ({"use_dora": True, "init_lora_weights": "pissa"}, "cannot be combined"),
        ({"optimizer": "adafactor", "init_lora_weights": "pissa"}, "use adamw_torch or adamw_8bit"),
        ({"optimizer": "sgd"}, "one of adamw_torch"),
        ({"optimizer": ["adafactor"]}, "one of adamw_torch"),
        ({"per_device_batch_size": 0}, "at least 1"),
        ({"gradient_checkpointing": 1}, "true or false"),
        ({"early_stopping_min_delta": 0.1}, "set that too"),
        ({"quantization": "nf4"}, "adapter is lora"),
        ({"double_quantization": True}, "adapter is lora"),
        ({"train_experts": True}, "adapters leave experts and routers as they are"),
        ({"train_router": True}, "leave it out, or use full"),
        ({"train_experts": "all"}, "true or false"),
        ({"attention": "flash_attention_2"}, "flash_attention_2 has no kernels for a CPU; use sdpa"),
        ({"attention": "flex_attention"}, "flex_attention has no kernels for a CPU"),
        ({"attention": "flash_attention_2", "precision": "bf16"}, "flash_attention_2 has no kernels for a CPU"),
        ({"learning_rate": 1e-3, "learning_rate_multiplier": 2}, "keep one"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_value_limit_and_next_step(requested: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        plan(requested, DEMO)
    assert refused.value.code == "invalid_hyperparameter"
    assert refused.value.param == f"hyperparameters.{next(iter(requested))}"


QLORA, FULL = {"adapter": "qlora"}, {"adapter": "full"}


@pytest.mark.parametrize(
    ("requested", "combined", "param", "says"),
    [
        ({"rank": 8}, FULL, "hyperparameters.rank", "use lora"),
        ({"target_modules": "all-linear"}, FULL, "hyperparameters.target_modules", "use lora"),
        ({"loraplus_lr_ratio": 16}, FULL, "hyperparameters.loraplus_lr_ratio", "use lora"),
        ({"init_lora_weights": "pissa"}, FULL, "hyperparameters.init_lora_weights", "use lora"),
        ({"use_dora": True}, {"hardware": {"strategy": "fsdp2", "num_gpus": 2}}, "hyperparameters.use_dora", "use ddp"),
        ({"init_lora_weights": "pissa"}, {"hardware": {"strategy": "zero2"}}, "hyperparameters.init_lora_weights", "use ddp"),
        ({"neftune_noise_alpha": 5}, {"method": "dpo"}, "hyperparameters.neftune_noise_alpha", "use sft"),
        ({"double_quantization": False}, FULL, "hyperparameters.double_quantization", "use qlora"),
        ({"precision": "fp16"}, FULL, "hyperparameters.precision", "use bf16 or fp32, or an adapter"),
        ({}, QLORA | {"hardware": {"strategy": "zero3"}}, "hardware.strategy", "use zero2"),
        ({}, QLORA | {"hardware": {"strategy": "fsdp2", "num_gpus": 4}}, "hardware.strategy", "use zero2"),
        ({}, {"hardware": {"strategy": "single", "num_gpus": 2}}, "hardware.strategy", "num_gpus is 2"),
        ({}, {"hardware": {"strategy": "ddp", "num_gpus": 1}}, "hardware.strategy", "2 or more"),
        ({}, {"hardware": {"num_gpus": 3}}, "hardware.num_gpus", "one of 1, 2, 4, 8, 16, 32"),
        ({}, {"hardware": {"num_gpus": True}}, "hardware.num_gpus", "one of 1, 2"),
        ({}, {"hardware": {"gpus": 2}}, "hardware.gpus", "known are num_gpus, strategy, context_parallel"),
        ({}, {"hardware": {"context_parallel": 3}}, "hardware.context_parallel", "one of 1, 2, 4, 8"),
        ({}, {"hardware": {"context_parallel": 4, "num_gpus": 2}}, "hardware.context_parallel", "does not divide num_gpus 2"),
        ({}, {"hardware": {"context_parallel": 2, "strategy": "zero2"}}, "hardware.context_parallel", "not zero2; leave strategy out"),
        ({}, {"hardware": {"context_parallel": 2}, "method": "dpo"}, "hardware.context_parallel", "method dpo trains on pairs"),
        ({"train_router": True}, FULL | {"hardware": {"context_parallel": 2}}, "hardware.context_parallel", "a trained router"),
        ({"batch_size": 3}, {"hardware": {"num_gpus": 8, "context_parallel": 4}}, "hyperparameters.batch_size", "multiple of 2"),
        ({}, {"hardware": {"strategy": "fsdp"}}, "hardware.strategy", "one of single, ddp"),
        ({"batch_size": 6}, {"hardware": {"num_gpus": 4}}, "hyperparameters.batch_size", "multiple of 4"),
        ({"optimizer": "adamw_8bit"}, {"hardware": {"strategy": "zero1"}}, "hyperparameters.optimizer", "adamw_torch"),
        ({"batch_size": 8, "per_device_batch_size": 3}, {}, "hyperparameters.batch_size", "multiple of 3"),
        ({"batch_size": 8, "per_device_batch_size": 4}, {"hardware": {"num_gpus": 4}}, "hyperparameters.batch_size", "multiple of 16"),
        ({"packing": True}, {"method": "dpo"}, "hyperparameters.packing", "trains on pairs"),
        ({"safety_share": 0.1}, {"method": "kto"}, "hyperparameters.safety_share", "trains on judged"),
        ({"train_on_inputs": False}, {"method": "cpt"}, "hyperparameters.train_on_inputs", "every token"),
        ({"gamma": 1.0}, {"method": "dpo"}, "hyperparameters.gamma", "a setting of simpo, but the method is dpo"),
        ({"beta": 0.0}, {"method": "dpo"}, "hyperparameters.beta", "above 0"),
        ({"loss_type": "ppo"}, {"method": "dpo"}, "hyperparameters.loss_type", "one of sigmoid"),
        ({"label_smoothing": 0.5}, {"method": "dpo"}, "hyperparameters.label_smoothing", "at most 0.49"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, {"method": "dpo"}, "hyperparameters.label_smoothing", "use sigmoid or robust"),
        ({"precision": "bf16"}, {"device": TURING}, "hyperparameters.precision", "use fp16"),
    ],
)  # fmt: skip
def test_a_bad_combination_is_refused_with_the_reason_and_the_next_step(
    requested: dict[str, Any], combined: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        plan(requested, SMALL, **combined)
    assert refused.value.param == param


def test_options_of_adapters_and_rates_are_in_the_spec_and_their_defaults_change_nothing() -> None:
    plain = spec({}, SMALL)
    assert plain.lora is not None
    assert (plain.lora.saved_rank, plain.lora.saved_alpha, plain.lora.scale, plain.lora.reads_weights) == (16, 32.0, 2.0, False)
    asked = {
        "use_rslora": True, "loraplus_lr_ratio": 16, "min_lr_ratio": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "layer_lr_decay": 0.9,
        "neftune_noise_alpha": 5,
    }  # fmt: skip
    found = spec(asked, SMALL)
    opt = replace(
        plain.optimization, loraplus_lr_ratio=16.0, min_lr_ratio=0.1, adam_betas=(0.8, 0.999), adam_epsilon=1e-6, layer_lr_decay=0.9,
        neftune_noise_alpha=5.0,
    )  # fmt: skip
    assert (found.optimization, found.lora) == (opt, replace(plain.lora, use_rslora=True))
    assert len({spec({name: value}, SMALL).resume_sha256 for name, value in asked.items()} | {plain.resume_sha256}) == len(asked) + 1


def test_pissa_has_neither_dropout_nor_weight_decay_and_ends_with_twice_the_rank() -> None:
    found = spec({"init_lora_weights": "pissa_niter_16", "rank": 64}, SMALL)
    assert found.lora is not None
    assert (found.lora.rank, found.lora.dropout, found.optimization.weight_decay) == (64, 0.0, 0.0)
    assert (found.lora.saved_rank, found.lora.saved_alpha) == (128, 256.0)
    stabilized = replace(found.lora, use_rslora=True)
    assert stabilized.saved_alpha / stabilized.saved_rank**0.5 == pytest.approx(stabilized.scale)


def test_a_deployment_may_allow_other_ranks() -> None:
    assert plan({"rank": 512}, SMALL, max_rank=512).value("rank") == 512
    assert plan({"rank": 256, "init_lora_weights": "pissa"}, SMALL, max_rank=512).lora is not None
    with pytest.raises(InvalidRequest, match="rank 64 exceeds the 32"):
        plan({"rank": 64}, SMALL, max_rank=32)


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="multiple of 2"):
        spec({"batch_size": 3}, world_size=2)


def test_more_rows_at_a_time_than_fit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="allows 2"):
        spec({"per_device_batch_size": 4, "batch_size": 8}, per_device_batch_size=2)
    assert spec({"per_device_batch_size": 2, "batch_size": 8}, per_device_batch_size=8).optimization.per_device_batch_size == 2


def test_kto_takes_one_row_at_a_time_where_no_more_fit() -> None:
    opt = spec({}, SMALL, method="kto", per_device_batch_size=1).optimization
    assert (opt.per_device_batch_size, opt.global_batch_size(1)) == (1, 2)


@pytest.mark.parametrize("method", sorted(methods.registered_methods()))
@pytest.mark.parametrize("adapter", ["lora", "qlora", "full"])
@pytest.mark.parametrize("model", [DEMO, SMALL, LARGE], ids=lambda m: str(m.id))
def test_every_method_resolves_with_every_adapter_on_every_size(method: str, adapter: str, model: ModelFacts) -> None:
    found = spec({}, model, method=method, adapter=adapter)
    assert set(found.method_settings) == set(methods.method_named(method).settings)
    assert (found.lora is None) == (adapter == "full")
    assert (found.quantization is not None) == (adapter == "qlora")
    assert TrainingSpec.from_dict(found.to_dict()) == found
    assert spec({}, model, method=method, adapter=adapter).sha256 == found.sha256, "the same arguments give the same digest"


def test_settings_of_a_method_are_asked_for_or_its_defaults_and_1_is_1_point_0() -> None:
    assert spec({"beta": 1}, method="dpo").method_settings == {"beta": 1.0, "loss_type": "sigmoid", "label_smoothing": 0.0}
    assert spec({"beta": 1}, method="dpo").sha256 == spec({"beta": 1.0}, method="dpo").sha256
    assert spec({"beta": "auto"}, method="dpo").method_settings["beta"] == 0.1


@pytest.mark.parametrize("stored", json.loads((Path(__file__).parent / "specs_of_release_0_1.json").read_text()))
def test_specs_of_the_first_release_keep_their_digests(stored: dict[str, Any]) -> None:
    found = TrainingSpec.from_dict(stored["spec"])
    assert (found.sha256, found.resume_sha256) == (stored["sha256"], stored["resume_sha256"])
    for owner, names in LATER_FIELDS.items():
        for name in names:
            part = found if owner is TrainingSpec else getattr(found, PARTS[owner])
            if part is None:
                continue
            changed = replace(part, **{name: "pissa" if name == "init_lora_weights" else 2})
            other = changed if part is found else replace(found, **{PARTS[owner]: changed})
            assert other.sha256 != found.sha256, name
            assert TrainingSpec.from_dict(json.loads(json.dumps(other.to_dict()))) == other


def test_modules_are_a_set() -> None:
    one, other = spec({"target_modules": ["v_proj", "q_proj"]}), spec({"target_modules": ["q_proj", "v_proj"]})
    assert one.sha256 == other.sha256
    assert one.lora is not None
    assert one.lora.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adafactor"])
def test_optimizers_that_need_whole_matrices_are_refused_where_they_are_shared_out(optimizer: str) -> None:
    assert spec({"optimizer": optimizer}, SMALL, **FULL).optimization.optimizer == optimizer
    assert spec({"optimizer": optimizer}, SMALL, world_size=2, strategy="ddp").optimization.optimizer == optimizer
    for strategy in ("fsdp2", "zero2"):
        with pytest.raises(InvalidRequest, match=f"strategy {strategy} shards them; use adamw_torch"):
            spec({"optimizer": optimizer}, SMALL, world_size=2, strategy=strategy)


def test_fp16_is_refused_where_gradients_are_shared_out() -> None:
    assert spec({"precision": "fp16"}, SMALL, world_size=2, strategy="ddp").precision == "fp16"
    with pytest.raises(InvalidRequest, match="use bf16, or ddp"):
        spec({"precision": "fp16"}, SMALL, world_size=2, strategy="zero2")


def test_gpus_without_bf16_train_adapters_in_fp16_and_all_parameters_in_fp32() -> None:
    assert spec({}, SMALL, device=TURING).precision == "fp16"
    assert spec({}, SMALL, device=TURING, **QLORA).precision == "fp16"
    assert spec({}, SMALL, device=TURING, **FULL).precision == "fp32"
    assert spec({}, DEMO, device=TURING).precision == "fp32"


def test_quantization_is_nf4_twice_unless_asked() -> None:
    assert spec({}, **QLORA).quantization == Quantization(kind="nf4", double=True)
    asked = spec({"quantization": "fp4", "double_quantization": False}, **QLORA)
    assert asked.quantization == Quantization(kind="fp4", double=False)


def test_what_would_split_4_bit_weights_becomes_zero2_and_is_recorded_so() -> None:
    for strategy in ("zero3", "fsdp2"):
        assert spec({}, LARGE, world_size=4, strategy=strategy, **QLORA).strategy == "zero2"
        assert spec({}, LARGE, world_size=4, strategy=strategy).strategy == strategy


def test_the_strategy_is_that_asked_for_before_the_fitted_one() -> None:
    assert spec({}, SMALL, world_size=2, strategy="ddp", hardware={"strategy": "zero1"}).strategy == "zero1"
    assert spec({}, SMALL, world_size=2).strategy == "ddp"
    assert spec({}).strategy == "single"


def test_gpus_asked_for_are_in_the_plan_and_the_demo_model_takes_one() -> None:
    assert planned({}, SMALL, hardware={"num_gpus": 8}).num_gpus == 8
    assert (planned({}, SMALL).num_gpus, planned({}, DEMO).num_gpus) == (None, 1)


def planned(requested: dict[str, Any], model: ModelFacts, **others: Any) -> Plan:
    return plan(requested, model, **others)


def test_gradient_checkpointing_is_by_length_unless_fitted_or_asked_for() -> None:
    long, short = pack(max_seq_len=4096), pack()
    assert spec({}, SMALL, long).gradient_checkpointing
    assert not spec({"max_seq_len": 1024}, SMALL, short).gradient_checkpointing
    assert spec({"max_seq_len": 1024}, SMALL, short, gradient_checkpointing=True).gradient_checkpointing
    assert not spec({"gradient_checkpointing": False}, SMALL, long, gradient_checkpointing=True).gradient_checkpointing


@pytest.mark.parametrize(("n_epochs", "wanted"), [(0.5, 200), (0.3, 334), (1, 100), (3, 100)])
def test_windows_are_enough_for_the_steps_of_a_part_of_an_epoch(n_epochs: float, wanted: int) -> None:
    found = planned({"n_epochs": n_epochs}, DEMO)
    assert min_windows(found, num_examples=1000) == wanted
    facts = pack(num_examples=1000, num_windows=wanted)
    assert spec({"n_epochs": n_epochs}, facts=facts).total_steps(num_rows=wanted) >= 100


def test_early_stopping_is_off_until_a_patience_is_given() -> None:
    assert spec({}).optimization.early_stopping is None
    found = spec({"early_stopping_patience": 3, "early_stopping_min_delta": 0.01}).optimization.early_stopping
    assert found == EarlyStopping(patience=3, min_delta=0.01)


def test_reference_and_warm_start_are_part_of_the_spec() -> None:
    start = WarmStart(adapter="a", manifest_sha256="f" * 64)
    found = spec({}, method="dpo", reference="k", warm_start=start)
    assert (found.reference, found.warm_start) == ("k", start)
    assert found.sha256 != spec({}, method="dpo", reference="k").sha256


def test_what_a_client_reads_back_is_what_was_resolved() -> None:
    asked = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 0.5}
    assert openai_hyperparameters(spec(asked).to_dict(), asked) == asked
    given = {"learning_rate": 7.5e-4, "n_epochs": "auto"}
    assert openai_hyperparameters(spec(given).to_dict(), given)["learning_rate_multiplier"] == pytest.approx(0.5)
    assert openai_hyperparameters(spec({}, method="dpo").to_dict(), {})["beta"] == 0.1


@pytest.mark.parametrize(
    ("asked", "shown"), [({}, "auto"), ({"n_epochs": "auto"}, "auto"), ({"n_epochs": 0.5}, 0.5), ({"n_epochs": 2.0}, 2)]
)
def test_a_fraction_of_an_epoch_that_nobody_asked_for_reads_as_openais_client_knows_it(asked: dict[str, Any], shown: object) -> None:
    found = spec(asked).to_dict()
    assert found["optimization"]["num_epochs"] == (1.25 if shown == "auto" else shown), "the recipe's own is a fraction"
    read = openai_hyperparameters(found, asked)["n_epochs"]
    assert (read, type(read)) == (shown, type(shown))


def test_the_batch_is_known_before_the_pack_is() -> None:
    assert global_batch_size(plan({}, SMALL)) == 64
    assert global_batch_size(plan({"batch_size": 10}, SMALL)) == 10


def test_a_spec_survives_its_dictionary_form() -> None:
    found = spec({"rank": 8})
    assert TrainingSpec.from_dict(found.to_dict()) == found
