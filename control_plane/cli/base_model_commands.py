"""``ft admin models``: the operator's catalogue of base models. Works on this home's files; ``remove`` and updates also need the
database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli import base_update_commands
from control_plane.cli.base_update_commands import ModelId
from control_plane.cli.local_platform import local
from core.errors import InvalidRequest
from ft_client.cli import record_views
from ft_client.cli.output import Json, fields, say
from ft_client.cli.record_views import add_group, document, listing

if TYPE_CHECKING:
    from control_plane.platform.context import Platform
    from core.base_models import BaseModel

Since = Annotated[datetime | None, typer.Option("--since", formats=["%Y-%m-%d"], help="First day on which new jobs are refused.")]


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


MODELS = listing({
    "MODEL": "id", "LICENCE": "license", "CONTEXT": "context_length", "PARAMETERS": lambda m: _count(m["num_parameters"]),
    "DIGEST": lambda m: m["digest"][:12] if m["digest"] else "not pinned", "DEPRECATED SINCE": "deprecated_since",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    models = add_group(admin, "models", {
        "add": add, "extend": extend, "list": list_models, "show": show, "verify": verify, "deprecate": deprecate, "remove": remove,
    }, help="Base models: add with pinned files, extend by tokens, verify, update, deprecate, remove.")  # fmt: skip
    base_update_commands.register(models)


def add(
    model_id: ModelId,
    path: Annotated[Path | None, typer.Option("--path", help="Directory with its files; they stay there.")] = None,
    repo: Annotated[
        str | None, typer.Option("--repo", help="Repository of the Hub at FT_HUB_ENDPOINT: ORG/NAME; by default the id of a known model.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit of the repository, 40 digits.")] = None,
    license: Annotated[str | None, typer.Option("--license", help="License; read from the repository's card if absent.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Most tokens in one example; by default from the model's config.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a base model; its weights, tokenizer, template and config are pinned by digest."""
    from control_plane.models import catalogue as base_models
    from control_plane.platform.settings import load
    from core.base_models import known_models

    given = base_models.Given(license=license, context_length=context)
    if path is None and repo is None and model_id in known_models():
        repo = model_id
    if path is not None and repo is None and revision is None:
        made = base_models.add_local(load(), model_id, path, given)
    elif path is None and repo is not None and revision is not None:
        made = base_models.add_from_hub(load(), model_id, repo=repo, revision=revision, given=given, say=say)
    else:
        raise InvalidRequest("name the files: either --path DIR, or --repo ORG/NAME and --revision COMMIT", param="path")
    record_views.show(_shown(made), fields, as_json=as_json)


def extend(
    model_id: ModelId,
    base: Annotated[str, typer.Option("--base", help="Id of the base model to extend; it is left as it is.")],
    path: Annotated[Path, typer.Option("--path", help="New directory for the files of the extended model.")],
    token: Annotated[list[str] | None, typer.Option("--token", help="Token to add; repeatable. Rows and answers show it as text.")] = None,
    special: Annotated[
        list[str] | None,
        typer.Option("--special-token", help="Control token to add; repeatable. Templates write it; rows and answers do not show it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make another base model with added tokens from a registered one, and add it.

    Rows of the new tokens are the mean of the existing ones. Train it with adapter `full`: adapters leave these rows as they are.
    """
    from control_plane.models.added_tokens import NewToken
    from control_plane.models.added_tokens import extend as extended
    from control_plane.platform.settings import load

    tokens = [*(NewToken(content=t) for t in token or ()), *(NewToken(content=t, special=True) for t in special or ())]
    made = extended(load(), model_id, base=base, tokens=tokens, directory=path, say=say)
    shown = {**_shown(made.model), "base": made.base, "base_digest": made.base_digest, "token_ids": made.token_ids}
    record_views.show(shown, fields, as_json=as_json)


def list_models(
    known: Annotated[bool, typer.Option("--known", help="Also list well-known models that are not pinned yet.")] = False,
    as_json: Json = False,
) -> None:
    """List base models with license, context length, parameters, and the date of their deprecation."""
    from core.base_models import known_models

    catalogue = _catalogue()
    shown = [_shown(catalogue.card(model_id)) for model_id in catalogue.ids()]
    if known:
        shown += [
            {**entry, "digest": None, "deprecated_since": None} for name, entry in known_models().items() if name not in catalogue.ids()
        ]
    record_views.show(shown, MODELS, as_json=as_json)


def show(model_id: ModelId, as_json: Json = False) -> None:
    """Show the catalogue entry of a base model."""
    catalogue = _catalogue()
    made_from = catalogue.entry(model_id)[0].get("extended_from")
    record_views.show({**_shown(catalogue.card(model_id)), "extended_from": made_from}, fields, as_json=as_json)


def verify(model_id: ModelId, as_json: Json = False) -> None:
    """Read every file of a base model again and compare it with the pinned digest."""
    from control_plane.models import catalogue as base_models
    from control_plane.platform.settings import load

    found = base_models.verify(load(), model_id)
    verified = {**_shown(found), "verified": True}
    record_views.show(verified, "{id}: every file matches its pin, digest {digest}", as_json=as_json)


def deprecate(
    model_id: ModelId,
    since: Since = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo: new jobs may use it again.")] = False,
    as_json: Json = False,
) -> None:
    """Refuse new jobs on a base model from a given day on; admitted jobs finish and adapters stay."""
    from control_plane.models import catalogue as base_models
    from control_plane.platform.settings import load

    if (since is None) != undo:
        raise InvalidRequest("give --since DATE, or --undo", param="since")
    changed = base_models.deprecate(load(), model_id, None if since is None else since.date())
    record_views.show(_shown(changed), fields, as_json=as_json)


def _removed(done: Mapping[str, Any]) -> str:
    files = done["deleted_files"]
    return f"base model {done['id']} is removed" + (f", and its files in {files}" if files else "; its files stay where they are")


@local(_removed)
def remove(platform: Platform, model_id: ModelId) -> Any:
    """Remove a base model from the catalogue; refused while a job or an adapter needs it."""
    from control_plane.models import catalogue as base_models

    deleted = base_models.remove(platform, model_id)
    return {"id": model_id, "deleted": True, "deleted_files": deleted}


def _catalogue() -> Any:
    from control_plane.models.catalogue import catalogue_of
    from control_plane.platform.settings import load

    return catalogue_of(load())


def _shown(model: BaseModel) -> Mapping[str, Any]:
    return document(
        model, "id", "repo", "revision", "license", "context_length", "num_parameters", "digest", "tokenizer_digest", "template_digest",
        "deprecated_since", "directory",
    )  # fmt: skip
