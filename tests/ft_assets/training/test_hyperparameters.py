"""Claims about how a request becomes a spec."""

from __future__ import annotations

from typing import Any

import pytest

from ft_assets.errors import InvalidRequest
from ft_assets.training import recipes
from ft_assets.training.hyperparameters import LIMITS, ModelFacts, PackFacts, checked, openai_hyperparameters, plan, resolve
from ft_assets.training.spec import TrainingSpec

DEMO = ModelFacts(id="demo-llama-3m", num_parameters=3_000_000, context_length=512, digest="d" * 64)
SMALL = ModelFacts(id="llama-8b", num_parameters=8_030_000_000, context_length=131072, digest="e" * 64)
LARGE = ModelFacts(id="llama-70b", num_parameters=70_600_000_000, context_length=131072, digest="f" * 64)


def pack(**changes: Any) -> PackFacts:
    facts: dict[str, Any] = {"fingerprint": "pk_1", "dataset_id": "ds_1", "num_examples": 1200, "num_windows": 260, "num_tokens": 132_000}
    return PackFacts(**{**facts, "max_seq_len": 512, **changes})


def spec(requested: dict[str, Any], model: ModelFacts = DEMO, facts: PackFacts | None = None, **resolved: Any) -> TrainingSpec:
    arguments = {"seed": 1, "lock_sha256": "0" * 64, "commit": "c" * 40, **resolved}
    return resolve(plan(requested, model), facts or pack(), **arguments)


def test_auto_and_absent_are_the_same_spec() -> None:
    auto = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    assert spec(auto) == spec({})
    assert spec(auto).sha256 == spec({}).sha256


def test_a_model_gets_the_recipe_made_for_it_and_others_the_fallback() -> None:
    assert spec({}).recipe == "demo-llama-3m@1"
    assert spec({}, SMALL).recipe == "llama-lora@1"


def test_the_small_recipe_is_fp32_with_a_high_rate_on_short_windows() -> None:
    found = spec({})
    assert found.lora is not None
    assert (found.precision, found.max_seq_len, found.gradient_checkpointing) == ("fp32", 512, False)
    assert found.optimization.learning_rate == pytest.approx(3e-3)
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
    assert spec({"learning_rate_multiplier": 0.5}).optimization.learning_rate == pytest.approx(1.5e-3)
    assert spec({"learning_rate": 1e-3}).optimization.learning_rate == 1e-3


def test_more_than_ten_thousand_rows_are_seen_once() -> None:
    assert spec({}, SMALL, pack(num_examples=10_001)).optimization.num_epochs == 1
    assert spec({}, SMALL, pack(num_examples=10_000)).optimization.num_epochs == 3
    assert spec({"n_epochs": 2}, SMALL, pack(num_examples=10_001)).optimization.num_epochs == 2


def test_a_small_dataset_gets_smaller_batches_rather_than_few_steps() -> None:
    few = spec({}, SMALL, pack(num_windows=100)).optimization
    many = spec({}, SMALL, pack(num_windows=100_000)).optimization
    assert few.windows_per_device * few.accumulation_steps == 3
    assert many.windows_per_device * many.accumulation_steps == 64


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (6, 1), (8, 2), (64, 4)])
def test_the_global_batch_is_what_was_asked_for(batch_size: int, world_size: int) -> None:
    found = spec({"batch_size": batch_size}, world_size=world_size)
    assert openai_hyperparameters(found, recipes.load_all()["demo-llama-3m"])["batch_size"] == batch_size


@pytest.mark.parametrize(
    ("windows", "requested", "steps"),
    [
        (8, {"batch_size": 4, "n_epochs": 1}, 2),
        (9, {"batch_size": 4, "n_epochs": 1}, 3),
        (9, {"batch_size": 4, "n_epochs": 2.5}, 8),
        (9, {"batch_size": 4, "n_epochs": 2, "max_steps": 5}, 5),
        (1, {"batch_size": 64, "n_epochs": 1}, 1),
    ],
)
def test_the_number_of_steps_counts_partial_batches(windows: int, requested: dict[str, Any], steps: int) -> None:
    assert spec(requested, facts=pack(num_windows=windows)).optimization.total_steps(num_windows=windows, world_size=1) == steps


@pytest.mark.parametrize(("windows", "every"), [(10, 10), (1_000, 200), (10_000, 500)])
def test_short_runs_have_about_ten_checkpoints_and_long_ones_one_in_500_steps(windows: int, every: int) -> None:
    assert spec({}, facts=pack(num_windows=windows)).checkpoint.every_steps == every


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
        ({"rank": 256}, "none above 128"),
        ({"dropout": 1.0}, "at most 0.9"),
        ({"max_seq_len": 1024}, "exceeds the 512 that demo-llama-3m can take"),
        ({"schedule": "polynomial"}, "one of linear, cosine, constant"),
        ({"checkpoint_every_steps": 501}, "at most 500"),
        ({"precision": "int8"}, "one of fp32"),
        ({"beta": 0.1}, "known are n_epochs"),
        ({"learning_rate": 1e-3, "learning_rate_multiplier": 2}, "keep one"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_value_limit_and_next_step(requested: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        plan(requested, DEMO)
    assert refused.value.code == "invalid_hyperparameter"
    assert refused.value.param == f"hyperparameters.{next(iter(requested))}"


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="multiple of 2"):
        spec({"batch_size": 3}, world_size=2)


def test_every_limit_lets_the_defaults_of_every_recipe_pass() -> None:
    for recipe in recipes.load_all().values():
        defaults = {name: default.value for name, default in recipe.defaults.items() if name in LIMITS}
        assert len(defaults) > 5, "too few defaults have a limit for this to mean anything"
        assert checked(defaults) == defaults


def test_every_default_of_every_recipe_has_a_source() -> None:
    for recipe in recipes.load_all().values():
        assert all(len(d.source) > 10 for d in recipe.defaults.values())


def test_an_unknown_recipe_or_version_is_refused_with_the_known_ones() -> None:
    for name in ("nope", "llama-lora@99"):
        with pytest.raises(InvalidRequest, match="llama-lora@1"):
            plan({}, SMALL, recipe=name)
    assert plan({}, DEMO, recipe="llama-lora@1").recipe.name == "llama-lora"


def test_a_spec_survives_its_dictionary_form() -> None:
    found = spec({"rank": 8})
    assert TrainingSpec.from_dict(found.to_dict()) == found
