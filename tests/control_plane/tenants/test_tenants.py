"""Tiers, and what a principal may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.tenants.rules import TIERS, Principal, Role, Scope, role_named, within
from core.errors import Forbidden, InvalidRequest
from tests.support.platform.plain_tenant import a_tenant

ACME = a_tenant()
DOCS = Path(__file__).parents[3] / "docs"


def test_a_higher_tier_never_allows_less() -> None:
    free, standard, premium = TIERS.values()
    for lower, higher in ((free, standard), (standard, premium)):
        assert lower.max_jobs_in_flight <= higher.max_jobs_in_flight
        assert lower.max_file_bytes <= higher.max_file_bytes
        assert lower.may_train_full <= higher.may_train_full


def test_the_documented_limits_are_those_of_the_tiers() -> None:
    def shown(number: float | None, none: str) -> str:
        return none if number is None else f"{number:,.0f}"

    quotas, tenancy = ((DOCS / name).read_text() for name in ("quotas.md", "tenancy.md"))
    for row, none, numbers in (
        ("jobs in flight", "", [t.max_jobs_in_flight for t in TIERS.values()]),
        ("soft limit, GPU-hours per month", "none", [t.soft_gpu_hours for t in TIERS.values()]),
        ("hard cap, GPU-hours per month", "none", [t.hard_gpu_hours for t in TIERS.values()]),
    ):
        assert f"| {row} | {' | '.join(shown(n, none) for n in numbers)} |" in quotas
    gib, million = 1 << 30, 1_000_000
    assert f"| one file | {' | '.join(f'{t.max_file_bytes / gib:g} GiB' for t in TIERS.values())} |" in quotas
    assert f"| rows per dataset | {' | '.join(f'{t.max_examples / million:g} M' for t in TIERS.values())} |" in quotas
    assert f"({', '.join(f'{t.name} {t.requests_per_minute:,}' for t in TIERS.values())};" in tenancy


@pytest.mark.parametrize("held", list(Scope))
@pytest.mark.parametrize("needed", list(Scope))
def test_a_scope_includes_those_before_it(held: Scope, needed: Scope) -> None:
    principal = Principal(tenant=ACME, id="key_1", scopes=frozenset({held}))
    order = list(Scope)
    if order.index(held) >= order.index(needed):
        principal.require(needed)
    else:
        with pytest.raises(Forbidden, match=f"needs the scope {needed}"):
            principal.require(needed)


def test_a_key_without_scopes_opens_nothing() -> None:
    with pytest.raises(Forbidden, match="holds: none"):
        Principal(tenant=ACME, id="key_1", scopes=frozenset()).require(Scope.READ)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("role", list(Role))
def test_a_role_narrows_a_scope_and_never_widens_it(role: Role, scope: Scope) -> None:
    order = list(Scope)
    (left,) = within(frozenset({scope}), role.scope)
    assert order.index(left) == min(order.index(scope), order.index(role.scope))


def test_only_owners_and_the_tenants_own_keys_name_owners() -> None:
    def named(role: Role | None, names_owners: bool) -> bool:
        held = frozenset({Scope.ADMIN})
        return Principal(tenant=ACME, id="key_1", scopes=held, role=role, names_owners=names_owners).may_name_owners

    assert {role for role in (None, *Role) if named(role, True)} == {None, Role.OWNER}
    assert {role for role in (None, *Role) if named(role, False)} == {Role.OWNER}, "nor one that an admin made"


def test_an_unknown_role_is_told_the_roles() -> None:
    with pytest.raises(InvalidRequest, match="owner, admin, member, viewer"):
        role_named("root")
