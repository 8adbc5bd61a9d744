"""``ft admin models`` and ``recipes``: the operator's base models and recipes. Models are files of this home; ``remove`` and updates also
need the database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local, user, with_settings
from core.errors import InvalidRequest
from ft_client.cli.commands import add_group, argument, document, listing, option, since
from ft_client.cli.output import Exit, Json, fields, print_json, say, table

if TYPE_CHECKING:
    from control_plane.jobs.recipes.operator_recipes import Added
    from control_plane.models.base_updates import BaseUpdate
    from control_plane.platform.context import Platform
    from control_plane.platform.settings import Settings

ModelId = Annotated[str, typer.Argument(metavar="ID", help="Id of the base model, as clients name it: NAME or ORG/NAME.")]
POLL_S = 1.0
MODEL = ("id", "repo", "revision", "license", "context_length", "num_parameters", "digest", "tokenizer_digest", "template_digest",
    "deprecated_since", "directory")  # fmt: skip


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


MODELS = listing({
    "MODEL": "id", "LICENCE": "license", "CONTEXT": "context_length", "PARAMETERS": lambda m: _count(m["num_parameters"]),
    "DIGEST": lambda m: m["digest"][:12] if m["digest"] else "not pinned", "DEPRECATED SINCE": "deprecated_since",
})  # fmt: skip
RECIPES = listing({
    "RECIPE": "id", "ADAPTER": "adapter", "BASE MODELS": lambda r: ", ".join(r["base_models"]) or "any", "ADDED": since("added_at"),
    "BY": "added_by", "STATE": lambda r: "retired" if r["retired_at"] else "in use", "": "summary",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    shows = " ".join(MODEL)
    add_group(admin, "models", "Base models: add with pinned files, extend by tokens, verify, update, deprecate, remove.", {
        "add": with_settings.call(_add, "Add a base model; its weights, tokenizer, template and config are pinned by digest.", fields,
            shows=shows, model_id=ModelId, path=option("--path", "Directory with its files; they stay there.", type=Path | None),
            repo=option("--repo", "Repository of the Hub at FT_HUB_ENDPOINT: ORG/NAME; by default the id of a known model."),
            revision=option("--revision", "Commit of the repository, 40 digits."),
            license=option("--license", "License; read from the repository's card if absent."),
            context=option("--context", "Most tokens in one example; by default from the model's config.", type=int | None)),
        "extend": extend,
        "list": with_settings.call(_list_models, "List base models with license, context length, parameters, and the date of their "
            "deprecation.", MODELS, known=option("--known", "Also list well-known models that are not pinned yet.", type=bool)),
        "show": with_settings.call(_show_model, "Show the catalogue entry of a base model.", fields, model_id=ModelId),
        "verify": with_settings.call(_verify, "Read every file of a base model again and compare it with the pinned digest.",
            "{id}: every file matches its pin, digest {digest}", model_id=ModelId),
        "deprecate": with_settings.call(_deprecate, "Refuse new jobs on a base model from a given day on; admitted jobs finish and "
            "adapters stay.", fields, shows=shows, model_id=ModelId,
            since=option("--since", "First day on which new jobs are refused.", type=datetime | None, formats=["%Y-%m-%d"]),
            undo=option("--undo", "Undo: new jobs may use it again.", type=bool)),
        "remove": local.call(_remove, "Remove a base model from the catalogue; refused while a job or an adapter needs it.", _removed,
            model_id=ModelId),
        "update": update,
        "evaluate": evaluate,
        "prune": local.call(_prune, "Forget replaced files that no running job and no adapter uses; fetched copies are deleted.",
            lambda done: f"{done['id']}: {', '.join(d[:12] for d in done['forgotten']) or 'nothing'} forgotten", model_id=ModelId),
    })  # fmt: skip
    add_group(admin, "recipes", "Your own recipes: versions with defaults that come before those that ship.", {
        "add": local.call(_add_recipes,
            "Add the recipes of YAML files. A version never changes: what exists with the same content stays as it is.", RECIPES,
            paths=argument("YAML files, or folders of them.", metavar="PATH...", type=list[Path], exists=True)),
        "list": local.call(lambda platform: _recipes(platform, "list_versions"), "List every version of your recipes, retired ones too.",
            RECIPES),
        "retire": local.call(lambda platform, name: _recipes(platform, "retire", name),
            "Use no version of a recipe for new jobs; jobs that have one keep it.", RECIPES,
            name=argument("Recipe, without its version.")),
    })  # fmt: skip


def _add(
    settings: Settings,
    model_id: str,
    path: Path | None = None,
    repo: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    context: int | None = None,
) -> Any:
    from control_plane.models import catalogue as base_models
    from core.base_models import known_models

    given = base_models.Given(license=license, context_length=context)
    if path is None and repo is None and model_id in known_models():
        repo = model_id
    if path is not None and repo is None and revision is None:
        return base_models.add_local(settings, model_id, path, given)
    if path is None and repo is not None and revision is not None:
        return base_models.add_from_hub(settings, model_id, repo=repo, revision=revision, given=given, say=say)
    raise InvalidRequest("name the files: either --path DIR, or --repo ORG/NAME and --revision COMMIT", param="path")


@with_settings(fields)
def extend(
    settings: Settings,
    model_id: ModelId,
    base: Annotated[str, typer.Option("--base", help="Id of the base model to extend; it is left as it is.")],
    path: Annotated[Path, typer.Option("--path", help="New directory for the files of the extended model.")],
    token: Annotated[list[str] | None, typer.Option("--token", help="Token to add; repeatable. Rows and answers show it as text.")] = None,
    special: Annotated[
        list[str] | None,
        typer.Option("--special-token", help="Control token to add; repeatable. Templates write it; rows and answers do not show it."),
    ] = None,
) -> Any:
    """Make another base model with added tokens from a registered one, and add it.

    Rows of the new tokens are the mean of the existing ones. Train it with adapter `full`: adapters leave these rows as they are.
    """
    from control_plane.models.added_tokens import NewToken
    from control_plane.models.added_tokens import extend as extended

    tokens = [*(NewToken(content=t) for t in token or ()), *(NewToken(content=t, special=True) for t in special or ())]
    made = extended(settings, model_id, base=base, tokens=tokens, directory=path, say=say)
    return {**document(made.model, *MODEL), **document(made, "base", "base_digest", "token_ids")}


def _list_models(settings: Settings, known: bool) -> Any:
    from control_plane.models.catalogue import catalogue_of
    from core.base_models import known_models

    catalogue = catalogue_of(settings)
    pinned = [document(catalogue.card(model_id), *MODEL) for model_id in catalogue.ids()]
    others = known_models().items() if known else ()
    return pinned + [{**entry, "digest": None, "deprecated_since": None} for name, entry in others if name not in catalogue.ids()]


def _show_model(settings: Settings, model_id: str) -> Any:
    from control_plane.models.catalogue import catalogue_of

    catalogue = catalogue_of(settings)
    made_from = catalogue.entry(model_id)[0].get("extended_from")
    return {**document(catalogue.card(model_id), *MODEL), "extended_from": made_from}


def _verify(settings: Settings, model_id: str) -> Any:
    from control_plane.models import catalogue as base_models

    return {**document(base_models.verify(settings, model_id), *MODEL), "verified": True}


def _deprecate(settings: Settings, model_id: str, undo: bool, since: datetime | None = None) -> Any:
    from control_plane.models import catalogue as base_models

    if (since is None) != undo:
        raise InvalidRequest("give --since DATE, or --undo", param="since")
    return base_models.deprecate(settings, model_id, None if since is None else since.date())


def _remove(platform: Platform, model_id: str) -> Mapping[str, Any]:
    from control_plane.models import catalogue as base_models

    return {"id": model_id, "deleted": True, "deleted_files": base_models.remove(platform, model_id)}


def _removed(done: Mapping[str, Any]) -> str:
    files = done["deleted_files"]
    return f"base model {done['id']} is removed" + (f", and its files in {files}" if files else "; its files stay where they are")


def update(
    model_id: ModelId,
    path: Annotated[Path | None, typer.Option("--path", help="Directory with the new files; they stay there.")] = None,
    repo: Annotated[str | None, typer.Option("--repo", help="Repository of the Hub at FT_HUB_ENDPOINT: ORG/NAME.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit of the repository, 40 digits.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Switch to the staged version.")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Drop the staged version.")] = False,
    as_json: Json = False,
) -> None:
    """Update the files of a base model. New files are staged; --apply switches once production adapters pass on them.

    Without options, shows the state of the update. The exit code is 1 while adapters block it.
    """
    from control_plane.models import base_updates

    if [path is not None, repo is not None or revision is not None, apply, abandon].count(True) > 1 or (repo is None) != (revision is None):
        raise InvalidRequest("give one of: --path DIR; --repo ORG/NAME with --revision COMMIT; --apply; --abandon", param="path")
    with open_local() as platform:
        if abandon:
            deleted = base_updates.abandon(platform, model_id)
            say(f"{model_id} no longer has a staged version" + (f"; {deleted} is deleted" if deleted else ""))
            found = base_updates.status(platform, model_id)
        elif path is not None:
            found = base_updates.stage_local(platform, model_id, path)
        elif repo is not None and revision is not None:
            found = base_updates.stage_from_hub(platform, model_id, repo=repo, revision=revision, say=say)
        else:
            found = base_updates.status(platform, model_id)
        if apply or (found.staged and (path or repo)):
            found = _applied(platform, found, shows_blocked=not as_json)
        _show_update(found, as_json=as_json)


def _applied(platform: Platform, found: BaseUpdate, *, shows_blocked: bool) -> BaseUpdate:
    from control_plane.models import base_updates

    if found.staged and found.blocking:
        found = base_updates.evaluate(platform, found.model_id)
        if shows_blocked:
            _show_update(found, as_json=False)  # the table first, then the refusal in a sentence
    done = base_updates.apply(platform, found.model_id, digest=found.staged)
    say(
        f"{done.model_id} now refers to {done.digest[:12]}, and new jobs train on it. Inference servers serve it once they are restarted "
        "again: `ft down && ft up` for the local one"
    )
    return done


def evaluate(
    model_id: ModelId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all have a verdict.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also adapters that failed on these files.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate every production adapter of a base model on its staged files; with --wait, the exit code is 1 if one fails."""
    from control_plane.models import base_updates

    def pending(found: BaseUpdate) -> int:
        return sum(adapter.state == base_updates.RUNNING for adapter in found.adapters)

    with open_local() as platform:
        found = base_updates.evaluate(platform, model_id, again=again)
        left = pending(found)
        say(f"{len(found.adapters)} production adapters of {model_id}, {left} to be evaluated")
        while wait and left:
            time.sleep(POLL_S)
            found, before = base_updates.status(platform, model_id), left
            if (left := pending(found)) != before:
                say(f"{left} to be evaluated")
    _show_update(found, as_json=as_json)
    if wait and found.blocking:
        raise typer.Exit(Exit.FAILED)


