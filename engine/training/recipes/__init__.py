"""Recipes: versioned YAML with a source for each default. This module reads recipes, and chooses the one of a request.

A file holds a list of recipes. A recipe applies to one kind of adapter and to base models by id pattern and size; it may extend another,
and may set defaults for a single method. A request may override any value. The files beside this one are shipped; operators add theirs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter

from core import yaml_files
from core.errors import InvalidRequest, did_you_mean
from engine.training import methods
from engine.training.spec import canonical_json

DIRECTORY = Path(__file__).parent
AdapterKind = Literal["lora", "qlora", "full"]
ADAPTER_KINDS: tuple[AdapterKind, ...] = ("lora", "qlora", "full")
COMMON = frozenset((
    "learning_rate", "max_seq_len", "batch_size", "per_device_batch_size", "n_epochs", "schedule", "warmup_ratio", "weight_decay",
    "max_grad_norm", "adam_beta2", "optimizer", "precision", "attention", "gradient_checkpointing_above", "min_steps",
    "large_dataset_rows", "large_dataset_epochs", "num_gpus",
))  # fmt: skip
OF_LORA = frozenset(("rank", "alpha_over_rank", "dropout", "target_modules"))
OF_QLORA = frozenset(("quantization", "double_quantization"))
NEEDED: Mapping[str, frozenset[str]] = {"lora": COMMON | OF_LORA, "qlora": COMMON | OF_LORA | OF_QLORA, "full": COMMON}
"""Defaults that a recipe must state or inherit: exactly these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    value: int | float | str | bool
    source: Annotated[str, Field(min_length=10)]
    """Source of the number: a paper, a measurement, a rule of the platform."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    version: int
    base_models: tuple[str, ...]
    """Patterns of base model ids, in lower case and without the part before a slash; empty: any model."""
    parameters: tuple[float, float]
    """Range of model sizes in parameters: from the first, below the second."""
    adapter: AdapterKind
    summary: str
    defaults: Mapping[str, Default]
    methods: Mapping[str, Mapping[str, Default]] = field(default_factory=dict)
    """Overrides for a method, including its own settings."""

    @property
    def label(self) -> str:
        """``<name>@<version>``, as recorded in the spec."""
        return f"{self.name}@{self.version}"

    @property
    def digest(self) -> str:
        """Digest of all defaults without their sources; a change requires a new version."""
        of_methods = {m: {k: d.value for k, d in o.items()} for m, o in self.methods.items()}
        body = [self.adapter, {k: d.value for k, d in self.defaults.items()}, of_methods]
        return hashlib.sha256(canonical_json(body).encode()).hexdigest()[:16]

    def value(self, name: str, *, method: str = "sft") -> Any:
        return self.methods.get(method, {}).get(name, self.defaults[name]).value

    def learning_rate(self, method: str) -> Default:
        """Returns the learning rate of `method`: the recipe's own for it, else SFT's times the method's factor."""
        if "learning_rate" in self.methods.get(method, {}):
            return self.methods[method]["learning_rate"]
        of, base = methods.method_named(method), self.defaults["learning_rate"]
        if of.learning_rate_factor == 1.0:
            return base
        rate = float(f"{float(base.value) * of.learning_rate_factor:.12g}")  # 2e-4 x 0.025 is 5e-6, not 5.000000000000001e-06
        return Default(value=rate, source=f"{base.value:g} x {of.learning_rate_factor:g}: {of.learning_rate_source}")

    def setting(self, method: str, name: str) -> Default:
        """Returns the default of a method's own setting."""
        of = methods.method_named(method).settings[name]
        return self.methods.get(method, {}).get(name, Default(value=of.default, source=of.source))

    def fits(self, base_model: str, num_parameters: int) -> bool:
        low, high = self.parameters
        name = base_model.lower().rpartition("/")[2]
        return low <= num_parameters < high and (not self.base_models or any(fnmatchcase(name, p) for p in self.base_models))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A recipe as a file has it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
    version: Annotated[int, Field(ge=1)]
    adapter: AdapterKind
    summary: str
    extends: str | None = None
    base_models: list[str] = field(default_factory=list)
    parameters: tuple[float, float] = (0.0, math.inf)
    defaults: dict[str, Default] = field(default_factory=dict)
    methods: dict[str, dict[str, Default]] = field(default_factory=dict)


