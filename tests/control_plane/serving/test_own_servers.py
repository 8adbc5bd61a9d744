"""Whole models follow the desired state as adapters do, each on a server that is started for it and stopped after it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.platform.context import Actor
from control_plane.serving import model_routes, own_servers, rollout
from control_plane.serving.routes import _target
from control_plane.tenant_data.erasure import Servers as AskedServers
from control_plane.tenant_data.erasure import served_by
from core.errors import Conflict
from tests.support.platform.fleet_in_memory import ONE, TWO, OwnServers, Place


@pytest.fixture
def own(place: Place) -> OwnServers:
    """Starts servers for the place's whole models."""
    made = OwnServers(place.servers)
    place.platform = replace(place.platform, servers=made)
    return made


def test_a_whole_model_is_served_by_a_server_of_its_own_and_by_no_other(place: Place, own: OwnServers) -> None:
    whole, adapter = place.whole_model("w"), place.adapter("a")
    place.desire(whole)
    place.desire(adapter)
    assert sorted(place.round()) == [f"http://{whole} probe", f"{ONE} load", f"{TWO} load"]
    assert (place.state(whole), place.seen(whole)) == (("loaded", None), {f"http://{whole}": "loaded"})
    assert (place.state(adapter), place.seen(adapter)) == (("loaded", None), {ONE: "loaded", TWO: "loaded"})
    assert place.servers.at[f"http://{whole}"].told == ["probe w"], "no adapter is loaded there, and it is not loaded elsewhere"
    assert place.round() == []


