"""Claims about the recipes that ship, and about which one a model gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from core.errors import InvalidRequest
from engine.training import methods, recipes
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS, checked_hyperparameters
from tests.engine.training.test_hyperparameters import SMALL, spec
from tools.recipe_tables import TABLES, page

ALL = recipes.load_recipes()

DIGESTS = {
    "any-lora@3": "976b83d4e5941789",
    "any-large-lora@3": "e3b2763e2278554e",
    "any-qlora@3": "64d5a923cecb6114",
    "any-large-qlora@3": "77b51a010cae72c7",
    "any-full@3": "248780d35b145798",
    "any-large-full@3": "7e29a1924d74d23f",
    "demo-llama-3m@6": "2c4c09838d2a7af7",
    "demo-llama-3m-qlora@6": "a14c3e99c2f4419d",
    "demo-llama-3m-full@6": "256431f9171513dd",
    "llama-3-lora@3": "749175413bf32a8b",
    "llama-3-70b-lora@4": "490bff5c9f35cdbc",
    "llama-3-qlora@4": "dd345384e3620e6b",
    "llama-3-70b-qlora@4": "7bceeadb491bf797",
    "llama-3-full@3": "1f694830fecf68d4",
    "llama-3-70b-full@3": "7e29a1924d74d23f",
    "mistral-lora@4": "f0de511ebedb28d5",
    "mistral-qlora@4": "3f09fa43cc9be83d",
    "mistral-full@3": "e4c43806486f2090",
    "qwen-2.5-lora@3": "976b83d4e5941789",
    "qwen-2.5-large-lora@3": "e3b2763e2278554e",
    "qwen-2.5-qlora@3": "64d5a923cecb6114",
    "qwen-2.5-large-qlora@3": "77b51a010cae72c7",
    "qwen-2.5-full@3": "5ec2ca0dae2c48b4",
    "qwen-2.5-large-full@3": "570364ddb8b4bb9c",
    "qwen-3-lora@3": "976b83d4e5941789",
    "qwen-3-large-lora@3": "e3b2763e2278554e",
    "qwen-3-qlora@3": "64d5a923cecb6114",
    "qwen-3-large-qlora@3": "77b51a010cae72c7",
    "qwen-3-full@3": "5ec2ca0dae2c48b4",
    "qwen-3-large-full@3": "570364ddb8b4bb9c",
}


def test_a_recipe_whose_defaults_changed_has_a_new_version() -> None:
    assert {r.label: r.digest for r in ALL.values()} == DIGESTS, "raise the version of the recipe that changed, and write its digest here"


@pytest.mark.parametrize("name", ["llama-3-lora", "llama-3-70b-lora", "llama-3-qlora", "llama-3-70b-qlora"])
def test_simpo_on_llama_3_has_the_same_defaults_with_every_adapter(name: str) -> None:
    (recipe,) = [r for r in ALL.values() if r.label.startswith(f"{name}@")]
    assert {key: recipe.methods["simpo"][key].value for key in ("learning_rate", "beta", "gamma")} == {
        "learning_rate": 1e-5, "beta": 2.5, "gamma": 1.375,
    }  # fmt: skip


def test_every_limit_lets_the_defaults_of_every_recipe_pass() -> None:
    for recipe in ALL.values():
        defaults = {name: default.value for name, default in recipe.defaults.items() if name in HYPERPARAMETER_LIMITS}
        assert len(defaults) > 5, "too few defaults have a limit for this to mean anything"
        assert checked_hyperparameters(defaults) == {name: value for name, value in defaults.items() if value != "auto"}


def test_every_override_for_a_method_is_within_its_limits() -> None:
    seen = 0
    for recipe in ALL.values():
        for method, overrides in recipe.methods.items():
            values = {name: default.value for name, default in overrides.items()}
            assert checked_hyperparameters(values, method=method) == values
            seen += len(values)
    assert seen > 20


def test_every_default_of_every_recipe_has_a_source() -> None:
    for recipe in ALL.values():
        for defaults in (recipe.defaults, *recipe.methods.values()):
            assert all(len(d.source) > 10 for d in defaults.values())
        for method in methods.registered_methods():
            assert recipe.learning_rate(method).source


def test_every_setting_of_every_method_has_a_source_and_is_within_its_limit() -> None:
    for method in methods.registered_methods().values():
        for setting in method.settings.values():
            assert setting.source
            assert setting.limit.accepts(setting.default)


SIZES = {
    "llama-3.2-1b-instruct": 1.24e9, "llama-3.2-3b": 3.2e9, "llama-3.1-8b-instruct": 8.03e9, "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
    "qwen2.5-0.5b": 0.49e9, "Qwen/Qwen2.5-7B-Instruct": 7.6e9, "qwen2.5-14b": 14.8e9, "qwen2.5-32b": 32.8e9, "qwen2.5-72b": 72.7e9,
    "qwen3-0.6b": 0.6e9, "qwen3-8b": 8.2e9, "qwen3-32b": 32.8e9, "mistral-7b-v0.3": 7.25e9, "mistral-nemo-12b": 12.2e9,
    "mistral-small-24b": 23.6e9, "demo-llama-3m": 3.4e6, "another-8b": 8e9, "another-100b": 100e9,
}  # fmt: skip


@pytest.mark.parametrize("adapter", recipes.ADAPTER_KINDS)
@pytest.mark.parametrize("model", SIZES)
def test_every_known_model_has_one_recipe_of_its_family_for_each_adapter(model: str, adapter: str) -> None:
    size = int(SIZES[model])
    special = [r for r in ALL.values() if r.adapter == adapter and r.base_models and r.fits(model, size)]
    chosen = recipes.select_recipe(model, adapter=adapter, num_parameters=size)
    assert special == ([] if model.startswith("another") else [chosen])
    assert chosen.adapter == adapter
    if adapter != "full":
        assert chosen.value("rank") == (32 if size > 30e9 else 16)
    if model != "demo-llama-3m":
        assert chosen.value("learning_rate") == (2e-5 if adapter == "full" else 2e-4)


def test_an_unknown_recipe_or_version_is_refused_with_the_closest_ones() -> None:
    for name, says in (("zzz", "lists them$"), ("any-lora@99", r"did you mean any-lora@3"), ("lama-3-lora", "did you mean llama-3-lora@")):
        with pytest.raises(InvalidRequest, match=says):
            recipes.select_recipe("llama-8b", adapter="lora", name=name)
    assert recipes.select_recipe("demo-llama-3m", adapter="lora", name="any-lora@3").name == "any-lora"


def test_a_recipe_for_another_adapter_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="is for adapter qlora, the job asks for lora"):
        recipes.select_recipe("llama-8b", adapter="lora", name="any-qlora")


CHILD = """
- name: child
  version: 1
  extends: any-lora
  adapter: lora
  summary: A child.
  defaults: {rank: %s}
  methods: {dpo: {beta: {value: 0.2, source: "for the sake of a test"}}}
