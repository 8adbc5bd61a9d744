"""Recipes and methods as Markdown tables, for documents: ``python -m tools.recipe_tables`` prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from engine.training import methods
from engine.training.hyperparameters import OF_EVERY_RECIPE
from engine.training.recipes import Recipe, load_recipes
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS


def methods_table() -> str:
    """Lists every method with its data and how its learning rate follows from SFT's."""
    rows = [
        f"| `{m.name}` | {m.summary} | {m.row_help} | {m.learning_rate_factor:g} | {'yes' if m.needs_reference else 'no'} |"
        for m in methods.registered_methods().values()
    ]
    head = "| method | what it does | rows | learning rate (multiple of SFT's) | reference |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def settings_table() -> str:
    """Lists every setting that belongs to a single method."""
    rows = [
        f"| `{m.name}` | `{name}` | {_shown(s.default)} | {s.limit.text} | {s.source} |"
        for m in methods.registered_methods().values()
        for name, s in m.settings.items()
    ]
    return "\n".join(["| method | setting | default | may be | source |", "|---|---|---|---|---|", *rows])


def options_table() -> str:
    """Lists the settings of every method that no recipe sets."""
    rows = [f"| `{name}` | {_shown(d.value)} | {HYPERPARAMETER_LIMITS[name].text} | {d.source} |" for name, d in OF_EVERY_RECIPE.items()]
    return "\n".join(["| setting | default | may be | source of the default |", "|---|---|---|---|", *rows])


def recipes_table() -> str:
    """Lists every recipe with the models it applies to."""
    rows = [f"| `{r.label}` | {r.adapter} | {_models(r)} | {_sizes(r)} | {r.summary} |" for r in load_recipes().values()]
    return "\n".join(["| recipe | adapter | base models | parameters | |", "|---|---|---|---|---|", *rows])


def defaults_table() -> str:
    """Lists every default with its source: all for recipes for any model, the differences for others."""
    rows, seen = [], set[tuple[str, str, str, str]]()
    for recipe in load_recipes().values():
        for name, method, value, source in _defaults(recipe):
            if (recipe.adapter, name, method, f"{value}{source}") in seen:
                continue
            seen.add((recipe.adapter, name, method, f"{value}{source}"))
            rows.append(f"| `{recipe.name}` | `{name}` | {method} | {_shown(value)} | {source} |")
    return "\n".join(["| recipe | default | method | value | source |", "|---|---|---|---|---|", *rows])


def _defaults(recipe: Recipe) -> Iterator[tuple[str, str, Any, str]]:
    for name, default in recipe.defaults.items():
        yield name, "", default.value, default.source
    for method, overrides in recipe.methods.items():
        for name, default in overrides.items():
            yield name, method, default.value, default.source


def _models(recipe: Recipe) -> str:
    return ", ".join(f"`{p}`" for p in recipe.base_models) or "any"


def _sizes(recipe: Recipe) -> str:
    low, high = (f"{p / 1e9:g}B" for p in recipe.parameters)
    if recipe.parameters[0] == 0:
        return "any" if high == "infB" else f"under {high}"
    return f"{low} and more" if high == "infB" else f"{low} to {high}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


TABLES = {
    "methods": methods_table,
    "settings": settings_table,
    "options": options_table,
    "recipes": recipes_table,
    "defaults": defaults_table,
}

if __name__ == "__main__":
    for name, table in TABLES.items():
        sys.stdout.write(f"<!-- {name} -->\n{table()}\n\n")
