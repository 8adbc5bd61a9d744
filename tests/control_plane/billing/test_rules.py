"""Entries and their two sides."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.billing.rules import ACCOUNTS, Entry, postings

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with something else."""


@PATIENT
@given(kind=st.sampled_from(sorted(ACCOUNTS)), amount=st.integers(-(10**15), 10**15))
def test_debits_and_credits_of_an_entry_are_equal_and_its_receivable_is_its_amount(kind: str, amount: int) -> None:
    entry = Entry(id="e", kind=kind, amount_micros=amount, list_micros=amount, occurred_at=datetime(2026, 1, 1, tzinfo=UTC), detail={})
    sides = postings("acme", entry)
    assert len(sides) == 2
    assert sum(sides.values()) == 0
    assert sides["receivable/acme"] == amount
