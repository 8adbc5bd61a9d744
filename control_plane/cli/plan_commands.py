"""``ft admin plan``: GPUs, storage, waits, cost, price and margin of a mix of jobs. It uses no database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.capacity_commands import columns
from control_plane.platform.settings import Settings
from core.epoch_time import span_words
from core.errors import InvalidRequest
from ft_client.cli.commands import Commands
from ft_client.cli.output import number

if TYPE_CHECKING:
    from control_plane.planning.job_mix import JobMix

TIB, MICROS = 1024, 1_000_000
NUMBERS = ("share", "gpu_hours", "tokens", "epochs", "dataset_gib")
"""Fields of a kind that are numbers; ``gpus`` may be several, as 1/2/4, and ``tiers`` are as premium:10/standard:90."""


def register(admin: typer.Typer) -> None:
    admin.command("plan")(plan)


@contextmanager
def _settings() -> Iterator[Settings]:
    from deploy.local.lifecycle import load_settings

    yield load_settings()


def _show(found: Mapping[str, Any]) -> None:
    print("\n".join(lines(found)))


@Commands(opened=_settings)(_show)
def plan(
    settings: Settings,
    mix: Annotated[Path | None, typer.Argument(metavar="MIX", help="YAML or JSON file with the mix. Default: the planned mix.")] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="FIELD=VALUE,...", help="A kind of job instead of MIX: name=small,share=70,gpu_hours=0.5,gpus=1. Repeat it."
        ),
    ] = None,
    jobs_a_day: Annotated[float | None, typer.Option("--jobs-a-day", help="Instead of the mix's.")] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", help="working_hours, even, or 24 hourly rates with commas, instead of the mix's.")
    ] = None,
    pools: Annotated[
        Path | None,
        typer.Option(
            "--pools",
            help="YAML file with the pools. Default: FT_POOLS, else this machine, or deploy/pools.yaml for a mix that it cannot hold.",
        ),
    ] = None,
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="POOL=N,...", help="Also simulate these pools with N GPUs. Repeat it to compare several."),
    ] = None,
    gpu_cost: Annotated[
        float | None, typer.Option("--gpu-cost", help="US dollars that an hour of a GPU costs you. Default: half of its on-demand price.")
    ] = None,
    days: Annotated[
        float | None, typer.Option("--days", help="Days to simulate. Default: 28, or as many as have at most 40,000 jobs.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the simulated submissions.")] = 1,
) -> Any:
    """Plan capacity: GPUs per pool on average and at peak, storage, waits by simulation, cost, price and margin."""
    from control_plane.planning import service
    from control_plane.platform.context import utc_now

    found = service.plan(
        settings if pools is None else replace(settings, pools_file=pools), _mix(mix, kinds, jobs_a_day=jobs_a_day, arrivals=arrivals),
        at=utc_now(), layouts=[parse_layout(one) for one in gpus or ()], gpu_usd_per_hour=gpu_cost, days=days, seed=seed,
    )  # fmt: skip
    return found.to_dict()


def _mix(path: Path | None, kinds: Sequence[str] | None, *, jobs_a_day: float | None, arrivals: str | None) -> JobMix:
    from control_plane.planning import job_mix

    if kinds and path is not None:
        raise InvalidRequest("MIX and --kind are both given; describe the kinds in one of them", code="invalid_mix", param="mix")
    base = job_mix.read(path)
    given: dict[str, Any] = {"jobs_a_day": jobs_a_day, "arrivals": arrivals if arrivals is None else _arrivals(arrivals)}
    if kinds:
        given["kinds"] = [parse_kind(one, number=at) for at, one in enumerate(kinds, 1)]
    changed = {name: value for name, value in given.items() if value is not None}
    return job_mix.parse({**base, **changed} if isinstance(base, dict) else base, origin=str(path or "mix"))


def _arrivals(text: str) -> str | list[float]:
    return [_number(rate, "--arrivals") for rate in text.split(",")] if "," in text else text


def parse_kind(text: str, *, number: int) -> dict[str, Any]:
    """Return the fields of one ``--kind``; a name that is left out is ``kind-1``, ``kind-2``, ..."""
    found: dict[str, Any] = {"name": f"kind-{number}"}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise InvalidRequest(f"--kind {text!r}: write FIELD=VALUE with commas between", code="invalid_mix", param="kind")
        if name == "gpus":
            found[name] = [int(width) if width.isdecimal() else width for width in value.split("/")]
        elif name == "tiers":
            shares = (one.partition(":") for one in value.split("/"))
            found[name] = {tier: _number(share, "--kind tiers") for tier, _, share in shares}
        else:
            found[name] = _number(value, f"--kind {name}") if name in NUMBERS else value
    return found


def parse_layout(text: str) -> dict[str, int]:
    """Return GPUs by pool of one ``--gpus``."""
    found = {}
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value.isdecimal():
            raise InvalidRequest(f"--gpus {text!r}: write POOL=N, with commas between", code="invalid_plan", param="gpus")
        found[name] = int(value)
    return found


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{option}: {text!r} is not a number", code="invalid_mix", param="mix") from None


def lines(found: Mapping[str, Any]) -> list[str]:
    """Format a plan."""
    stored = found["storage"]
    written = [
        f"{found['jobs_a_day']:,.6g} jobs a day, {found['gpu_hours_a_job']:,.2f} GPU-hours each: {found['gpu_hours_a_day']:,.0f} GPU-hours "
        f"a day, {found['average_gpus']:,.0f} GPUs on average, {found['peak_gpus']:,.0f} at peak",
        f"storage: {_size(stored['after_month_gib'])} after a month, {_size(stored['after_year_gib'])} after a year without deletions, "
        f"{_size(stored['checkpoints_gib'])} of it checkpoints",
        "",
    ]
    kinds = [
        (k["name"], f"{100 * k['share']:.4g} %", k["job_class"], "/".join(map(str, k["gpus"])),
         number(k["gpu_hours"]), ", ".join(f"{tier} {share * 100:.4g} %" for tier, share in k["tiers"].items()))
        for k in found["kinds"]
    ]  # fmt: skip
    written += columns(("KIND", "SHARE", "CLASS", "GPUS", "GPU-HOURS", "TIERS"), kinds)
    pools = [
        (p["name"], p["gpu_type"], f"{p['average_gpus']:,.0f}", f"{p['peak_gpus']:,.0f}", f"{p['gpus']:,}", ", ".join(p["kinds"]))
        for p in found["pools"]
    ]
    written += columns(("POOL", "TYPE", "AVERAGE", "PEAK", "HAS", "KINDS"), pools)
    for scenario in found["scenarios"]:
        written += _scenario(scenario)
    return [*written, *(f"- {one}" for one in found["assumptions"])]


def _scenario(scenario: Mapping[str, Any]) -> list[str]:
    ran, money = scenario["simulated"], scenario["money"]
    gpus = ", ".join(f"{pool} {count:,}" for pool, count in scenario["gpus"].items())
    waits = [
        (w["tier"] if w["kind"] is None else "", w["kind"] or "all", f"{w['jobs']:,}", _wait(w["p50_s"]), _wait(w["p95_s"]),
         _wait(w["max_s"]), "" if w["promised_s"] is None else f"{w['within'] * 100:.1f} % in {span_words(w['promised_s'])}")
        for w in (ran["waits"] if ran else ())
    ]  # fmt: skip
    margin = "" if money["margin"] is None else f" ({money['margin'] * 100:.1f} %)"
    use = (
        "no waits"
        if ran is None
        else (f"{ran['utilisation'] * 100:.0f} % in use, {ran['preemptions']:,} preemptions, at most {ran['most_preemptions']} of one job")
    )
    return [
        f"{scenario['num_gpus']:,} GPUs ({gpus}): {use}",
        *([f"not simulated: {scenario['without_waits']}"] if ran is None else []),
        *([] if ran is None or ran["complete"] else [_stopped(ran)]),
        f"month: cost {_usd(money['cost_micros'])} ({_usd(money['gpu_cost_micros'])} of it GPUs), price {_usd(money['price_micros'])}, "
        f"margin {_usd(money['margin_micros'])}{margin}",
        *(columns(("TIER", "KIND", "JOBS", "P50 WAIT", "P95 WAIT", "LONGEST", "STARTS IN TIME"), waits) if waits else []),
    ]


def _stopped(ran: Mapping[str, Any]) -> str:
    return (
        f"the simulation stopped at its limit of work: {ran['days']:.1f} days are counted, and the {ran['not_started']:,} jobs that had "
        "not started count as if they had then; real waits are longer"
    )


def _wait(seconds: float) -> str:
    return span_words(seconds) if seconds >= 1.0 else "none"


def _size(gib: float) -> str:
    return f"{gib / TIB:,.1f} TiB" if gib >= TIB else f"{gib:,.0f} GiB"


def _usd(micros: int) -> str:
    return f"{'-' if micros < 0 else ''}{abs(micros) / MICROS:,.0f} USD"
