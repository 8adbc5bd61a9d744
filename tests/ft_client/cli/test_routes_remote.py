"""``ft routes`` against the real API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from control_plane.adapters import promotions
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from tests.support.jobs.registered_adapter import add_adapter

Ft = Callable[..., Any]


@pytest.fixture
def names(platform: Platform, tenant: Tenant) -> list[str]:
    """Two adapters in production."""
    found = [f"ft:tiny-base:{tenant.id}:bot:{n}" for n in ("one", "two")]
    for name in found:
        add_adapter(platform, tenant.id, name=name, stage="production", loaded=True)
    return found


def test_a_route_is_set_shown_listed_and_deleted(ft: Ft, platform: Platform, tenant: Tenant, names: list[str]) -> None:
    one, two = names
    shown = ft("routes", "set", "support", f"{one}=90", f"{two}=10")
    assert shown.code == 0
    assert [line.split("\t") for line in shown.out.splitlines()[-2:]] == [
        [one, "90", "90.0 %", "production", "yes"], [two, "10", "10.0 %", "production", "yes"],
    ]  # fmt: skip
    assert f"support\t{one}=90, {two}=10" in ft("routes").out
    promotions.deprecate(platform, tenant.id, two)
    shown = ft("routes", "show", "support")
    assert f"{two}\t10\t0.0 %\tdeprecated\tno" in shown.out
    assert "the others get its share" in shown.out + shown.err
    told = ft("routes", "show", "support", "--json").json
    assert [(t["model"], t["share"]) for t in told["targets"]] == [(one, 1.0), (two, 0.0)]
    assert ft("routes", "delete", "support").code == 0
    assert "route_not_found" in ft("routes", "show", "support").err


def test_a_target_without_a_weight_gets_all_there_is_and_nonsense_is_named(ft: Ft, names: list[str]) -> None:
    told = ft("routes", "set", "bot", names[0], "--json").json
    assert [(t["weight"], t["share"]) for t in told["targets"]] == [(1, 1.0)]
    for given, says in ([f"{names[0]}=ten"], "is not MODEL=WEIGHT"), ([names[0], f"{names[0]}=2"], "named twice"):
        refused = ft("routes", "set", "bot", *given)
        assert (refused.code != 0, says in refused.err, "invalid_route" in refused.err) == (True, True, True)
