"""Commands on models: ``ft models``, ``adapters``, ``promote``, ``rollback``, ``routes``, ``manifest``, ``deletions``, ``chat``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from core.storable_text import shown_answer
from ft_client.cli.commands import add_commands, add_group, argument, given, listing, option, show, since
from ft_client.cli.evaluation_commands import tell
from ft_client.cli.output import Exit, Json, ago, fields, percent, print_json, print_manifests, say, table
from ft_client.cli.session import connect, remote

if TYPE_CHECKING:
    from engine.adapters import Refusal
    from ft_client import FtClient, Record

AdapterId = Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")]
Reference = Annotated[str, typer.Argument(metavar="NAME", help="Adapter id or model name, such as the `model` of a response.")]
RouteName = argument("What requests put into `model`: a-z, 0-9, '_', '.' and '-'.")
Note = option("--note", "Note, kept with the decision.")
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: standard output.")]


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
PENDING = listing({"ID": "id", "MODEL": "name", "JOB": "job_id", "CREATED": since("created_at")})
EVALUATIONS = listing({
    "ID": "id", "KIND": "kind", "BASE": lambda e: e["base_digest"][:12], "VERDICT": _verdict, "CREATED": since("created_at"),
})  # fmt: skip
DELETIONS = listing({
    "ID": "id", "OF": "subject_id", "STATUS": "status", "ASKED FOR": since("requested_at"),
    "": lambda d: d["waiting_for"] or d["reason"],
})  # fmt: skip
ROUTES = listing({"NAME": "name", "TARGETS": lambda r: ", ".join(f"{t['model']}={t['weight']}" for t in r["targets"])})
TARGETS = listing({
    "TARGET": "model", "WEIGHT": "weight", "SHARE": lambda t: percent(t["share"]),
    "STAGE": lambda t: t["stage"] or ("withdrawn" if t["adapter_id"] else "base"), "SERVED": lambda t: "yes" if t["served"] else "no",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Models", {
        "promote": remote.call("adapters.promote",
            "Promote an adapter to production: loads it on the inference servers and serves it under its model name.", _promoted,
            adapter_id=AdapterId),
        "rollback": remote.call("adapters.rollback", "Withdraw a production adapter in favor of the one promoted before it.",
            "serving {serving[name]} again; {withdrawn[name]} is withdrawn", adapter_id=AdapterId),
        "deletions": deletions,
        "chat": chat,
    })  # fmt: skip
    models: dict[str, Callable[..., Any]] = {
        "list": remote.call("models.list", "List base models, your routes and your adapters.", MODELS), "keys": keys, "verify": verify,
    }  # fmt: skip
    add_group(app, "models", "List models; verify downloaded files by the platform's signature.", models, panel="Models")
    add_group(app, "adapters", "List adapters; trace, approve or re-evaluate them.", {
        "list": remote.call("adapters.list", "List adapters, newest first: stage, serving state, and score compared with the base's.",
            ADAPTERS),
        "evaluate": evaluate,
        "evaluations": evaluations,
        "signature": signature,
        "lineage": lineage,
        "pending": remote.call("adapters.list", "List adapters that wait for approval.", PENDING, fixed={"approval": "pending"}),
        "approve": remote.call("adapters.approve", "Approve an adapter whose job requires approval, so that it can be promoted.", _decided,
            adapter_id=Reference, note=Note, promote=option("--promote", "Promote it to production immediately.", type=bool)),
        "reject": remote.call("adapters.reject", "Reject an adapter, so that it cannot be promoted.", _decided, adapter_id=Reference,
            note=Note),
        "release": remote.call("adapters.release",
            "Serve a model that did not pass its gate. Needs a key with scope admin; the reason is kept with the model.",
            "{name} is released and in {stage}; its job succeeded", adapter_id=Reference,
            reason=option("--reason", "Why it is good enough to be served.", type=str)),
    }, panel="Models")  # fmt: skip
    add_group(app, "routes", "List your routes: names of your own for models, with weights between versions.", {
        "list": remote.call("model_routes.list", "List your routes: names of your own for models, with weights between versions.", ROUTES),
        "set": remote.call(_set_route,
            "Point a name to targets; a single target needs no weight: `ft routes set bot adp-1=90 adp-2=10`.", _show_route, name=RouteName,
            targets=argument("Adapters in production (id or model name) or a base model.", metavar="MODEL=WEIGHT", type=list[str])),
        "show": remote.call("model_routes.retrieve", "Show a route with the current share of each target.", _show_route, name=RouteName),
        "delete": remote.call("model_routes.delete", "Delete a route; its targets stay available under their own names.",
            "route {name} is deleted", name=RouteName),
    }, panel="Models")  # fmt: skip
    about = "Kubernetes manifests: `ft manifest server ID | kubectl apply -f -`."
    add_group(app, "manifest", about, {"server": server_manifest, "route": route_manifest}, panel="Models")


def _promoted(changed: Record) -> str:
    detail = f"\n  {changed['detail']}" if changed["detail"] else ""
    return f"{changed['name']} is in {changed['stage']}; on the inference servers it is {changed['observed']}{detail}"


def _decided(adapter: Mapping[str, Any]) -> str:
    servable = adapter["approval"] == "approved" and adapter["stage"] != "production"
    next_step = f"; `ft promote {adapter['id']}` serves it" if servable else ""
    return f"{adapter['name']} is {adapter['approval']} and in {adapter['stage']}{next_step}"


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
        raise typer.Exit(Exit.FAILED)


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


def keys(out: Out = None, as_json: Json = False) -> None:
    """Print the platform's public keys, to keep for `ft models verify --keys`."""
    with connect() as client:
        _written(client.models.signing_keys(), out, as_json=as_json)