def _prune(platform: Platform, model_id: str) -> Mapping[str, Any]:
    from control_plane.models import base_updates

    return {"id": model_id, "forgotten": base_updates.prune(platform, model_id)}


def _show_update(found: BaseUpdate, *, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(found), "blocked": bool(found.blocking)})
        return
    fields({"id": found.model_id, "digest": found.digest, "staged": found.staged, "previous": ", ".join(d[:12] for d in found.previous)})
    if found.adapters:
        rows = [(a.tenant, a.adapter_id, a.name, a.state, ", ".join(a.reasons)) for a in found.adapters]
        table(("TENANT", "ADAPTER", "MODEL", "STATE", ""), rows)


def _add_recipes(platform: Platform, paths: list[Path]) -> Any:
    found = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    return [each for file in found for each in _recipes(platform, "add_file", file, by=user())]


def _recipes(platform: Platform, call: str, *arguments: Any, **options: Any) -> Any:
    from control_plane.jobs.recipes import operator_recipes

    def shown(each: Added) -> Mapping[str, Any]:
        of_recipe = document(each.recipe, "name", "version", "adapter", "summary", "base_models")
        return {"id": each.recipe.label, **of_recipe, **document(each, "added_at", "added_by", "retired_at")}

    return [shown(each) for each in getattr(operator_recipes, call)(platform, *arguments, **options)]
