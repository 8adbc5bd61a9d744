"""``ft admin recipes``: the operators' own recipes."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.jobs.recipes.operator_recipes import Added
    from control_plane.platform.context import Platform

VERSIONS = listing({
    "RECIPE": "id", "ADAPTER": "adapter", "BASE MODELS": lambda r: ", ".join(r["base_models"]) or "any", "ADDED": since("added_at"),
    "BY": "added_by", "STATE": lambda r: "retired" if r["retired_at"] else "in use", "": "summary",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    commands = {"add": add, "list": list_versions, "retire": retire}
    add_group(admin, "recipes", commands, help="Your own recipes: versions with defaults that come before those that ship.")


@local(VERSIONS)
def add(
    platform: Platform, paths: Annotated[list[Path], typer.Argument(metavar="PATH...", exists=True, help="YAML files, or folders of them.")]
) -> Any:
    """Add the recipes of YAML files. A version never changes: what exists with the same content stays as it is."""
    from control_plane.jobs.recipes import operator_recipes

    found = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    by = f"cli:{getpass.getuser()}"
    return [_document(each) for file in found for each in operator_recipes.add_file(platform, file, by=by)]


@local(VERSIONS)
def list_versions(platform: Platform) -> Any:
    """List every version of your recipes, retired ones too."""
    from control_plane.jobs.recipes import operator_recipes

    return [_document(each) for each in operator_recipes.list_versions(platform)]


@local(VERSIONS)
def retire(platform: Platform, name: Annotated[str, typer.Argument(help="Recipe, without its version.")]) -> Any:
    """Use no version of a recipe for new jobs; jobs that have one keep it."""
    from control_plane.jobs.recipes import operator_recipes

    return [_document(each) for each in operator_recipes.retire(platform, name)]


def _document(each: Added) -> Mapping[str, Any]:
    of_recipe = document(each.recipe, "name", "version", "adapter", "summary", "base_models")
    return {"id": each.recipe.label, **of_recipe, **document(each, "added_at", "added_by", "retired_at")}
