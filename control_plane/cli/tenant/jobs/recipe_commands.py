"""``ft recipes``: the defaults of jobs, and their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli.output import Json, fields, print_json, table

if TYPE_CHECKING:
    from control_plane.client import Record

Name = Annotated[str, typer.Argument(help="Recipe, with or without its version (`ft recipes list`).")]
Method = Annotated[str, typer.Option("--method", help="sft, cpt, dpo, orpo, kto or simpo: its defaults are shown.")]


def register(app: typer.Typer) -> None:
    recipes = typer.Typer(help="Recipes: the defaults of jobs, each with its source.", no_args_is_help=True)
    recipes.command("list")(list_recipes)
    recipes.command("show")(show)
    app.add_typer(recipes, name="recipes", rich_help_panel="Jobs")


def list_recipes(as_json: Json = False) -> None:
    """List the recipes and the models they are for."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.recipes.list().all()
    if as_json:
        print_json(found)
        return
    rows = [(r["id"], r["adapter"], ", ".join(r["base_models"]) or "any", _sizes(r), r["summary"]) for r in found]
    table(("RECIPE", "ADAPTER", "BASE MODELS", "PARAMETERS", ""), rows)


def show(name: Name, method: Method = "sft", as_json: Json = False) -> None:
    """Show every default of a recipe with its source."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.recipes.retrieve(name, method=method)
    if as_json:
        print_json(found)
        return
    models = ", ".join(found["base_models"]) or "any"
    fields({"recipe": found["id"], "method": found["method"], "adapter": found["adapter"], "base models": models, "for": found["summary"]})
    table(("DEFAULT", "VALUE", "SOURCE"), [(name, str(d["value"]), d["source"]) for name, d in found["defaults"].items()])


def _sizes(recipe: Record) -> str:
    low, high = recipe["min_parameters"] or 0, recipe["max_parameters"]
    if not high:
        return f"{low / 1e9:g}B and more" if low else "any"
    return f"{low / 1e9:g}B to {high / 1e9:g}B" if low else f"under {high / 1e9:g}B"
