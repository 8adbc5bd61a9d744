"""Methods and recipes as Markdown tables: ``python -m tools.recipe_tables`` writes them into pages of docs/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.training import methods
from engine.training.hyperparameters import OF_EVERY_RECIPE
from engine.training.recipes import Recipe, load_recipes
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS

DOCS = Path(__file__).resolve().parents[1] / "docs"


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
    rows = [f"| `{r.label}` | {r.adapter} | {_models(r)} | {_sizes(r)} |" for r in load_recipes().values()]
    return "\n".join(["| recipe | adapter | base models | parameters |", "|---|---|---|---|", *rows])


def defaults_table() -> str:
    """Lists every default with its source: all for recipes for any model, the differences for others."""
    rows = [
        f"| `{name}` | {_shown(value)} | {', '.join(f'`{recipe}`' for recipe in recipes)} | {', '.join(of_methods) or 'all'} | {source} |"
        for (name, value, source, of_methods), recipes in _defaults().items()
    ]
    return "\n".join(["| default | value | recipes | methods | source |", "|---|---|---|---|---|", *sorted(rows)])


def _defaults() -> dict[tuple[str, Any, str, tuple[str, ...]], list[str]]:
    """Recipes by name, value and source of a default, and the methods that it is for; all of them if there are none."""
    seen, grouped = set[tuple[str, str, str, str]](), dict[tuple[str, Any, str, tuple[str, ...]], list[str]]()
    for recipe in load_recipes().values():
        of_methods: dict[tuple[str, Any, str], list[str]] = {}
        for name, method, value, source in _of_recipe(recipe):
            if (key := (recipe.adapter, name, method, f"{value}{source}")) not in seen:
                seen.add(key)
                of_methods.setdefault((name, value, source), []).append(method)
        for default, for_methods in of_methods.items():
            grouped.setdefault((*default, tuple(filter(None, for_methods))), []).append(recipe.name)
    return grouped


def _of_recipe(recipe: Recipe) -> Iterator[tuple[str, str, Any, str]]:
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
PAGES = {"methods": "methods", "settings": "methods", "options": "hyperparameters", "recipes": "recipes", "defaults": "recipes"}
"""Page of docs/ that holds each table, between ``<!-- name -->`` and ``<!-- end -->``."""


def page(table: str) -> Path:
    return DOCS / f"{PAGES[table]}.md"


def write() -> None:
    """Write the tables into their pages."""
    for name, table in TABLES.items():
        before, mark, rest = page(name).read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
        page(name).write_text(f"{before}{mark}{table()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
