"""``ft models`` and ``adapters`` (each lists them when called on its own), ``promote``, ``rollback``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.evaluation_commands import tell
from ft_client.cli.models import registry_commands, signature_commands
from ft_client.cli.output import Json, ago, percent
from ft_client.cli.record_views import add_commands, add_group, listing, show, since
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

AdapterId = Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")]


def register(app: typer.Typer) -> None:
    of_models: dict[str, Callable[..., Any]] = {"list": models, "keys": signature_commands.keys, "verify": signature_commands.verify}
    add_group(app, "models", of_models, help="List models; verify downloaded files by the platform's signature.", panel="Models")
    add_commands(app, "Models", promote, rollback)
    group = add_group(
        app,
        "adapters",
        {"list": adapters, "evaluate": evaluate, "evaluations": evaluations, "signature": signature_commands.signature},
        help="List adapters; trace, approve or re-evaluate them.",
        panel="Models",
    )
    registry_commands.register_adapters(group)


def _score(a: Record) -> str:
    """Metric of its method: preference accuracy, exact matches, or similarity to expected answers; perplexity if no answers were
    compared."""
    metrics = a.get("metrics") or {}
    for name in ("validation/preference_accuracy", "holdout/exact_match", "holdout/rouge_l"):
        if metrics.get(name):
            return f"{name.rpartition('/')[2].replace('_', ' ')} {percent(metrics[name])} ({percent(metrics.get(f'base/{name}'))})"
    own, base = metrics.get("validation/perplexity"), metrics.get("base/validation/perplexity")
    return "" if own is None or base is None else f"perplexity {own:.2f} ({base:.2f})"


def _verdict(evaluation: Record) -> str:
    if evaluation["state"] == "failed":
        return f"could not be judged: {evaluation['error']['message'] if evaluation['error'] else None}"
    why = f" ({', '.join(evaluation['reasons'])})" if evaluation["reasons"] else ""
    return f"{evaluation['outcome'] or evaluation['state']}{why}"


MODELS = listing({"MODEL": "id", "OWNER": "owned_by", "CREATED": lambda m: ago(m["created"]) if m.get("created") else ""})
ADAPTERS = listing({
    "ID": "id", "MODEL": "name", "STAGE": "stage", "SERVED": "observed", "SCORE (BASE)": _score, "CREATED": since("created_at"),
})  # fmt: skip
EVALUATIONS = listing({
    "ID": "id", "KIND": "kind", "BASE": lambda e: e["base_digest"][:12], "VERDICT": _verdict, "CREATED": since("created_at"),
})  # fmt: skip


@remote(MODELS)
def models(client: FtClient) -> Any:
    """List base models, your routes and your adapters."""
    return client.models.list().all()


@remote(ADAPTERS)
def adapters(client: FtClient) -> Any:
    """List adapters, newest first: stage, serving state, and score compared with the base's."""
    return client.adapters.list().all()


def _promoted(changed: Record) -> str:
    detail = f"\n  {changed['detail']}" if changed["detail"] else ""
    return f"{changed['name']} is in {changed['stage']}; on the inference servers it is {changed['observed']}{detail}"


@remote(_promoted)
def promote(client: FtClient, adapter: AdapterId) -> Any:
    """Promote an adapter to production: loads it on the inference servers and serves it under its model name."""
    return client.adapters.promote(adapter)


@remote("serving {serving[name]} again; {withdrawn[name]} is withdrawn")
def rollback(client: FtClient, adapter: AdapterId) -> Any:
    """Withdraw a production adapter in favor of the one promoted before it."""
    return client.adapters.rollback(adapter)


def evaluate(
    adapter: AdapterId,
    config: Annotated[str | None, typer.Option("--config", help="JSON object that overrides the job's eval_config.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the verdict; exit code 1 if the adapter did not pass.")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate an adapter again, on the current files of its base model."""
    with connect() as client:
        found = client.adapter_evaluations.create(adapter, eval_config=_rules(config))
        if wait:
            found = client.adapter_evaluations.wait(adapter, found["id"])
    show(found, lambda e: f"evaluation {e['id']}: {_verdict(e)}", as_json=as_json)
    if wait and found["outcome"] != "passed":
        raise typer.Exit(1)


def evaluations(
    adapter: AdapterId,
    evaluation: Annotated[
        str | None, typer.Argument(metavar="EVALUATION", help="Show this evaluation, as `ft eval` does for a job.")
    ] = None,
    samples: Annotated[bool, typer.Option("--samples", help="For one evaluation: every item with each model's answer.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="For one evaluation: write it as a page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """List finished and pending evaluations of an adapter, newest first; or show one."""
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
    show(found, EVALUATIONS, as_json=as_json)


def _rules(config: str | None) -> Mapping[str, object] | None:
    if config is None:
        return None
    try:
        rules = json.loads(config)
    except ValueError:
        rules = None
    if not isinstance(rules, dict):
        raise InvalidRequest(f'--config {config[:80]!r} is not a JSON object; for example {{"max_items": 50}}', code="invalid_eval_config")
    return rules