def parse_recipes(body: Any, known: Mapping[str, Recipe] | None = None, *, origin: str) -> list[Recipe]:
    """Reads the recipes of a YAML file, which may extend earlier ones and `known` ones.

    Raises ``ValueError`` with the first mistake and its place in `origin`, such as a default without a source.
    """
    found = dict(known or {})
    made = []
    for entry in yaml_files.parse(body, TypeAdapter(list[_Entry]), origin=origin):
        if entry.extends and entry.extends not in found:
            raise ValueError(f"{origin}: {entry.name} extends {entry.extends!r}, which does not exist; there are {', '.join(found)}")
        recipe = _complete(entry, found[entry.extends] if entry.extends else None)
        found[recipe.name] = recipe
        made.append(recipe)
    return made


def _complete(entry: _Entry, parent: Recipe | None) -> Recipe:
    inherited = parent.methods if parent else {}
    defaults = {**{k: d for k, d in (parent.defaults if parent else {}).items() if k in NEEDED[entry.adapter]}, **entry.defaults}
    if set(defaults) != NEEDED[entry.adapter]:
        missing, unknown = sorted(NEEDED[entry.adapter] - set(defaults)), sorted(set(defaults) - NEEDED[entry.adapter])
        raise ValueError(f"recipe {entry.name}: missing defaults {missing}, unknown {unknown}")
    for method, overrides in entry.methods.items():
        if unknown := sorted(set(overrides) - NEEDED[entry.adapter] - set(methods.method_named(method).settings)):
            raise ValueError(f"recipe {entry.name}: {method} has no {unknown}")
    return Recipe(
        name=entry.name,
        version=entry.version,
        base_models=tuple(p.lower() for p in entry.base_models),
        parameters=entry.parameters,
        adapter=entry.adapter,
        summary=entry.summary,
        defaults=defaults,
        methods={m: {**inherited.get(m, {}), **entry.methods.get(m, {})} for m in {**inherited, **entry.methods}},
    )


@functools.cache
def load_recipes() -> Mapping[str, Recipe]:
    """Returns every shipped recipe by name; those for any model first, because others extend them."""
    found: dict[str, Recipe] = {}
    for path in sorted(DIRECTORY.glob("*.yaml"), key=lambda p: (p.stem != "any", p.stem)):
        for recipe in parse_recipes(yaml.safe_load(path.read_text(encoding="utf-8")), found, origin=path.name):
            if recipe.name in found:
                raise ValueError(f"recipe {recipe.name} is in two files, {path.name} is the second")
            found[recipe.name] = recipe
    return found


def recipe_named(name: str, known: Mapping[str, Recipe] | None = None) -> Recipe:
    """Returns the recipe called `name`, with or without its version."""
    recipes = load_recipes() if known is None else known
    found = recipes.get(name) or next((r for r in recipes.values() if r.label == name), None)
    if found is None:
        hint = did_you_mean(name, [r.label for r in recipes.values()])
        raise InvalidRequest(
            f"recipe {name[:80]!r} does not exist; GET /v1/recipes lists them{hint}", code="invalid_recipe", param="recipe"
        )
    return found


def select_recipe(
    base_model: str, *, adapter: str, num_parameters: int = 0, name: str | None = None, known: Mapping[str, Recipe] | None = None
) -> Recipe:
    """Returns the recipe called `name`, else the one for models like `base_model`, else the one for any model.

    `known`: recipes by name, or by label if another version has the name; the first that fits is chosen. By default those that ship.
    """
    if name is not None:
        recipe = recipe_named(name, known)
        if recipe.adapter != adapter:
            raise InvalidRequest(
                f"recipe {recipe.label} is for adapter {recipe.adapter}, the job asks for {adapter}; leave one of them out",
                code="invalid_recipe",
                param="recipe",
            )
        return recipe
    newest = [r for key, r in (load_recipes() if known is None else known).items() if key == r.name]
    fitting = [r for r in newest if r.adapter == adapter and r.fits(base_model, num_parameters)]
    for recipe in sorted(fitting, key=lambda r: (not r.base_models, r.parameters == (0.0, math.inf))):
        return recipe
    raise InvalidRequest(
        f"no recipe trains {base_model} with adapter {adapter!r}; use one of {', '.join(ADAPTER_KINDS)}",
        code="unsupported_method",
        param="method",
    )


__all__ = ["ADAPTER_KINDS", "AdapterKind", "Default", "Recipe", "load_recipes", "parse_recipes", "recipe_named", "select_recipe"]
