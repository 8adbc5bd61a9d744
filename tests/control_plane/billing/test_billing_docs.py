"""docs/billing.md says what the code does: its example is recomputed, its tables are held against prices and failure classes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from control_plane.billing import prices
from control_plane.billing.metering.rules import SEEN, Interval, bill
from control_plane.billing.prices import GIB, MICROS
from core.base_models import CHANGED
from core.errors import Fault
from engine.scheduler.pools import Pricing
from engine.training.failures import Outcome
from tests.support.jobs.failure_classes import CLASSES

TEXT = (Path(__file__).resolve().parents[3] / "docs/billing.md").read_text()
BOOK = prices.load()


def rows(header: str) -> list[list[str]]:
    """Cells of the table whose header begins so."""
    lines = TEXT.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {header}"))
    found = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return found


def test_the_worked_example_is_what_the_code_computes() -> None:
    at = datetime(2026, 3, 10, tzinfo=UTC)
    totals = {"usage": 0, "refund": 0}
    for attempt, num_gpus, pricing, ms, outcome, fault, usage, refund in rows("attempt"):
        entries = bill(
            Interval(
                job_id="j", attempt=int(attempt), started_at=at, ended_at=at + timedelta(milliseconds=int(ms)), tier="standard",
                gpu_type="h100-80gb", num_gpus=int(num_gpus), pricing=cast(Pricing, pricing), outcome=outcome,
                fault=None if fault == "-" else Fault(fault), source=SEEN,
            ),
            BOOK,
        )  # fmt: skip
        found = {entry.kind: entry.amount_micros for entry in entries}
        assert (found["usage"], found.get("refund", 0)) == (int(usage), int(refund))
        totals = {kind: total + found.get(kind, 0) for kind, total in totals.items()}
    day = BOOK.at(at).storage_micros_per_day(tier="standard", stored_bytes=80 * GIB, days_in_month=31)
    ((said_usage, said_refunds, said_storage, owed),) = rows("total of usage")
    assert (totals["usage"], totals["refund"], day) == (int(said_usage), int(said_refunds), int(said_storage))
    assert totals["usage"] + totals["refund"] + day == int(owed)
    granted = totals["usage"] + totals["refund"] + day - 32_000_000
    assert f"granted, {granted} are owed" in TEXT


def test_the_table_of_refunds_is_that_of_the_failure_classes() -> None:
    said = {row[0]: (row[1], row[2]) for row in rows("ended as")}
    made = {failure.code: failure.fault for failure in CLASSES} | {CHANGED: Fault.PLATFORM}
    assert set(said) == {*made, "succeeded"}
    for code, fault in made.items():
        assert said[code][0].endswith(fault), code
        paid = "its work that is kept" if code == Outcome.PREEMPTED else "nothing" if fault is Fault.PLATFORM else "all of it"
        assert said[code][1].startswith(paid), code


def test_the_prices_in_the_text_are_those_of_the_list() -> None:
    held = BOOK.lists[-1]
    assert f"of {held.valid_from}" in TEXT
    listed = {row[0].split("`")[0]: [float(v) * MICROS for v in row[1:4]] for row in rows("of 2026")}
    assert listed == {name: [gpu.on_demand, gpu.spot, gpu.reserved] for name, gpu in held.gpus.items()}
    tiers = {row[0]: row[1:] for row in rows("tier |")}
    assert tiers == {
        name: [f"{t.gpu_percent} %", f"{t.storage_percent} %", f"{t.storage_allowance_bytes // GIB} GiB"] for name, t in held.tiers.items()
    }
    assert f"{held.storage.micros_per_gib_month / MICROS} USD" in TEXT


@pytest.mark.parametrize("command", ["ft usage", "ft cost", "ft invoice", "ft budgets", "ft admin refunds list", "ft admin ledger check"])
def test_the_commands_that_it_names_are_there(command: str) -> None:
    from typer.testing import CliRunner

    from ft_client.cli.command_tree import build

    assert CliRunner().invoke(build(), [*command.split()[1:], "--help"]).exit_code == 0
    assert command in TEXT
