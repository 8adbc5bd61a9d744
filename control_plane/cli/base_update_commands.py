"""``ft admin models update`` and ``evaluate``: update a base model's files once its production adapters pass on them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local
from core.errors import InvalidRequest
from ft_client.cli.output import Json, fields, print_json, say, table

if TYPE_CHECKING:
    from control_plane.models.base_updates import BaseUpdate
    from control_plane.platform.context import Platform

ModelId = Annotated[str, typer.Argument(metavar="ID", help="Id of the base model, as clients name it: NAME or ORG/NAME.")]
POLL_S = 1.0


def register(models: typer.Typer) -> None:
    models.command("update")(update)
    models.command("evaluate")(evaluate)
    models.command("prune")(prune)


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
        _show(found, as_json=as_json)


def _applied(platform: Platform, found: BaseUpdate, *, shows_blocked: bool) -> BaseUpdate:
    from control_plane.models import base_updates

    if found.staged and found.blocking:
        found = base_updates.evaluate(platform, found.model_id)
        if shows_blocked:
            _show(found, as_json=False)  # the table first, then the refusal in a sentence
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

    with open_local() as platform:
        found = base_updates.evaluate(platform, model_id, again=again)
        pending = _pending(found)
        say(f"{len(found.adapters)} production adapters of {model_id}, {pending} to be evaluated")
        while wait and pending:
            time.sleep(POLL_S)
            found = base_updates.status(platform, model_id)
            if (left := _pending(found)) != pending:
                say(f"{left} to be evaluated")
            pending = left
    _show(found, as_json=as_json)
    if wait and found.blocking:
        raise typer.Exit(1)


@local(lambda done: f"{done['id']}: {', '.join(d[:12] for d in done['forgotten']) or 'nothing'} forgotten")
def prune(platform: Platform, model_id: ModelId) -> Any:
    """Forget replaced files that no running job and no adapter uses; fetched copies are deleted."""
    from control_plane.models import base_updates

    return {"id": model_id, "forgotten": base_updates.prune(platform, model_id)}


def _pending(found: BaseUpdate) -> int:
    from control_plane.models.base_updates import RUNNING

    return sum(adapter.state == RUNNING for adapter in found.adapters)


def _show(found: BaseUpdate, *, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(found), "blocked": bool(found.blocking)})
        return
    fields({"id": found.model_id, "digest": found.digest, "staged": found.staged, "previous": ", ".join(d[:12] for d in found.previous)})
    if found.adapters:
        rows = [(a.tenant, a.adapter_id, a.name, a.state, ", ".join(a.reasons)) for a in found.adapters]
        table(("TENANT", "ADAPTER", "MODEL", "STATE", ""), rows)
