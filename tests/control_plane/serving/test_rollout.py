"""Every server follows the desired state on its own: restarted, drifted, away, refusing or slow, it holds up no other."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.serving import observations, rollout
from control_plane.serving.node_files import directory
from control_plane.serving.rollout import reconcile
from control_plane.serving.tables import deployments
from core.errors import Conflict, Unavailable
from tests.support.platform.fleet_in_memory import ONE, TWO, Place


def test_every_server_is_loaded_and_probed_and_then_left_alone(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    assert sorted(place.round()) == [f"{ONE} load", f"{TWO} load"]
    assert [s.told for s in place.servers.at.values()] == [["load a", "probe a"]] * 2
    assert (place.state(made), place.seen(made)) == (("loaded", None), {ONE: "loaded", TWO: "loaded"})
    assert place.round() == []


def test_a_server_that_is_away_holds_up_no_other_and_is_repaired_when_it_is_back(place: Place) -> None:
    made = place.adapter("a")
    place.servers.at[TWO].up = False
    place.desire(made)
    assert place.round() == [f"{ONE} load"]
    assert place.state(made) == ("loaded", f"on 1 of 2 inference servers; {TWO} did not answer")
    assert place.seen(made).get(TWO) != "loaded"
    place.servers.at[TWO].up = True
    assert place.round() == [f"{TWO} load"]
    assert place.state(made) == ("loaded", None)


def test_a_server_that_lost_everything_gets_no_request_until_it_was_seen_to_answer(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    place.round()
    place.servers.at[TWO].adapters = {}
    during: list[dict[str, str]] = []
    place.servers.at[TWO].on_load = lambda: during.append(place.seen(made))
    assert place.round() == [f"{TWO} load"]
    assert during == [{ONE: "loaded", TWO: "unloaded"}]
    assert place.seen(made) == {ONE: "loaded", TWO: "loaded"}


def test_a_server_is_rid_of_wrong_directories_and_of_names_that_nobody_desires(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    place.round()
    name = f"ft:tiny-base:{place.tenant}:bot:a"
    place.servers.at[ONE].adapters = {name: "/elsewhere", "ft:old:x:y:z": "/old", "theirs": "/theirs"}
    assert place.round() == [f"{ONE} unload", f"{ONE} load", f"{ONE} unload"]
    right = str(directory(place.platform, adapters.get_adapter(place.platform, place.tenant, made)))
    assert place.servers.at[ONE].adapters == {name: right, "theirs": "/theirs"}


def test_a_refusal_for_good_is_not_repeated_there_and_leaves_the_other_server_serving(place: Place) -> None:
    made = place.adapter("a")
    place.servers.at[TWO].refuse = Conflict("rank 8 is too much", code="adapter_refused")
    place.desire(made)
    place.round()
    assert place.seen(made) == {ONE: "loaded", TWO: "failed"}
    assert place.state(made) == ("unloaded", f"on 1 of 2 inference servers; {TWO}: adapter_refused: rank 8 is too much")
    for _ in range(3):
        place.clock.now += timedelta(minutes=5)
        assert place.round() == []
    place.servers.at[TWO].refuse = None
    place.desire(made)
    assert place.round() == [f"{TWO} load"]
    place.servers.at[ONE].refuse = place.servers.at[TWO].refuse = Conflict("no", code="adapter_refused")
    both = place.adapter("b")
    place.desire(both)
    place.round()
    assert place.state(both)[0] == "failed"


def test_a_failure_for_now_is_tried_again_less_and_less_often(place: Place) -> None:
    made = place.adapter("a")
    del place.servers.at[TWO]
    place.servers.at[ONE].refuse = Unavailable("busy")
    place.desire(made)
    tried = 0
    for _ in range(120):
        tried += len(place.round())
        place.clock.now += timedelta(seconds=1)
    assert 6 <= tried <= 8, "after 1, 2, 4, 8, 16, 32 and 60 seconds"
    assert place.state(made) == ("unloaded", f"on 0 of 1 inference servers; {ONE}: busy")
    place.servers.at[ONE].refuse = None
    place.desire(made)
    assert place.round() == [f"{ONE} load"], "a new promotion does not wait"


def test_an_adapter_is_unloaded_once_its_requests_had_the_time_to_end(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    place.round()
    place.clock.now += timedelta(days=40)  # the time to end counts from the withdrawal, not from the promotion
    place.desire(made, "unloaded")
    assert place.round() == []
    assert place.state(made) == ("loaded", "requests under way are drained first")
    place.clock.now += timedelta(seconds=4)
    place.desire(made, "unloaded")
    assert place.round() == []
    place.clock.now += timedelta(seconds=1)
    assert sorted(place.round()) == [f"{ONE} unload", f"{TWO} unload"], "a second wish does not put it off"
    assert (place.state(made), place.seen(made)) == (("unloaded", None), {ONE: "unloaded", TWO: "unloaded"})


def test_an_adapter_promoted_long_ago_and_deprecated_now_answers_for_the_drain_time(place: Place) -> None:
    made = place.adapter("a")
    place.in_production(made)
    place.desire(made)
    place.round()
    place.clock.now += timedelta(days=40)
    promotions.deprecate(place.platform, place.tenant, made)
    drain_s = place.platform.settings.drain_s
    assert drain_s > 1, "without a time to drain there is nothing to see here"
    for waited_s in (0.0, drain_s - 1):
        place.clock.now += timedelta(seconds=waited_s)
        assert place.round() == []
        assert place.seen(made) == {ONE: "loaded", TWO: "loaded"}
    place.clock.now += timedelta(seconds=1)
    assert sorted(place.round()) == [f"{ONE} unload", f"{TWO} unload"]


def test_an_adapter_that_was_promoted_again_is_not_unloaded(place: Place) -> None:
    """The round has planned to unload it when the promotion comes."""
    made, other = place.adapter("a"), place.adapter("b")
    place.desire(made)
    place.round()
    place.desire(made, "unloaded")
    place.clock.now += timedelta(seconds=6)
    place.desire(other)
    place.servers.at[ONE].on_load = lambda: place.desire(made)
    place.servers.at[TWO].on_load = lambda: time.sleep(0.2)
    place.round()
    assert all(len(s.adapters) == 2 for s in place.servers.at.values())


def test_an_adapter_that_was_loaded_while_a_server_was_being_asked_is_not_taken_for_lost(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    asked = rollout.ask(place.platform)
    place.round()
    late = replace(place.platform, clock=lambda: asked.at)
    assert rollout.load(late, adapters.get_adapter(late, place.tenant, made), asked) is None
    assert place.seen(made) == {ONE: "loaded", TWO: "loaded"}
    assert [s.told for s in place.servers.at.values()] == [["load a", "probe a"]] * 2


def test_servers_are_loaded_side_by_side_and_one_round_runs_at_a_time(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    both = threading.Barrier(2, timeout=60)
    other_rounds: list[object] = []

    def meet() -> None:
        if both.wait() == 0:
            other_rounds.append(reconcile(place.platform))

    for server in place.servers.at.values():
        server.on_load = meet
    assert len(place.round()) == 2
    assert other_rounds == [[]]


def test_a_round_never_waits_for_a_promotion_and_leaves_its_adapter_to_the_next(place: Place) -> None:
    made, other = place.adapter("a"), place.adapter("b")
    for adapter_id in (made, other):
        place.desire(adapter_id)
    row = sa.select(deployments).where(deployments.c.adapter_id == made).with_for_update()
    with place.platform.engine.begin() as promotion:
        promotion.execute(row)
        place.round()  # one that waited would wait for ever: the row is free once this block ends
        assert (place.state(made)[0], place.state(other)[0]) == ("unloaded", "loaded")
    place.round()
    assert place.state(made) == ("loaded", None)


def test_servers_of_another_base_are_not_part_of_the_pool(place: Place) -> None:
    made = place.adapter("a")
    place.servers.at[TWO].base = "other"
    place.desire(made)
    assert place.round() == [f"{ONE} load"]
    assert place.state(made) == ("loaded", None)
    place.servers.at[ONE].base = "other"
    place.servers.at[ONE].adapters = {}
    place.round()
    assert place.state(made) == ("unloaded", "no inference server serves base model tiny-base; start one")


def test_a_server_that_does_not_tell_its_bytes_is_served_by_and_that_is_said(place: Place) -> None:
    made = place.adapter("a")
    for server in place.servers.at.values():
        server.digest = None
    place.desire(made)
    place.round()
    assert place.state(made) == ("loaded", observations.NOT_REPORTED)