"""


def parsed(text: str) -> list[recipes.Recipe]:
    return recipes.parse_recipes(yaml.safe_load(text), ALL, origin="child.yaml")


def test_a_child_has_all_of_its_parent_but_what_it_says_itself() -> None:
    [child] = parsed(CHILD % '{value: 8, source: "for the sake of a test"}')
    assert (child.value("rank"), child.value("dropout")) == (8, 0.05)
    assert (child.setting("dpo", "beta").value, child.value("n_epochs", method="dpo")) == (0.2, 1)
    assert child.digest != ALL["any-lora"].digest


@pytest.mark.parametrize("default", ["8", "{value: 8}", '{value: 8, source: ""}', '{value: 8, source: "short"}'])
def test_a_default_without_a_source_is_refused(default: str) -> None:
    with pytest.raises(ValueError, match=r"^child.yaml: \[0\].defaults.rank"):
        parsed(CHILD % default)


@pytest.mark.parametrize(("changed", "says"), [("rank", "unknown \\['rnak'\\]"), ("beta", "dpo has no \\['bta'\\]")])
def test_a_default_that_nothing_reads_is_refused(changed: str, says: str) -> None:
    text = CHILD.replace(changed, {"rank": "rnak", "beta": "bta"}[changed])
    with pytest.raises(ValueError, match=says):
        parsed(text % '{value: 8, source: "for the sake of a test"}')


def test_a_recipe_that_leaves_a_default_out_is_refused() -> None:
    with pytest.raises(ValueError, match="missing defaults"):
        parsed(CHILD.replace("extends: any-lora", "") % '{value: 8, source: "for the sake of a test"}')


@pytest.mark.parametrize("name", TABLES)
def test_the_documented_tables_are_those_of_the_recipes(name: str) -> None:
    written = page(name).read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")[2].partition("\n<!-- end -->")[0]
    assert written == TABLES[name](), "make pages writes the tables"


@pytest.mark.parametrize(
    ("method", "adapter", "rate"),
    [
        ("sft", "lora", 2e-4),
        ("sft", "qlora", 2e-4),
        ("sft", "full", 2e-5),
        ("cpt", "lora", 1e-4),
        ("dpo", "lora", 5e-6),
        ("dpo", "full", 5e-7),
        ("kto", "lora", 5e-6),
        ("kto", "full", 5e-7),
        ("simpo", "lora", 5e-6),
        ("simpo", "full", 5e-7),
        ("orpo", "lora", 8e-5),
        ("orpo", "full", 8e-6),
    ],
)
def test_the_rate_is_the_recipes_times_that_of_the_method_unless_the_recipe_says_otherwise(method: str, adapter: str, rate: float) -> None:
    assert spec({}, SMALL, method=method, adapter=adapter).optimization.learning_rate == rate
    doubled = spec({"learning_rate_multiplier": 2}, SMALL, method=method, adapter=adapter)
    assert doubled.optimization.learning_rate == 2 * rate


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "simpo"])
@pytest.mark.parametrize("model", ["another-8b", "llama-3.1-8b", "qwen3-8b", "mistral-7b-v0.3", "demo-llama-3m"])
def test_a_preference_method_trains_lora_at_ten_times_its_full_rate_and_cites_who_does(model: str, method: str) -> None:
    facts = replace(SMALL, id=model)
    lora, full = (spec({}, facts, method=method, adapter=adapter).optimization.learning_rate for adapter in ("lora", "full"))
    assert lora == pytest.approx(10 * full)
    source = recipes.select_recipe(model, adapter="lora", num_parameters=8_000_000_000).learning_rate(method).source
    assert "LoRA" in source or model.startswith("demo")
