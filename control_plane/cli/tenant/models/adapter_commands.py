"""``ft models``, ``adapters`` (lists them when called on its own), ``promote``, ``rollback``."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.output import Json, ago, percent, print_json, say, table
from control_plane.cli.tenant.models import registry_commands
from ft_assets.errors import InvalidRequest

if TYPE_CHECKING:
    from control_plane.client import Record

AdapterId = Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")]


def register(app: typer.Typer) -> None:
    for command in (models, promote, rollback):
        app.command(rich_help_panel="Models")(command)
    group = typer.Typer(help="List adapters; trace, approve, or evaluate one again.", no_args_is_help=True)
    group.command("list")(adapters)
    group.command("evaluate")(evaluate)
    group.command("evaluations")(evaluations)
    registry_commands.register_adapters(group)
    app.add_typer(group, name="adapters", rich_help_panel="Models")


def models(as_json: Json = False) -> None:
    """List base models, your routes and your adapters."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.models.list().all()
    if as_json:
        print_json(found)
        return
    table(("MODEL", "OWNER", "CREATED"), [(m["id"], m["owned_by"], ago(m["created"]) if m.get("created") else "") for m in found])


def adapters(as_json: Json = False) -> None:
    """List adapters, newest first: stage, serving state, and score compared with the base's."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.adapters.list().all()
    if as_json:
        print_json(found)
        return
    rows = [(a["id"], a["name"], a["stage"], a["observed"], _score(a), ago(a.get("created_at"))) for a in found]
    table(("ID", "MODEL", "STAGE", "SERVED", "SCORE (BASE)", "CREATED"), rows)


def _score(a: Record) -> str:
    """Metric of its method: preference accuracy, exact matches, or similarity to expected answers; perplexity if no answers were
    compared."""
    metrics = a.get("metrics") or {}
    for name in ("validation/preference_accuracy", "holdout/exact_match", "holdout/rouge_l"):
        if metrics.get(name):
            return f"{name.rpartition('/')[2].replace('_', ' ')} {percent(metrics[name])} ({percent(metrics.get(f'base/{name}'))})"
    own, base = metrics.get("validation/perplexity"), metrics.get("base/validation/perplexity")
    return "" if own is None or base is None else f"perplexity {own:.2f} ({base:.2f})"


def promote(adapter: AdapterId, as_json: Json = False) -> None:
    """Promote an adapter to production: it is loaded on the fleet and answers under its name."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        changed = client.adapters.promote(adapter)
    if as_json:
        print_json(changed)
        return
    say(f"{changed['name']} is in {changed['stage']}; on the inference servers it is {changed['observed']}")
    if changed["detail"]:
        say(f"  {changed['detail']}")


def rollback(adapter: AdapterId, as_json: Json = False) -> None:
    """Withdraw a production adapter in favor of the one promoted before it."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.adapters.rollback(adapter)
    if as_json:
        print_json(done)
        return
    say(f"serving {done['serving']['name']} again; {done['withdrawn']['name']} is withdrawn")


def evaluate(
    adapter: AdapterId,
    config: Annotated[str | None, typer.Option("--config", help="JSON object that overrides the job's eval_config.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the verdict; exit code 1 if the adapter did not pass.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate an adapter again, on the present files of its base model."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.adapter_evaluations.create(adapter, eval_config=_rules(config))
        if wait:
            found = client.adapter_evaluations.wait(adapter, found["id"])
    if as_json:
        print_json(found)
    else:
        say(f"evaluation {found['id']}: {_verdict(found)}")
    if wait and found["outcome"] != "passed":
        raise typer.Exit(1)


def evaluations(
    adapter: AdapterId,
    evaluation: Annotated[
        str | None, typer.Argument(metavar="[EVALUATION]", help="Show this evaluation, as `ft eval` does for a job.")
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="For one evaluation: every item with each model's answer.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="For one evaluation: write it as a page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """List finished and pending evaluations of an adapter, newest first; or show one."""
    from control_plane.cli.tenant.jobs.evaluation_commands import tell
    from control_plane.cli.tenant.remote import connect

    if evaluation is None and (samples or html is not None):
        raise InvalidRequest(
            f"--samples and --html are of one evaluation: `ft adapters evaluations {adapter} EVALUATION`", param="evaluation"
        )
    with connect() as client:
        if evaluation is not None:
            listed = client.adapter_evaluations.samples(adapter, evaluation) if samples else None
            page = partial(client.adapter_evaluations.report_page, adapter, evaluation)
            tell(client.adapter_evaluations.report(adapter, evaluation), page, samples=listed, html=html, as_json=as_json)
            return
        found = client.adapter_evaluations.list(adapter).all()
    if as_json:
        print_json(found)
        return
    rows = [(e["id"], e["kind"], e["base_digest"][:12], _verdict(e), ago(e["created_at"])) for e in found]
    table(("ID", "KIND", "BASE", "VERDICT", "CREATED"), rows)


def _rules(config: str | None) -> dict[str, Any] | None:
    if config is None:
        return None
    try:
        rules = json.loads(config)
    except ValueError:
        rules = None
    if not isinstance(rules, dict):
        raise InvalidRequest(f'--config {config[:80]!r} is not a JSON object; for example {{"max_items": 50}}', code="invalid_eval_config")
    return rules


def _verdict(evaluation: Record) -> str:
    if evaluation["state"] == "failed":
        return f"could not be judged: {evaluation['error']['message'] if evaluation['error'] else None}"
    why = f" ({', '.join(evaluation['reasons'])})" if evaluation["reasons"] else ""
    return f"{evaluation['outcome'] or evaluation['state']}{why}"
