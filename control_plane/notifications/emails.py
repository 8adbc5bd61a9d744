"""E-mail about events: what happened, and the next step. It contains ids and states, never texts of the tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVERYBODY = ("owner", "admin", "member", "viewer")
ADMINS = ("owner", "admin")
"""Roles of members that get e-mail if their ``notify`` is on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    subject: str
    """Subject line, with ``{id}`` of the event's object."""
    next_step: str
    """Body, with ``{id}``, ``{job_id}`` where it has one, and ``{url}`` of the API."""
    to: tuple[str, ...] = EVERYBODY


@dataclass(frozen=True, kw_only=True, slots=True)
class Mail:
    subject: str
    text: str


LETTERS: Mapping[str, Letter] = {
    "fine_tuning.job.succeeded": Letter(
        subject="Job {id} has succeeded",
        next_step="`ft job {id}` names its model; `ft chat MODEL` talks to one in production.\n{url}/v1/fine_tuning/jobs/{id}",
    ),
    "fine_tuning.job.failed": Letter(
        subject="Job {id} has failed",
        next_step="`ft job {id}` says why and what to change; failures of the platform are not charged.\n{url}/v1/fine_tuning/jobs/{id}",
    ),
    "adapter.quarantined": Letter(
        subject="Model {id} is trained, not approved",
        next_step="It is kept and not served. `ft eval {job_id}` shows which rule it failed, with the number, and what to change. If it is "
        "good enough, an admin may serve it: `ft adapters release {id} --reason ...`. After a failed safety rule, or if operators keep "
        "releases to themselves, only an operator may.\n{url}/v1/adapters/{id}",
    ),
    "adapter.approval_pending": Letter(
        subject="Adapter {id} waits for approval",
        next_step="Look at its evaluation, then `ft adapters approve {id} --promote` or `ft adapters reject {id}`.\n{url}/v1/adapters/{id}",
    ),
    "quota.threshold_reached": Letter(
        subject="GPU time of this month is close to a cap",
        next_step="`ft quota` shows the caps, `ft usage` which job used what. What happens at a cap: docs/quotas.md.\n{url}/v1/usage",
        to=ADMINS,
    ),
    "quota.hard_cap_reached": Letter(
        subject="The hard cap on GPU time is reached: jobs are paused",
        next_step="Running jobs pause at their next checkpoint and lose nothing. Ask your operator for a higher cap, or wait for the next "
        "month.\n{url}/v1/usage",
        to=ADMINS,
    ),
    "budget.threshold_reached": Letter(
        subject="Budget {id} has reached a threshold",
        next_step="`ft usage` shows what was spent on what.\n{url}/v1/usage",
        to=ADMINS,
    ),
    "refund.decided": Letter(
        subject="Refund {id} is decided", next_step="`ft usage` shows the entry, if there is one.\n{url}/v1/usage", to=ADMINS
    ),
    "invoice.issued": Letter(subject="Invoice {id} is issued", next_step="`ft invoice` shows and saves it.\n{url}/v1/invoices", to=ADMINS),
    "webhook_endpoint.disabled": Letter(
        subject="Webhook endpoint {id} is disabled",
        next_step="Mend the receiver, try it with `ft webhooks test {id}`, then `ft webhooks enable {id}` and `ft webhooks replay {id}`: "
        "what it missed is kept for 30 days.\n{url}/v1/webhook_endpoints/{id}",
        to=ADMINS,
    ),
}
"""By type of event; other types are not mailed."""
SWEEP_ENDED = Letter(
    subject="Sweep {id} has ended",
    next_step="`ft sweep show {id}` lists its trials with their scores, and `ft sweep best {id}` names the best one. Those that are not "
    "approved did not pass their gate.\n{url}/v1/fine_tuning/sweeps/{id}",
)
"""In place of those of its trials."""


def is_mailed(kind: str, data: Mapping[str, Any]) -> bool:
    """Whether an event is mailed: a job that failed its gate is covered by the event of its adapter's quarantine."""
    return kind in LETTERS and not (kind == "fine_tuning.job.failed" and data.get("error_code") == "gate_failed")


def compose(kind: str, what: str, data: Mapping[str, Any], *, tenant: str, url: str) -> Mail:
    """Return the e-mail for an event of `kind`, which means `what`."""
    return write(LETTERS[kind], what, data, tenant=tenant, url=url)


def write(letter: Letter, what: str, data: Mapping[str, Any], *, tenant: str, url: str) -> Mail:
    """Return the e-mail of `letter` about the object of `data`."""
    id_ = str(data["id"])
    next_step = letter.next_step.format(id=id_, url=url, job_id=data.get("job_id", "JOB"))
    facts = "".join(f"  {name}: {value}\n" for name, value in sorted(data.items()) if isinstance(value, str | int | float))
    text = (
        f"{what[:1].upper()}{what[1:]}.\n\n{facts}  tenant: {tenant}\n\n{next_step}\n\n"
        "-- \nYou get this as a member of the tenant; `ft members update ID --no-notify` switches it off.\n"
    )
    return Mail(subject=f"[{tenant}] {letter.subject.format(id=id_)}", text=text)