def test_a_server_that_starts_gets_no_requests_and_its_model_says_why(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    own.problem = "Unschedulable: 0/8 nodes are available"
    place.desire(whole)
    assert place.round() == []
    assert place.state(whole) == ("unloaded", f"on 0 of 1 inference servers; http://{whole}: {own.problem}")
    assert place.seen(whole) == {}
    own.problem = None
    place.servers.at[f"http://{whole}"].up = True
    assert place.round() == [f"http://{whole} probe"]
    assert place.state(whole) == ("loaded", None)


def test_a_server_that_was_lost_gets_no_requests_until_it_was_seen_to_answer_again(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    place.round()
    server = place.servers.at[f"http://{whole}"]
    server.up = False
    assert place.round() == []
    assert (place.state(whole)[0], place.seen(whole)) == ("unloaded", {f"http://{whole}": "unloaded"})
    server.up = True
    assert place.round() == [f"http://{whole} probe"]
    assert place.state(whole) == ("loaded", None)


def test_a_withdrawn_model_is_drained_before_its_server_is_stopped(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    place.round()
    place.clock.now += timedelta(days=40)
    place.desire(whole, "unloaded")
    assert (place.round(), own.kept[-1]) == ([], [whole])
    assert place.state(whole) == ("loaded", "requests under way are drained first")
    place.clock.now += timedelta(seconds=6)
    assert place.round() == [f"http://{whole} unload"]
    assert (place.state(whole), own.kept[-1]) == (("unloaded", None), [whole])
    assert (place.round(), own.kept[-1]) == ([], [])
    assert f"http://{whole}" not in place.servers.at
    place.desire(whole)
    assert place.round() == [f"http://{whole} probe"], "promoted again, it gets a new one"


def test_a_refused_server_is_not_asked_for_again_until_the_next_promotion(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    own.problem, own.refused = "600 GiB do not fit on 8 x h100-80gb", True
    place.desire(whole)
    for _ in range(3):
        assert place.round() == []
        assert place.state(whole) == ("failed", own.problem)
    assert own.kept == [[whole], [], []]
    own.problem, own.refused = None, False
    place.desire(whole)
    assert place.round() == [f"http://{whole} probe"]
    assert place.state(whole) == ("loaded", None)


def test_a_server_that_refuses_to_answer_is_stopped_and_says_why(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    broken = own.started(whole, adapters.get_adapter(place.platform, place.tenant, whole).name)
    broken.refuse = Conflict("no chat template", code="adapter_refused")
    place.round()
    for _ in range(2):
        observed, detail = place.state(whole)
        assert observed == "failed" and "no chat template" in str(detail)
        place.round()
    assert own.kept[-1] == [] and f"http://{whole}" not in place.servers.at


def test_whole_models_are_served_on_while_what_runs_their_servers_does_not_answer(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    place.round()
    own.away = True
    assert place.round() == []
    assert (place.state(whole), place.seen(whole)) == (("loaded", None), {f"http://{whole}": "loaded"})
    place.servers.at[f"http://{whole}"].up = False
    place.round()
    assert place.seen(whole) == {f"http://{whole}": "unloaded"}, "what does not answer gets no requests all the same"


def test_requests_go_to_the_server_of_the_model_by_name_lineage_and_route(place: Place, own: OwnServers) -> None:
    first, second, adapter = place.whole_model("a"), place.whole_model("b"), place.adapter("c", lineage="other")
    place.in_production(first, second, adapter)
    for made in (first, second, adapter):
        place.desire(made)
    place.round()
    lineage = f"ft:tiny-base:{place.tenant}:bot"
    targets = {name: _target(place.platform, place.tenant, name, "") for name in (f"{lineage}:a", lineage, second)}
    assert {name: list(t.servers) for name, t in targets.items()} == {
        f"{lineage}:a": [f"http://{first}"], lineage: [f"http://{second}"], second: [f"http://{second}"],
    }  # fmt: skip
    model_routes.put(place.platform, place.tenant, "mixed", [(second, 50), (adapter, 50)])
    callers = [_target(place.platform, place.tenant, "mixed", f"caller {n}").headers["x-ft-adapter"] for n in range(200)]
    assert set(callers) == {second, adapter} and 60 < callers.count(second) < 140
    promotions.rollback(place.platform, place.tenant, second)
    assert _target(place.platform, place.tenant, lineage, "").model == f"{lineage}:a"
    answered = {_target(place.platform, place.tenant, "mixed", f"caller {n}").headers["x-ft-adapter"] for n in range(200)}
    assert answered == {adapter}, "the withdrawn target's callers go to the other"
    promotions.deprecate(place.platform, place.tenant, first)
    with pytest.raises(Conflict, match="is deprecated and not served"):
        _target(place.platform, place.tenant, first, "")


def test_a_rollback_to_a_whole_model_whose_server_is_gone_changes_nothing(place: Place, own: OwnServers) -> None:
    first, second = place.whole_model("a"), place.whole_model("b")
    place.in_production(first, second)
    place.desire(first)
    place.desire(second)
    place.round()
    place.servers.at[f"http://{first}"].up = False
    place.round()
    with pytest.raises(Conflict, match="no server can serve") as refused:
        promotions.rollback(place.platform, place.tenant, second)
    assert refused.value.code == "previous_not_served"
    assert adapters.get_adapter(place.platform, place.tenant, second).stage == "production"


def test_files_are_needed_while_a_server_may_answer_with_them(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    place.round()
    place.desire(whole, "unloaded")
    place.clock.now += timedelta(seconds=6)
    assert needed(place, whole) and place.round() == [f"http://{whole} unload"]
    own.ends = False
    for _ in range(2):
        place.round()
        assert needed(place, whole) == f"the server of model {whole} has not ended yet"
    own.ends = True
    place.round()
    assert needed(place, whole) is None


def test_a_server_that_was_asked_for_and_never_loaded_its_model_needs_the_files_too(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    own.problem, own.ends = "it reads its weights", False
    place.desire(whole)
    place.round()
    place.desire(whole, "unloaded")
    assert needed(place, whole)
    place.round()
    assert (own.kept[-1], place.state(whole)) == ([], ("unloaded", None))
    assert needed(place, whole)
    own.ends = True
    place.round()
    assert needed(place, whole) is None


def test_what_a_dying_server_wrote_is_shown_printable_and_cut_and_delays_no_other_model(place: Place, own: OwnServers) -> None:
    whole, adapter = place.whole_model("w"), place.adapter("a")
    own.problem = "it ended: \x00\ud800" + "x" * 10_000
    place.desire(whole)
    place.desire(adapter)
    place.round()
    observed, detail = place.state(whole)
    assert observed == "unloaded" and detail is not None and "it ended" in detail and len(detail) <= 4000 and "\x00" not in detail
    assert place.state(adapter) == ("loaded", None)
    own.refused = True
    place.round()
    assert place.state(whole)[0] == "failed" and place.state(adapter) == ("loaded", None)


def test_an_error_of_an_ordinary_server_is_stored_too(place: Place) -> None:
    made, other = place.adapter("a"), place.adapter("b")
    place.servers.at[ONE].error = "bad gateway \x00"
    for adapter in (made, other):
        place.desire(adapter)
    place.round()
    assert "bad gateway" in str(place.state(made)[1]) and "bad gateway" in str(place.state(other)[1])


def test_two_servers_at_one_address_are_told_apart_by_what_they_serve(place: Place, own: OwnServers) -> None:
    first, second = place.whole_model("a"), place.whole_model("b")
    place.desire(first)
    place.desire(second)
    own.address = f"http://{first}"  # the other could not listen there
    for _ in range(2):
        place.round()
    assert place.state(first) == ("loaded", None)
    observed, detail = place.state(second)
    assert observed == "unloaded" and f"serves ft:tiny-base:{place.tenant}:bot:a" in str(detail)


def test_a_tenant_has_no_more_servers_than_its_limit(place: Place, own: OwnServers) -> None:
    models = [place.whole_model(f"w{n}") for n in range(promotions.MAX_SERVERS + 1)]
    theirs = place.platform.in_scope_of(place.tenant, Actor(kind="key", id="key-1"))
    with ThreadPoolExecutor(len(models)) as pool:
        outcomes = [attempt.exception() for attempt in [pool.submit(promotions.promote, theirs, place.tenant, id_) for id_ in models]]
    (refused,) = (error for error in outcomes if error is not None)
    assert isinstance(refused, Conflict) and refused.code == "promotion_refused"
    assert "too_many_servers: 4 other whole models of this tenant are served, limit 4; deprecate one, such as ft:" in refused.message
    over = models[outcomes.index(refused)]
    promotions.deprecate(theirs, place.tenant, next(id_ for id_ in models if id_ != over))
    for _ in range(2):
        assert promotions.promote(theirs, place.tenant, over).stage == "production", "it is not counted against itself"


def test_a_rollback_to_a_model_whose_server_was_stopped_says_what_to_do(place: Place, own: OwnServers) -> None:
    first, second = place.whole_model("a"), place.whole_model("b")
    place.in_production(first, second)
    place.desire(second)
    place.desire(first, "unloaded")
    place.round()
    with pytest.raises(
        Conflict, match=f"no server can serve {first}, its predecessor .its server does not run; promote {first} to start it"
    ):
        promotions.rollback(place.platform, place.tenant, second)


def test_a_platform_that_starts_no_servers_any_more_says_so(place: Place, own: OwnServers) -> None:
    served, withdrawn, adapter = place.whole_model("a"), place.whole_model("b"), place.adapter("c")
    for made in (served, withdrawn, adapter):
        place.desire(made)
    place.round()
    place.desire(withdrawn, "unloaded")
    own_servers.abandon(place.platform)
    place.platform = replace(place.platform, servers=None)
    for _ in range(2):
        observed, detail = place.state(served)
        assert observed == "failed" and "this platform starts no servers" in str(detail)
        assert (place.state(withdrawn), place.state(adapter)) == (("unloaded", None), ("loaded", None))
        assert (place.seen(served), place.seen(withdrawn)) == ({}, {})
        place.round()
    place.platform = replace(place.platform, servers=own)
    place.desire(served)
    place.round()
    assert place.state(served) == ("loaded", None), "promoted again"


def needed(place: Place, whole: str) -> str | None:
    """Why the files of a model cannot be deleted."""
    return served_by(place.platform, [whole], AskedServers(platform=place.platform))


def test_a_tenants_promotion_waits_for_no_server(place: Place, own: OwnServers) -> None:
    whole = place.whole_model("w")
    theirs = place.platform.in_scope_of(place.tenant, Actor(kind="key", id="key-1"))
    promoted = promotions.promote(theirs, place.tenant, whole)
    assert (promoted.stage, promoted.desired, promoted.observed) == ("production", "loaded", "unloaded")
    assert own.kept == [] and rollout.is_needed(place.platform)
    assert place.round() == [f"http://{whole} probe"]
    assert promotions.promote(theirs, place.tenant, whole).observed == "loaded", "a second call changes nothing"
    assert promotions.deprecate(theirs, place.tenant, whole).desired == "unloaded"
