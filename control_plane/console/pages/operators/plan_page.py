"""Capacity planning: a form for the mix, and what it needs, waits, costs and earns, as `ft admin plan` computes it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from starlette.datastructures import FormData

from control_plane.capacity import configured_pools
from control_plane.console.documents.charts import columns, over_time
from control_plane.console.pages.operators.operator_page import OperatorPage, OperatorPageDep
from control_plane.console.pages.page import OPERATORS, PageRoute
from control_plane.planning import job_mix, service
from control_plane.planning.service import CapacityPlan
from control_plane.planning.waits import Limits, Simulated
from control_plane.tenants.rules import TIERS
from core.errors import InvalidRequest
from engine.scheduler import JOB_CLASSES
from engine.training import WELL_KNOWN_SHAPES

ROWS = 6
"""Kinds that the form has room for."""
KIND_FIELDS = ("name", "share", "gpu_hours", "gpus", "class", "model", "tokens")
LIMITS = Limits(days=7.0, jobs=12_000, gpus=4096, work=1_000_000)
"""Of one simulation, so that it takes some ten seconds at most: the request of an operator shares a process with those of tenants."""
one_plan = threading.Lock()
"""Held while a plan is computed: one at a time in a process."""
router = APIRouter(prefix=OPERATORS, route_class=PageRoute, include_in_schema=False)


async def _form_data(request: Request) -> FormData:
    return await request.form()


@router.get("/plan")
def show_form(page: OperatorPageDep) -> HTMLResponse:
    """Show the form with the planned mix."""
    pools = configured_pools.planned(page.platform)
    return _show(page, form=_planned(), gpus={pool.name: str(pool.total_gpus) for pool in pools})


@router.post("/plan")
def plan_capacity(page: OperatorPageDep, given: Annotated[FormData, Depends(_form_data)]) -> HTMLResponse:
    """Show a plan of the mix that was sent. It changes nothing; a POST carries the session's token, so no link can start a plan."""
    pools = configured_pools.planned(page.platform)
    form = _sent(given)
    gpus = {pool.name: _field(given, f"pool.{pool.name}", str(pool.total_gpus)) for pool in pools}
    if not one_plan.acquire(blocking=False):
        answer = _show(
            page, form=form, gpus=gpus, error="another plan is being computed, and this server computes one at a time; retry in a moment"
        )
        answer.status_code = 503
        return answer
    try:
        layout = {name: _whole(text, f"GPUs of pool {name}") for name, text in gpus.items()}
        changed = layout != {pool.name: pool.total_gpus for pool in pools}
        cost = form["gpu_cost"]
        found = service.plan(
            page.platform.settings, job_mix.parse(_body(form)), at=page.platform.clock(), layouts=[layout] if changed else (),
            gpu_usd_per_hour=_number(cost, "cost of a GPU-hour") if cost else None,
            days=_number(form["days"], "days") if form["days"] else None, limits=LIMITS,
        )  # fmt: skip
    except InvalidRequest as error:
        return _show(page, form=form, gpus=gpus, error=error.message)
    finally:
        one_plan.release()
    return _show(page, form=form, gpus=gpus, plan=found, charts=_charts(found))


def _show(page: OperatorPage, *, form: Mapping[str, Any], gpus: Mapping[str, str], **found: Any) -> HTMLResponse:
    values: dict[str, Any] = {"error": None, "plan": None, "charts": (), **found}
    return page.show(
        "plan.html", form=form, gpus=gpus, tiers=tuple(reversed([*TIERS])), classes=JOB_CLASSES, models=tuple(WELL_KNOWN_SHAPES), **values
    )


def _planned() -> Mapping[str, Any]:
    body = job_mix.read()
    kinds = [{name: _text(kind.get(name, "")) for name in KIND_FIELDS} for kind in body["kinds"]]
    tiers = {tier: _text(body["tiers"].get(tier, 0)) for tier in TIERS}
    return _form(kinds, tiers, jobs_a_day=str(body["jobs_a_day"]), arrivals=body["arrivals"], spot=str(body["spot"]))


