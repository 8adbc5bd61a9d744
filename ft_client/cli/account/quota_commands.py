"""``ft quota``: limits and what is left of this month."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from ft_client.cli.output import fields, number, say
from ft_client.cli.record_views import add_commands
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient


def register(app: typer.Typer) -> None:
    add_commands(app, "Account", quota)


def _show(found: Mapping[str, Any]) -> None:
    soft, hard, left = (found[name] for name in ("soft_gpu_hours", "hard_gpu_hours", "left_gpu_hours"))
    starts = found["starts_within_s"]
    fields({
        "tenant": f"{found['tenant']} ({found['tier']})",
        "month": f"{found['month']}, until {datetime.fromtimestamp(found['month_ends_at'], UTC):%Y-%m-%d %H:%M} UTC",
        "used": f"{number(found['used_gpu_hours'])} GPU-hours, of them {number(found['running_gpu_hours'])} running",
        "held": f"{number(found['held_gpu_hours'])} GPU-hours for admitted jobs",
        "left": "no hard cap" if left is None else f"{number(left)} GPU-hours",
        "soft limit": "none" if soft is None else f"{number(soft)} GPU-hours, {number(found['overage_gpu_hours'])} beyond it",
        "hard cap": "none" if hard is None else f"{number(hard)} GPU-hours",
        "jobs in flight": f"{found['jobs_in_flight']} of {found['max_jobs_in_flight']}, {found['jobs_paused_for_cap']} paused for the cap",
        "jobs start": "best effort: a wait has no bound" if starts is None else f"within {starts / 60:g} minutes",
    })  # fmt: skip
    if found["at_hard_cap"]:
        say(found["on_hard_cap"])


@remote(_show)
def quota(client: FtClient) -> Any:
    """Show your limits, and the used, held and remaining GPU-hours of this month."""
    return client.quota.retrieve()


def quota_line(quota: Mapping[str, Any]) -> str:
    """Describe in one line what a job takes of the month."""
    left, over = quota["left_gpu_hours"], quota["overage_gpu_hours"]
    space = "no hard cap" if left is None else f"{number(left)} GPU-hours are left up to the hard cap"
    excess = f"; {number(over)} of the job's exceed the soft limit and are billed as overage" if quota["goes_into_overage"] else ""
    return space + ("" if quota["fits"] else "; the job does not fit") + excess
