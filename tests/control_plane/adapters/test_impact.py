"""What a promotion, rollback or deprecation would change is what it then changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from control_plane.adapters import promotions
from control_plane.adapters.impact import Change, Impact, impact, possible, standing
from control_plane.adapters.service import set_stage
from control_plane.serving import model_routes
from core.errors import Conflict
from engine.adapters.stages import DEPRECATION_GRACE, Stage
from tests.support.jobs.followed_jobs import until
from tests.support.platform.fleet_in_memory import Place
from tests.support.platform.lock_waits import num_waiting


def of(place: Place, adapter: str, change: Change) -> Impact:
    return impact(standing(place.platform, place.tenant, adapter), change, at=place.clock.now)


def shares(found: Impact) -> dict[str, list[tuple[str, float, float]]]:
    """Targets of each route, by the last part of their names."""
    return {route.name: [(one.model.rpartition(":")[2], one.before, one.after) for one in route.shares] for route in found.routes}


def answers(place: Place, name: str) -> str:
    """Last part of the name of the model that answers now; why none does, otherwise."""
    try:
        return promotions.resolve_model(place.platform, place.tenant, name).model.rpartition(":")[2]
    except Conflict as refusal:
        return refusal.code


def served(place: Place, *numbers: str) -> list[str]:
    """Adapters in production and loaded, oldest first."""
    made = [place.adapter(number) for number in numbers]
    place.in_production(*made)
    for one in made:
        place.desire(one)
    place.round()
    return made


def test_a_promotion_takes_the_name_and_no_share_of_a_route(place: Place) -> None:
    (old,) = served(place, "a")
    new = place.adapter("b")
    model_routes.put(place.platform, place.tenant, "bot", [(old, 9), ("tiny-base", 1)])
    found = of(place, new, Change.PROMOTE)
    assert (found.before and found.before.id, found.after and found.after.id, found.stops) == (old, new, False)
    assert shares(found) == {"bot": [("a", 0.9, 0.9), ("tiny-base", 0.1, 0.1)]}
    assert [route.changes for route in found.routes] == [False]
    assert found.files_until is None
    place.in_production(new)
    place.desire(new)
    place.round()
    assert answers(place, found.logical) == "b"
    assert answers(place, "bot") in ("a", "tiny-base")


def test_a_deprecation_moves_callers_of_routes_to_the_other_targets(place: Place) -> None:
    one, two = served(place, "a", "b")
    model_routes.put(place.platform, place.tenant, "bot", [(one, 3), (two, 1), ("tiny-base", 1)])
    model_routes.put(place.platform, place.tenant, "only", [(two, 1)])
    found = of(place, two, Change.DEPRECATE)
    assert (found.before and found.before.id, found.after and found.after.id, found.stops) == (two, one, True)
    assert shares(found) == {"bot": [("a", 0.6, 0.75), ("b", 0.2, 0.0), ("tiny-base", 0.2, 0.25)], "only": [("b", 1.0, 0.0)]}
    assert [route.fails for route in found.routes] == [False, True]
    assert found.files_until == place.clock.now + DEPRECATION_GRACE
    promotions.deprecate(place.platform, place.tenant, two)
    assert (answers(place, found.logical), answers(place, "only")) == ("a", "model_not_served")
    now = model_routes.get(place.platform, place.tenant, "bot")
    assert [target.share for target in now.targets] == [0.75, 0.0, 0.25]


def test_a_rollback_goes_back_to_the_version_before(place: Place) -> None:
    one, two = served(place, "a", "b")
    found = of(place, two, Change.ROLL_BACK)
    assert (found.before and found.before.id, found.after and found.after.id) == (two, one)
    assert promotions.rollback(place.platform, place.tenant, two).serving.id == one
    assert answers(place, found.logical) == "a"


def test_a_rollback_whose_predecessor_is_deprecated_meanwhile_goes_to_the_one_before(place: Place) -> None:
    one, two, three = served(place, "a", "b", "c")
    with ThreadPoolExecutor() as others, place.platform.engine.connect() as deprecating:
        set_stage(deprecating, two, Stage.DEPRECATED, deprecated_at=place.clock.now)  # and holds its row
        done = others.submit(promotions.rollback, place.platform, place.tenant, three)
        until(lambda: num_waiting(place.platform))
        deprecating.commit()
        assert done.result(timeout=60).serving.id == one


def test_the_last_version_leaves_nothing_that_answers(place: Place) -> None:
    (only,) = served(place, "a")
    found = of(place, only, Change.DEPRECATE)
    assert (found.before and found.before.id, found.after) == (only, None)
    promotions.deprecate(place.platform, place.tenant, only)
    with pytest.raises(Exception, match="does not exist"):
        answers(place, found.logical)


def test_a_withdrawn_target_gets_its_share_back_when_it_is_promoted(place: Place) -> None:
    one, two = served(place, "a", "b")
    model_routes.put(place.platform, place.tenant, "bot", [(one, 1), (two, 1)])
    promotions.deprecate(place.platform, place.tenant, one)
    assert shares(of(place, one, Change.PROMOTE)) == {"bot": [("a", 0.0, 0.5), ("b", 1.0, 0.5)]}


def test_only_changes_that_would_be_accepted_are_offered(place: Place) -> None:
    draft, (one, two) = place.adapter("d"), served(place, "a", "b")
    found = {name: possible(standing(place.platform, place.tenant, id_)) for name, id_ in (("d", draft), ("a", one), ("b", two))}
    assert found == {
        "d": [Change.PROMOTE, Change.DEPRECATE],
        "a": [Change.DEPRECATE],  # the first one has nothing to go back to
        "b": [Change.ROLL_BACK, Change.DEPRECATE],
    }
    promotions.deprecate(place.platform, place.tenant, two)
    assert possible(standing(place.platform, place.tenant, two)) == [Change.PROMOTE]


def test_a_server_that_lost_the_newest_version_leaves_the_name_to_the_one_before(place: Place) -> None:
    one, two = served(place, "a", "b")
    for server in place.servers.at.values():
        server.adapters = {name: where for name, where in server.adapters.items() if not name.endswith(":b")}
        server.refuse = Conflict("no room", code="no_room")
    place.clock.now += timedelta(minutes=1)
    place.round()
    now = standing(place.platform, place.tenant, two)
    assert now.answering is not None
    assert answers(place, now.logical) == now.answering.name.rpartition(":")[2]
    assert {one, two} == {version.id for version in now.production}
