"""``ft admin tenants``, ``verify-deletions``, ``operators``, ``dead-letters`` and ``adapters``: tenants, and what operators do for them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local, user
from core.errors import InvalidRequest
from ft_client.cli.account_commands import key_state
from ft_client.cli.command_options import Lifetime
from ft_client.cli.commands import Limit, NewName, add_commands, add_group, argument, document, documents, listing, option, since
from ft_client.cli.output import Json, print_json, say

if TYPE_CHECKING:
    from control_plane.platform.context import Platform

TenantId = argument("Id of the tenant.", metavar="TENANT")
JobId = argument("Job, as in `ft admin dead-letters list`.", metavar="JOB")
OF_TIER = "tier"
"""Placeholder for the tier's limit where an option takes a number."""
TENANT = "id name tier max_jobs_in_flight soft_gpu_hours hard_gpu_hours requests_per_minute suspended_reason suspended_at"
DEAD_LETTER = "id tenant_id state model tier num_gpus attempt step total_steps error finished_at"


def _hours(hours: float | None) -> str:
    return "no limit" if hours is None else f"{hours:g}"


TENANTS = listing({
    "ID": "id", "NAME": "name", "TIER": "tier", "JOBS IN FLIGHT, AT MOST": "max_jobs_in_flight",
    "GPU-HOURS, AT MOST": lambda t: _hours(t["hard_gpu_hours"]), "REQUESTS/MIN": "requests_per_minute", "SUSPENDED": "suspended_reason",
})  # fmt: skip
DELETIONS = listing({
    "ID": "id", "OF": "subject_id", "REQUESTED": "requested_at", "DONE": "done_at", "WAITS FOR": "waiting_for", "REASON": "reason",
})  # fmt: skip
KEYS = listing({"ID": "id", "NAME": "name", "KEY": "hint", "STATE": key_state, "LAST USED": since("last_used_at")})
DEAD_LETTERS = listing({
    "JOB": "id", "TENANT": "tenant_id", "TIER": "tier", "MODEL": "model", "GPUS": "num_gpus", "ATTEMPTS": "attempt",
    "STEP": lambda job: f"{job['step'] or 0}/{job['total_steps'] or '?'}", "SINCE": since("finished_at"),
    "WHY": lambda job: job["error"]["message"] if job["error"] else "",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    def limit(name: str, metavar: str, help: str) -> Any:
        return option(name, help, metavar=metavar)

    add_group(admin, "tenants", "Create, list, change and suspend tenants.", {
        "create": local.call(_create, "Create a tenant and its first API key. The key is shown once: only its hash is stored.",
            "tenant {id} ({tier}); its key is shown only now: `ft login` asks for it and stores it", prints="api_key",
            tenant=argument("Id of the tenant: lower-case letters, digits and '-'."),
            tier=(option("--tier", "free, standard or premium.", type=str), "standard"),
            owner_email=option("--owner", "E-mail address of a person to add as owner.", metavar="E-MAIL")),
        "list": local.call("control_plane.tenants.service.list_all", "List tenants with their effective limits.", TENANTS, shows=TENANT),
        "update": local.call(_update,
            "Change a tenant's name, tier or limits; options left out stay unchanged. Running jobs continue.", _tenant, shows=TENANT,
            tenant=TenantId, tier=option("--tier", "free, standard or premium."), name=NewName,
            max_jobs_in_flight=limit("--max-jobs", "N", "Jobs in flight; `tier`: the tier's limit."),
            soft_gpu_hours=limit("--soft-gpu-hours", "H", "GPU-hours per month, then overage; or `tier`."),
            hard_gpu_hours=limit("--hard-gpu-hours", "H", "GPU-hours per month, then jobs are paused; or `tier`."),
            requests_per_minute=limit("--requests-per-minute", "N", "Requests per minute of each key; or `tier`.")),
        "suspend": local.call("control_plane.tenants.suspension.suspend",
            "Refuse every call of a tenant's keys from now on; running jobs continue.", _tenant, shows=TENANT, tenant=TenantId,
            reason=option("--reason", "Reason, shown to the tenant with every refusal.", type=str)),
        "resume": local.call("control_plane.tenants.suspension.resume", "Accept calls of a suspended tenant's keys again.", _tenant,
            shows=TENANT, tenant=TenantId),
        "delete-data": delete_data,
        "deletions": local.call(_deletions, "List the deletions of a tenant, newest first. With --json, each includes its proof, which you "
            "can send to a former tenant.", DELETIONS, tenant=argument("Id of the tenant, also of a closed account.")),
    })  # fmt: skip
    add_commands(admin, None, {
        "verify-deletions": local.call("control_plane.tenant_data.deletion.verify_chain",
            "Recompute the proofs of all deletions; exits with 1 if one was changed or is missing.",
            lambda c: f"{c['num_deletions']} deletions, the last one {c['head'] or 'none'}; broken: {', '.join(c['broken']) or 'none'}",
            fails=lambda chain: bool(chain["broken"]), shows="num_deletions head broken"),
    })  # fmt: skip
    add_group(admin, "operators", "Operator keys for /v1/admin, which tenants' keys cannot access.", {
        "create": local.call("control_plane.tenants.operators.create", "Create an operator's key (ft-op-...). Its secret is written to "
            "stdout, only now; it expires after 90 days, or at most a year.", _key_created, prints="secret",
            shows="id name secret expires_at", name=argument("Name of the person or machine that holds it."),
            expires_in_s=(Lifetime, "90d")),
        "list": local.call("control_plane.tenants.operators.list_all", "List operators' keys, newest first, including revoked ones.", KEYS,
            shows="id name hint created_at expires_at revoked_at last_used_at"),
        "revoke": local.call("control_plane.tenants.operators.revoke", "Revoke an operator's key immediately.",
            "operator's key {id} ({name}) is revoked", shows="id name revoked_at",
            key_id=argument("Key id (`ft admin operators list`): opk_...", metavar="KEY_ID")),
    })  # fmt: skip
    add_group(admin, "dead-letters", "Jobs given up after repeated failures of the platform: list, release or close them.", {
        "list": local.call(_dead_letters, "List jobs of all tenants that were given up, newest first.", DEAD_LETTERS, limit=(Limit, 100)),
        "release": local.call("control_plane.jobs.dead_letters.service.release",
            "Queue a job again whose cause of failure is gone.", "job {id} is queued again; it resumes from its newest checkpoint, and its "
            "failures so far no longer count", shows=DEAD_LETTER, job_id=JobId),
        "close": local.call("control_plane.jobs.dead_letters.service.close", "Leave a job failed, as its tenant sees it already.",
            "job {id} stays failed", shows=DEAD_LETTER, job_id=JobId),
    })  # fmt: skip
    add_group(admin, "adapters", "Models of tenants.", {
        "release": local.call("control_plane.evaluations.releases.release",
            "Serve a tenant's model that did not pass its gate, also one that failed the safety rule.", "{name} is released and in {stage}",
            shows="id tenant_id name stage job_id released_by released_at release_reason",
            fixed={"by": lambda: f"operator:{user()}", "by_operator": True}, tenant=TenantId,
            reference=argument("Adapter id or model name.", metavar="NAME"),
            reason=option("--reason", "Why it is good enough; shown to the tenant.", type=str)),
    })  # fmt: skip


def _tenant(tenant: Mapping[str, Any]) -> str:
    suspended = f"; suspended: {tenant['suspended_reason']}" if tenant["suspended_at"] else ""
    return (
        f"{tenant['id']} is {tenant['tier']}: {tenant['max_jobs_in_flight']} jobs in flight, GPU-hours a month "
        f"{_hours(tenant['soft_gpu_hours'])} then overage, {_hours(tenant['hard_gpu_hours'])} at most, "
        f"{tenant['requests_per_minute']} requests a minute{suspended}"
    )


def _create(platform: Platform, tenant: str, **options: Any) -> Mapping[str, Any]:
    from control_plane.tenants import service as tenants

    made, key = tenants.create(platform, tenant, **options)
    return {**document(made, "id", "name", "tier"), "key_id": key.id, "api_key": key.secret}


def _update(platform: Platform, tenant: str, tier: str | None = None, name: str | None = None, **limits: str) -> Any:
    from control_plane.tenants import suspension

    return suspension.update(platform, tenant, {"tier": tier, "name": name, **{k: _number(k, v) for k, v in limits.items()}})


def _number(name: str, text: str) -> float | int | None:
    if text == OF_TIER:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r} is neither a number nor `{OF_TIER}`", param=name) from None
    return int(number) if number.is_integer() else number


def delete_data(
    tenant: Annotated[str, typer.Argument(help="Id of the tenant.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, kept in the proof.")],
    confirm: Annotated[str | None, typer.Option("--confirm", help="The tenant's id again, instead of the prompt.")] = None,
    close_account: Annotated[
        bool, typer.Option("--close-account", help="End the account too: members with names and addresses, keys, webhooks, budgets.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Permanently delete all data of a tenant: objects, texts, adapters. Ids, digests and invoices stay; a proof is kept."""
    from control_plane.tenant_data import deletion, deletion_requests

    what = f"everything that {tenant} stored{', and ends its account' if close_account else ''}"
    question = f"This permanently deletes {what}. Type the tenant's id to continue"
    typed = confirm if confirm is not None else typer.prompt(question, err=True)
    with open_local() as platform:
        requested = deletion_requests.request_tenant(
            platform, tenant, confirm=typed, reason=reason, requested_by="operator", close_account=close_account
        )
        deletion.carry_out(platform, requested.id)
        found = deletion.get(platform, tenant, requested.id)
    if as_json:
        print_json(json.loads(deletion.json_of(found)))
    elif found.proof is None:
        say(f"{found.id}: {found.waiting_for}; the platform retries every ten minutes")
    else:
        say(f"{found.id} is done: {found.proof['num_objects']} objects; its proof has sha256 {found.sha256}")


def _deletions(platform: Platform, tenant: str) -> Any:
    from control_plane.tenant_data import deletion
    from control_plane.tenants import service as tenants

    tenants.get(platform, tenant)
    return [json.loads(deletion.json_of(deletion.get(platform, tenant, one.id))) for one in deletion.list_all(platform, tenant)]


def _key_created(made: Mapping[str, Any]) -> str:
    until = time.strftime("%Y-%m-%d", time.gmtime(made["expires_at"]))
    return f"operator's key {made['id']} of {made['name']}, until {until}; its secret is shown only now"


def _dead_letters(platform: Platform, limit: int) -> Any:
    from control_plane.jobs.dead_letters import service

    return documents(service.list_all(platform, limit=limit).items, *DEAD_LETTER.split())