def _field(given: FormData, name: str, default: str = "") -> str:
    value = given.get(name, default)
    return value.strip() if isinstance(value, str) else default


def _sent(given: FormData) -> Mapping[str, Any]:
    columns_of = [[str(value) for value in given.getlist(f"kind.{name}")[:ROWS]] for name in KIND_FIELDS]
    kinds = [dict(zip(KIND_FIELDS, (value.strip() for value in row), strict=True)) for row in zip(*columns_of, strict=False)]
    fields = {name: _field(given, name) for name in ("jobs_a_day", "arrivals", "spot", "days", "gpu_cost")}
    return _form(kinds, {tier: _field(given, f"tier.{tier}", "0") for tier in TIERS}, **fields)


def _form(kinds: list[dict[str, str]], tiers: Mapping[str, str], **fields: str) -> Mapping[str, Any]:
    blank = dict.fromkeys(KIND_FIELDS, "")
    rows = [*kinds, *(blank for _ in range(ROWS - len(kinds)))]
    return {"days": "", "gpu_cost": "", **fields, "kinds": rows, "tiers": tiers}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _body(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mix that the form describes; rows without a share are left out."""
    return {
        "jobs_a_day": _number(form["jobs_a_day"], "jobs a day"),
        "arrivals": form["arrivals"],
        "spot": _number(form["spot"] or "0", "spot"),
        "tiers": {tier: _number(share or "0", f"share of tier {tier}") for tier, share in form["tiers"].items()},
        "kinds": [_kind(row, number) for number, row in enumerate(form["kinds"], 1) if row["share"]],
    }


def _kind(row: Mapping[str, str], number: int) -> Mapping[str, Any]:
    by_model = bool(row["model"])
    found: dict[str, Any] = {"name": row["name"] or f"kind {number}"}
    found |= {name: _number(row[name], f"{name} of {found['name']}") for name in ("share", "gpu_hours", "tokens") if row[name]}
    if row["gpus"]:
        found["gpus"] = [_whole(text, f"GPUs of {found['name']}") for text in row["gpus"].split(",")]
    if row["class"] and not by_model:
        found["class"] = row["class"]
    return {**found, "model": row["model"]} if by_model else found


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a number", code="invalid_mix", param="mix") from None


def _whole(text: str, name: str) -> int:
    if not text.strip().isdecimal() or len(text) > 9:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a whole number", code="invalid_mix", param="mix")
    return int(text)


def _charts(plan: CapacityPlan) -> list[tuple[str, Any]]:
    hours = plan.to_dict()["gpus_by_hour"]
    shown = plan.scenarios[-1]
    day = [[(float(hour["hour"]), hour[name]) for hour in hours] for name in ("average", "high")]
    return [
        (
            "GPUs that jobs need by hour of the day: mean, and with one standard deviation (dashed)",
            over_time(day, title="GPUs needed by hour of the day", ends=("0:00", "12:00", "23:00"), limit=shown.num_gpus),
        ),
        *(_simulated(shown.simulated, shown.num_gpus) if shown.simulated else ()),
    ]


def _simulated(shown: Simulated, num_gpus: int) -> list[tuple[str, Any]]:
    busy = shown.busy
    lines = [[(hour, float(used)) for hour, used, _ in busy], [(hour, float(queued)) for hour, _, queued in busy]]
    last = busy[-1][0] / 24
    waits = [(wait.kind or f"all {wait.tier}", wait.p95_s / 60) for wait in shown.waits if wait.kind is None or wait.tier == "premium"]
    return [
        (
            f"Simulated: GPUs in use, and GPUs that waiting jobs request (dashed), on {num_gpus}",
            over_time(lines, title="GPUs in use in the simulation", ends=("day 0", f"day {last / 2:g}", f"day {last:g}"), limit=num_gpus),
        ),
        ("Minutes until 95 % of the jobs start", columns(waits, title="95th percentile of waits in minutes", form="{:,.1f} min")),
    ]
