"""Logical names: shares follow the weights, callers stay, and a withdrawn target leaves no caller without an answer."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters.tables import adapters
from control_plane.jobs.tables import job_events
from control_plane.models import service as models
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from control_plane.serving.model_routes import Target
from control_plane.serving.tables import replica_adapters
from control_plane.tenants import service as tenants
from core.errors import Conflict, FtError, InvalidRequest, NotFound, QuotaExceeded
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.lock_waits import wait_for_a_lock

NUM = 4000


def targets(*weights: int) -> list[Target]:
    return [Target(adapter_id=None, base_model=f"m{i}", weight=w) for i, w in enumerate(weights)]


def draw(found: Sequence[Target]) -> list[str]:
    chosen = (model_routes.choose("bot", found, affinity=f"user:{i}") for i in range(NUM))
    return [c.model for c in chosen]


@pytest.mark.parametrize("weights", [(90, 10), (1, 1), (5, 3, 2), (999_999, 1)])
def test_shares_are_those_of_the_weights(weights: tuple[int, ...]) -> None:
    answers = draw(targets(*weights))
    assert answers == draw(targets(*weights)), "the same caller gets the same target"
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        four_sigma = 4 * math.sqrt(share * (1 - share) / NUM) + 1 / NUM
        assert answers.count(f"m{i}") / NUM == pytest.approx(share, abs=four_sigma)


def test_a_changed_weight_moves_only_the_callers_that_it_must() -> None:
    before, after = draw(targets(90, 10)), draw(targets(80, 20))
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {("m0", "m1")}, "nobody leaves the target that grew"
    share_before, share_after = before.count("m1") / NUM, after.count("m1") / NUM
    assert len(moved) / NUM == pytest.approx(share_after - share_before)
    assert len(moved) / NUM == pytest.approx(0.1, abs=0.03)


def test_callers_of_a_withdrawn_target_fall_to_the_others_and_nobody_else_moves() -> None:
    found = targets(50, 30, 20)
    before = draw(found)
    after = draw([replace(found[0], adapter_id="m0"), *found[1:]])
    assert all(a == b for a, b in zip(before, after, strict=True) if a != "m0")
    assert {b for a, b in zip(before, after, strict=True) if a == "m0"} == {"m1", "m2"}
    only_zero = [replace(found[0], adapter_id="m0"), replace(found[1], weight=0)]
    assert set(draw(only_zero)) == {"m1"}


def test_no_draw_is_one_whose_logarithm_is_zero() -> None:
    assert 0.0 < model_routes._uniform(b"\0" * 32) < model_routes._uniform(b"\xff" * 32) < 1.0


def test_routes_draw_independently_of_each_other() -> None:
    found = targets(50, 50)
    same = [model_routes.choose("a", found, affinity=str(i)) == model_routes.choose("b", found, affinity=str(i)) for i in range(NUM)]
    assert sum(same) / NUM == pytest.approx(0.5, abs=0.05)


@pytest.fixture
def two(platform: Platform) -> tuple[str, str, str]:
    """A tenant and its two adapters in production."""
    tenant = f"t-{uuid.uuid4().hex[:8]}"
    tenants.create(platform, tenant)
    names = [f"ft:tiny-base:{tenant}:bot:{n}" for n in ("one", "two")]
    first, second = (add_adapter(platform, tenant, name=name, stage="production", loaded=True) for name in names)
    return tenant, first, second


def asked(platform: Platform, tenant: str, name: str) -> set[str]:
    return {promotions.resolve_model(platform, tenant, name, affinity=str(i)).model for i in range(30)}


def test_a_route_is_a_model_of_its_tenant_alone(platform: Platform, two: tuple[str, str, str]) -> None:
    tenant, first, _ = two
    made = model_routes.put(platform, tenant, "support", [(first, 3), ("tiny-base", 1)])
    shown = [(t.model, t.adapter_id, t.share, t.stage, t.served) for t in made.targets]
    assert shown == [(f"ft:tiny-base:{tenant}:bot:one", first, 0.75, "production", True), ("tiny-base", None, 0.25, None, True)]
    assert asked(platform, tenant, "support") == {f"ft:tiny-base:{tenant}:bot:one", "tiny-base"}
    assert promotions.resolve_model(platform, tenant, "support", affinity="1") == promotions.resolve_model(
        platform, tenant, "support", affinity="1"
    )
    changed = model_routes.put(platform, tenant, "support", [(f"ft:tiny-base:{tenant}:bot:two", 1)])
    assert changed.created_at == made.created_at
    assert asked(platform, tenant, "support") == {f"ft:tiny-base:{tenant}:bot:two"}
    assert models.get(platform, tenant, "support").base_model == "tiny-base"
    assert "support" in [m.id for m in models.list_models(platform, tenant)]
    tenants.create(platform, stranger := f"s-{uuid.uuid4().hex[:8]}")
    calls: list[Callable[[], object]] = [
        lambda: promotions.resolve_model(platform, stranger, "support"),
        lambda: model_routes.get(platform, stranger, "support"),
        lambda: model_routes.delete(platform, stranger, "support"),
        lambda: model_routes.put(platform, stranger, "theirs", [(first, 1)]),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call()
    assert model_routes.list_routes(platform, stranger) == []
    model_routes.delete(platform, tenant, "support")
    with pytest.raises(NotFound):
        promotions.resolve_model(platform, tenant, "support")


def test_a_withdrawn_target_is_told_and_its_callers_are_answered_by_the_others(platform: Platform, two: tuple[str, str, str]) -> None:
    tenant, first, second = two
    model_routes.put(platform, tenant, "support", [(first, 50), (second, 50)])
    assert len(asked(platform, tenant, "support")) == 2
    promotions.deprecate(platform, tenant, second)
    assert asked(platform, tenant, "support") == {f"ft:tiny-base:{tenant}:bot:one"}
    shown = {t.adapter_id: (t.share, t.stage, t.served) for t in model_routes.get(platform, tenant, "support").targets}
    assert shown == {first: (1.0, "production", True), second: (0.0, "deprecated", False)}
    query = sa.select(job_events.c.level, job_events.c.data).join(adapters, adapters.c.job_id == job_events.c.job_id)
    with platform.engine.connect() as conn:
        (event,) = conn.execute(query.where(adapters.c.id == second, job_events.c.code == "route_target_withdrawn"))
    assert (event.level, event.data["routes"]) == ("warn", ["support"])
    promotions.deprecate(platform, tenant, first)
    with pytest.raises(Conflict, match="no target of route 'support' is in production any more"):
        promotions.resolve_model(platform, tenant, "support")


def test_a_target_that_no_server_has_lets_the_others_answer(platform: Platform, two: tuple[str, str, str]) -> None:
    tenant, first, second = two
    model_routes.put(platform, tenant, "support", [(first, 50), (second, 50)])
    seen = {"replica": "http://one", "adapter_id": second, "observed": "unloaded", "updated_at": platform.clock()}
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(replica_adapters).values(**seen))
    assert asked(platform, tenant, "support") == {f"ft:tiny-base:{tenant}:bot:one"}
    with platform.engine.begin() as conn:
        conn.execute(sa.update(replica_adapters).where(replica_adapters.c.adapter_id == second).values(observed="loaded"))
    assert len(asked(platform, tenant, "support")) == 2


@pytest.mark.parametrize(
    ("name", "given", "error", "says"),
    [
        ("tiny-base", [("tiny-base", 1)], InvalidRequest, "is a base model"),
        ("Support", [("tiny-base", 1)], InvalidRequest, "cannot be a route"),
        ("adp-1", [("tiny-base", 1)], InvalidRequest, "cannot be a route"),
        ("a" * 65, [("tiny-base", 1)], InvalidRequest, "cannot be a route"),
        ("bot", [], InvalidRequest, "0 targets"),
        ("bot", [("tiny-base", 1), ("tiny-base", 2)], InvalidRequest, "named twice"),
        ("bot", [("tiny-base", 0)], InvalidRequest, "every target has weight 0"),
        ("bot", [("tiny-base", -1)], InvalidRequest, "weight -1 of tiny-base is outside"),
        ("bot", [("adp-unknown", 1)], NotFound, "no adapter"),
        ("bot", [("DRAFT", 1)], Conflict, "is in draft; only adapters in production"),
    ],
)
def test_what_cannot_be_a_route_is_refused(
    platform: Platform, two: tuple[str, str, str], name: str, given: list[tuple[str, int]], error: type[FtError], says: str
) -> None:
    tenant = two[0]
    draft = add_adapter(platform, tenant, name=f"ft:tiny-base:{tenant}:bot:draft", stage="draft", loaded=False)
    with pytest.raises(error, match=says):
        model_routes.put(platform, tenant, name, [(draft if model == "DRAFT" else model, weight) for model, weight in given])
    assert model_routes.list_routes(platform, tenant) == []


def test_a_tenant_has_a_limited_number_of_routes_and_changes_those_it_has(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "MAX_ROUTES", 2)
    tenants.create(platform, tenant := f"t-{uuid.uuid4().hex[:8]}")
    for name in ("one", "two", "two"):
        model_routes.put(platform, tenant, name, [("tiny-base", 1)])
    with pytest.raises(QuotaExceeded, match="the tenant has 2 routes, and the limit is 2"):
        model_routes.put(platform, tenant, "three", [("tiny-base", 1)])


def test_two_routes_that_are_made_at_once_do_not_pass_the_limit(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "MAX_ROUTES", 1)
    tenants.create(platform, tenant := f"t-{uuid.uuid4().hex[:8]}")
    second = list[Future[model_routes.Route]]()

    def begun(_conn: object, _cursor: object, statement: str, *_: object) -> None:  # by the first call, before it writes
        if statement.startswith("INSERT INTO model_routes") and not second:
            second.append(pool.submit(model_routes.put, platform, tenant, "two", [("tiny-base", 1)]))
            wait_for_a_lock(platform)

    sa.event.listen(platform.engine, "before_cursor_execute", begun)
    try:
        with ThreadPoolExecutor(1) as pool:
            model_routes.put(platform, tenant, "one", [("tiny-base", 1)])
    finally:
        sa.event.remove(platform.engine, "before_cursor_execute", begun)
    with pytest.raises(QuotaExceeded):
        second[0].result()
    assert [route.name for route in model_routes.list_routes(platform, tenant)] == ["one"]
