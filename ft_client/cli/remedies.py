"""Replaces API routes in messages by the ``ft`` command that does the same."""

from __future__ import annotations

import re
from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "GET /v1/adapters": "ft adapters",
    "GET /v1/adapters/{}/evaluations": "ft adapters evaluations {}",
    "POST /v1/adapters/{}/approve": "ft adapters approve {}",
    "GET /v1/admin/dead_letters": "ft admin dead-letters list",
    "POST /v1/adapters/{}/exports": "ft export {}",
    "GET /v1/api_keys": "ft keys",
    "POST /v1/api_keys": "ft keys create NAME",
    "DELETE /v1/api_keys/{}": "ft keys revoke {}",
    "GET /v1/audit_log": "ft audit",
    "GET /v1/budgets": "ft budgets",
    "GET /v1/datasets": "ft datasets",
    "GET /v1/datasets/{}/report": "ft datasets show {}",
    "POST /v1/datasets/{}/approve": "ft datasets approve {}",
    "GET /v1/deletions": "ft deletions",
    "GET /v1/deletions/{}": "ft deletions {}",
    "GET /v1/files": "ft files",
    "POST /v1/files": "ft upload FILE",
    "GET /v1/files/{}/events": "ft files show {}",
    "POST /v1/files/{}/validate": "ft files validate {}",
    "GET /v1/fine_tuning/jobs": "ft jobs",
    "GET /v1/fine_tuning/jobs/{}/checkpoints": "ft checkpoints {}",
    "GET /v1/fine_tuning/jobs/{}/metrics": "ft metrics {}",
    "GET /v1/fine_tuning/sweeps": "ft sweep",
    "GET /v1/invoices": "ft invoices",
    "GET /v1/members": "ft members",
    "POST /v1/members": "ft members add E-MAIL",
    "POST /v1/members/{}": "ft members update {}",
    "GET /v1/model_routes": "ft routes",
    "DELETE /v1/model_routes/{}": "ft routes delete {}",
    "GET /v1/models": "ft models",
    "GET /v1/recipes": "ft recipes list",
    "POST /v1/uploads": "ft upload FILE",
    "GET /v1/webhook_endpoints": "ft webhooks",
    "GET /v1/webhook_endpoints/{}/deliveries": "ft webhooks deliveries {}",
}
"""Commands by the routes that messages name. A route without a command stays as it is."""
ROUTE = re.compile(r"`?\b(?P<method>GET|POST|DELETE) (?P<path>/v1/[\w{}:%.-]+(?:/[\w{}:%-]+)*)`?")


def in_commands(text: str) -> str:
    """Return `text` with each route that has a command replaced by it."""
    return ROUTE.sub(lambda found: _command(f"{found['method']} {found['path']}") or found[0], text)


def _command(route: str) -> str | None:
    parts = route.split("/")
    for template, command in COMMANDS.items():
        names = template.split("/")
        if len(names) == len(parts) and all(name in ("{}", part) for name, part in zip(names, parts, strict=True)):
            return f"`{command.format(*(_id(part) for name, part in zip(names, parts, strict=True) if name == '{}'))}`"
    return None


def _id(part: str) -> str:
    return "ID" if part == "{id}" else part