def signature(
    adapter: Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Print the signature of a registered adapter: a DSSE envelope over its manifest and files."""
    with connect() as client:
        _written(client.adapters.signature(adapter), out, as_json=as_json)


def _written(document: Any, out: Path | None, *, as_json: bool) -> None:
    if out is None:
        print_json(document)
        return
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show({"file": str(out)}, lambda found: print(found["file"]), as_json=as_json)


def verify(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of an export.")],
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Public keys, saved with `ft models keys`; default: asks the platform.")
    ] = None,
    signature: Annotated[Path | None, typer.Option("--signature", help="Signature, if it is not in the folder.")] = None,
    as_json: Json = False,
) -> None:
    """Verify that the files of a folder are those that the platform signed. With --keys, without a network."""
    from engine.adapters import check_signed_folder, read_key_set

    statement, refused = check_signed_folder(folder, read_key_set(_key_set(keys)), envelope=signature)
    if as_json:
        print_json({"verified": not refused, "statement": statement, "refusals": [{"code": r.code, "detail": r.detail} for r in refused]})
    else:
        say(_signed_by(folder, statement, refused))
    if refused:
        raise typer.Exit(Exit.FAILED)


def _key_set(file: Path | None) -> object:
    if file is None:
        with connect() as client:
            return client.models.signing_keys()
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{file} cannot be read as a key set: {e}; `ft models keys -o {file}` saves one", param="keys") from e


def _signed_by(folder: Path, statement: Mapping[str, Any] | None, refused: list[Refusal]) -> str:
    if refused or statement is None:
        return "\n".join(["NOT VERIFIED", *(f"  {one.code}: {one.detail}" for one in refused)])
    build, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    made = f"{build['externalParameters']['model']}, signed by {run['builder']['id']}"
    return f"VERIFIED: the {len(statement['subject'])} files of {folder} are {made}"


def lineage(
    name: Reference,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the stored bytes again and compare them with the recorded hashes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Trace a model back: evaluation, job, spec, base model, dataset, uploaded file."""
    with connect() as client:
        found = client.models.lineage(name, verify=verify)
    if as_json:
        print_json(found)
    else:
        for adapter in found["adapters"]:
            _show_lineage(adapter)
        if found["kind"] == "base_model":
            fields(found.get("base_model") or {})
        if verify:
            print(verdict(found))
    if verify and found["adapters"] and not found.get("holds"):
        raise typer.Exit(Exit.FAILED)


def verdict(found: Mapping[str, Any]) -> str:
    """Summarize a verification in one line."""
    links = [link for one in found["adapters"] for link in one["links"]]
    if not links:
        return "NOTHING TO VERIFY: a base model was trained elsewhere; `ft admin models verify` reads its files again"
    broken = [link["link"] for link in links if link["holds"] is False]
    unread = [link["link"] for link in links if link["holds"] is None]
    held = f"{len(links) - len(broken) - len(unread)} of {len(links)} links hold"
    rest = f"; not readable: {', '.join(unread)}" if unread else ""
    if broken:
        return f"BROKEN at {', '.join(broken)}: {held}{rest}"
    return f"{'VERIFIED' if len(unread) < len(links) else 'NOT VERIFIED'}: {held}{rest}"


def _show_lineage(one: Record) -> None:
    adapter, training, base = one["adapter"], one["training"], one["base_model"]
    datasets = [dataset or {} for dataset in (one["dataset"], *one["mixed_datasets"])]
    fields({
        "model": adapter["name"], "adapter": f"{adapter['id']} ({adapter['stage']}), manifest {adapter['manifest_sha256']}",
        **{f"  {name}": sha256 for name, sha256 in sorted(one["files"]["files"].items())},
        "evaluations": ", ".join(f"{e['kind']} {e['outcome'] or e.get('state')}" for e in one["evaluations"]),
        "job": f"{one['job']['id']}, {len(training['attempts'])} attempts, {len(training['checkpoints'])} checkpoints",
        "spec": training["spec_sha256"], "lock": training["lock_sha256"], "commit": training["commit"],
        "base model": f"{base['id']} {base['digest']}" + (f" ({base['repo']}@{base['revision']})" if base.get("repo") else ""),
        **{f"dataset{f' {n}' if len(datasets) > 1 else ''}": _dataset(one) for n, one in enumerate(datasets, 1)},
        **{_upload_name(u, one["uploads"]): f"{u['id']} {u['filename']} {u['sha256']}" for u in one["uploads"]},
        **({"started from": " < ".join(p["adapter"]["name"] for p in one["parents"])} if one["parents"] else {}),
        **({"deletion": f"{one['deletion']['id']}: {one['deletion']['reason']}"} if one["deletion"] else {}),
    })  # fmt: skip
    if "links" in one:
        message = {True: "holds", False: "BROKEN", None: "not there"}
        table(("LINK", "", ""), [(link["link"], message[link["holds"]], link["detail"]) for link in one["links"]])


def _dataset(dataset: Mapping[str, Any]) -> str:
    return f"{dataset.get('id')} ({dataset.get('row_count')} rows), content {dataset.get('content_sha256')}"


def _upload_name(upload: Mapping[str, Any], uploads: Sequence[Mapping[str, Any]]) -> str:
    """Return its role, numbered if several files have it."""
    alike = [one["id"] for one in uploads if one["role"] == upload["role"]]
    return f"{upload['role']} file" + (f" {alike.index(upload['id']) + 1}" if len(alike) > 1 else "")


def _show_route(route: Record) -> None:
    TARGETS(route["targets"])
    if any(not t["served"] for t in route["targets"]):
        say("a target that is not served gets no requests; the others get its share")


def _set_route(client: FtClient, name: str, targets: Sequence[str]) -> Any:
    parsed = dict(_target(t) for t in targets)
    if len(parsed) < len(targets):
        raise InvalidRequest("a target is named twice; give it one weight", code="invalid_route", param="targets")
    return client.model_routes.set(name, parsed)


def _target(text: str) -> tuple[str, int]:
    model, sign, weight = text.rpartition("=")
    if not sign:
        return text, 1
    if not model or not weight.isdecimal():
        raise InvalidRequest(f"{text!r} is not MODEL=WEIGHT with a whole number", code="invalid_route", param="targets")
    return model, int(weight)


def server_manifest(
    model: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a whole model.")], as_json: Json = False
) -> None:
    """Render the Kubernetes manifests of a server for a fully trained model: Deployment, Service, NetworkPolicy."""
    with connect() as client:
        print_manifests(client.adapters.manifest(model), as_json=as_json)


def route_manifest(name: Annotated[str, typer.Argument(metavar="NAME", help="One of your routes.")], as_json: Json = False) -> None:
    """Write a route between versions as llm-d's InferenceModelRewrite."""
    with connect() as client:
        print_manifests(client.model_routes.manifest(name), as_json=as_json)


def deletions(
    deletion: Annotated[str | None, typer.Argument(metavar="ID", help="One deletion, with its proof.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the proof to this file.")] = None,
    as_json: Json = False,
) -> None:
    """List deletions, or show one with its proof."""
    with connect() as client:
        found: Any = client.deletions.list().all() if deletion is None else client.deletions.retrieve(deletion)
    if output is not None:
        if deletion is None:
            raise InvalidRequest("-o writes one proof; name its deletion (`ft deletions` lists them)", param="ID")
        output.write_text(json.dumps(found, indent=1, ensure_ascii=False))
        say(f"{output} has the proof of {deletion}, sha256 {found['sha256']}")
    if as_json or (deletion is not None and output is None):
        print_json(found)
    elif deletion is None:
        DELETIONS(found)


def chat(
    model: Annotated[str, typer.Argument(help="Model name (`ft models`).")],
    prompt: Annotated[str | None, typer.Argument(help="One question; without it: a conversation, ended by Ctrl-D.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0)] = 0.0,
    as_json: Json = False,
) -> None:
    """Chat with a model; the response is streamed. `ft chat MODEL -` reads the question from standard input."""
    messages = [{"role": "system", "content": system}] if system else []
    options = {"temperature": temperature, **given(max_tokens=max_tokens)}
    with connect() as client:
        if prompt is not None or not sys.stdin.isatty():
            text = sys.stdin.read() if prompt in (None, "-") else prompt
            _ask(client, model, [*messages, {"role": "user", "content": text}], options, as_json=as_json)
            return
        say("Ctrl-D ends the conversation")
        while (question := _question()) is not None:
            messages.append({"role": "user", "content": question})
            answer = _ask(client, model, messages, options, as_json=as_json)
            messages.append({"role": "assistant", "content": answer})


def _question() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _ask(client: FtClient, model: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        answer = client.chat.create(model=model, messages=messages, **options)
        print_json(answer)
        return answer["choices"][0]["message"]["content"] or ""
    parts: list[str] = []
    for part in client.chat.stream(model=model, messages=messages, **options):
        print(part, end="", flush=True)
        parts.append(part)
    print(flush=True)
    text = "".join(parts)
    if not text.strip():
        say(shown_answer(text))
    return text
