"""Admission, as a table of cases."""

from __future__ import annotations

import pytest

from control_plane.quotas import Ask, Usage, admit
from control_plane.tenants import Tenant
from ft_assets.errors import InvalidRequest
from tests.a_tenant import a_tenant


def tenant(tier: str, limit: int = 5) -> Tenant:
    return a_tenant(tier, max_jobs_in_flight=limit)


@pytest.mark.parametrize(
    ("tier", "in_flight", "ask", "code"),
    [
        ("standard", 0, Ask(tier="standard"), None),
        ("standard", 4, Ask(tier="standard"), None),
        ("standard", 5, Ask(tier="standard"), "exceeded_quota"),
        ("standard", 6, Ask(tier="standard"), "exceeded_quota"),
        ("standard", 0, Ask(tier="free"), None),
        ("standard", 0, Ask(tier="premium"), "tier_not_allowed"),
        ("premium", 0, Ask(tier="premium", full_parameters=True), None),
        ("premium", 0, Ask(tier="standard", full_parameters=True), "tier_not_allowed"),
        ("premium", 5, Ask(tier="premium", full_parameters=True), "exceeded_quota"),
        ("standard", 5, Ask(tier="premium"), "tier_not_allowed"),
        ("standard", 0, Ask(tier="standard", num_parameters=70_600_000_000), "tier_not_allowed"),
        ("standard", 0, Ask(tier="standard", num_parameters=32_800_000_000), None),
        ("premium", 0, Ask(tier="premium", num_parameters=70_600_000_000), None),
        ("premium", 0, Ask(tier="free", num_parameters=70_600_000_000), "tier_not_allowed"),
    ],
)
def test_a_job_is_admitted_or_refused_by_the_first_rule_that_it_breaks(tier: str, in_flight: int, ask: Ask, code: str | None) -> None:
    refusal = admit(tenant(tier), Usage(jobs_in_flight=in_flight), ask)
    assert (refusal.code if refusal else None) == code


def test_a_refusal_names_the_value_the_limit_and_the_next_step() -> None:
    refusal = admit(tenant("standard", 2), Usage(jobs_in_flight=2), Ask(tier="standard"))
    assert refusal is not None
    assert "2 jobs are in flight" in refusal.detail
    assert "limit of tenant acme is 2" in refusal.detail
    assert "cancel one" in refusal.detail


def test_a_limit_of_none_admits_nothing() -> None:
    assert admit(tenant("free", 0), Usage(jobs_in_flight=0), Ask(tier="free")) is not None


def test_an_unknown_tier_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="free, standard, premium"):
        admit(tenant("standard"), Usage(jobs_in_flight=0), Ask(tier="gold"))
