"""``ft recipes``: the defaults of jobs, and their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.output import fields, table
from ft_client.cli.record_views import add_group, listing
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

Name = Annotated[str, typer.Argument(help="Recipe, with or without its version (`ft recipes list`).")]
Method = Annotated[str, typer.Option("--method", help="sft, cpt, dpo, orpo, kto or simpo: its defaults are shown.")]


def _models(recipe: Record) -> str:
    return ", ".join(recipe["base_models"]) or "any"


def _sizes(recipe: Record) -> str:
    low, high = recipe["min_parameters"] or 0, recipe["max_parameters"]
    if not high:
        return f"{low / 1e9:g}B and more" if low else "any"
    return f"{low / 1e9:g}B to {high / 1e9:g}B" if low else f"under {high / 1e9:g}B"


RECIPES = listing({"RECIPE": "id", "ADAPTER": "adapter", "BASE MODELS": _models, "PARAMETERS": _sizes, "": "summary"})


def register(app: typer.Typer) -> None:
    add_group(
        app, "recipes", {"list": list_recipes, "show": show}, help="Recipes: the defaults of jobs, each with its source.", panel="Jobs"
    )


@remote(RECIPES)
def list_recipes(client: FtClient) -> Any:
    """List the recipes and the models they are for."""
    return client.recipes.list().all()


def _show(found: Record) -> None:
    named = {"recipe": found["id"], "method": found["method"], "adapter": found["adapter"]}
    fields({**named, "base models": _models(found), "for": found["summary"]})
    table(("DEFAULT", "VALUE", "SOURCE"), [(name, str(d["value"]), d["source"]) for name, d in found["defaults"].items()])


@remote(_show)
def show(client: FtClient, name: Name, method: Method = "sft") -> Any:
    """Show every default of a recipe with its source."""
    return client.recipes.retrieve(name, method=method)
