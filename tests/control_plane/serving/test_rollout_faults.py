"""What goes wrong at a server, on a node or with a verdict ends where it is, and no request meets it."""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.serving import node_files
from core.errors import Conflict, Unavailable
from engine.adapters import serving_index
from tests.support.jobs.registered_adapter import BASE_DIGEST
from tests.support.platform.fleet_in_memory import ONE, TWO, Place


def test_an_adapter_goes_only_to_bytes_that_it_was_accepted_on(place: Place) -> None:
    made = place.adapter("a")
    place.servers.at[TWO].digest = "f" * 64
    place.desire(made)
    place.round()
    observed, detail = place.state(made)
    assert (observed, place.seen(made)) == ("unloaded", {ONE: "loaded", TWO: "failed"})
    assert "base_digest_mismatch" in str(detail)
    with pytest.raises(Conflict, match=rf"base_digest_mismatch: trained on tiny-base {BASE_DIGEST[:19]}, but f{{19}} is served"):
        promotions.promote(place.platform, place.tenant, made)
    place.verdict(made, "passed", "f" * 64)
    place.clock.now += timedelta(seconds=2)
    assert place.round() == [f"{TWO} load"]
    assert place.state(made) == ("loaded", None)
    (there,) = place.servers.at[TWO].adapters.values()
    assert '"base_digest": "' + "f" * 64 in (Path(there) / "manifest.json").read_text()


def test_an_adapter_goes_from_bytes_that_it_is_not_accepted_on_any_more(place: Place) -> None:
    made, other = place.adapter("a"), "c" * 64
    index = place.platform.settings.work_dir / "adapters" / serving_index.index_filename(other)
    place.servers.at[TWO].digest = other
    place.verdict(made, "passed", other)
    place.desire(made)
    place.round()
    assert place.round() == []
    assert (place.state(made), list(json.loads(index.read_bytes()))) == (("loaded", None), [f"ft:tiny-base:{place.tenant}:bot:a"])
    place.verdict(made, "quarantined", other)
    place.servers.at[TWO].stuck = True
    place.round()
    assert (place.seen(made), json.loads(index.read_bytes())) == ({ONE: "loaded", TWO: "unloaded"}, {})
    place.servers.at[TWO].stuck = False
    place.clock.now += timedelta(seconds=2)
    assert place.round() == [f"{TWO} unload"]
    place.round()
    assert (place.servers.at[TWO].adapters, place.seen(made)) == ({}, {ONE: "loaded", TWO: "failed"})
    assert "evaluate it there" in str(place.state(made)[1])
    assert len(place.servers.at[ONE].adapters) == 1


def test_an_adapter_whose_files_this_node_cannot_hold_holds_up_no_other(place: Place) -> None:
    """A file lies where its directory should be."""
    made = [place.adapter(n) for n in "abc"]
    shutil.rmtree(place.directory(made[0]))
    place.directory(made[0]).write_text("")
    for adapter_id in made:
        place.desire(adapter_id)
    place.round()
    assert [place.state(adapter_id)[0] for adapter_id in made] == ["unloaded", "loaded", "loaded"]
    assert "see to its disk" in str(place.state(made[0])[1])
    assert place.round() == [], "it waits for its next attempt"
    place.directory(made[0]).unlink()
    place.clock.now += timedelta(seconds=2)
    assert sorted(place.round()) == [f"{ONE} load", f"{TWO} load"]


def test_what_nobody_foresaw_is_recorded_and_ends_no_round(place: Place) -> None:
    made = place.adapter("a")
    place.servers.at[ONE].refuse = RuntimeError("what\0 is this")
    place.desire(made)
    place.round()
    assert place.seen(made) == {ONE: "unloaded", TWO: "loaded"}
    assert "RuntimeError: what\\u0000 is this" in str(place.state(made)[1])


def test_a_server_that_stops_answering_keeps_a_round_waiting_only_once(place: Place) -> None:
    made = [place.adapter(n) for n in "abcd"]
    place.servers.at[ONE].refuse = Unavailable("timed out")
    for adapter_id in made:
        place.desire(adapter_id)
    place.round()
    assert (place.servers.at[ONE].told, len(place.servers.at[TWO].adapters)) == (["load a"], 4)
    place.round()
    assert place.servers.at[ONE].told == ["load a", "load b"], "the first one waits for its time"


def test_a_failed_unload_is_followed_by_no_load_and_mended_later(place: Place) -> None:
    made = place.adapter("a")
    del place.servers.at[TWO]
    place.desire(made)
    place.round()
    name, server = f"ft:tiny-base:{place.tenant}:bot:a", place.servers.at[ONE]
    server.adapters, server.stuck = {name: "/elsewhere"}, True
    assert place.round() == [f"{ONE} unload: {ONE} did not answer"]
    assert place.seen(made) == {ONE: "unloaded"}, "no request goes there"
    server.stuck = False
    place.clock.now += timedelta(seconds=2)
    assert place.round() == [f"{ONE} unload", f"{ONE} load"]
    server.adapters = {}
    server.on_load = lambda: server.adapters.update({name: "/elsewhere"})  # another process is at it
    place.round()
    assert place.seen(made) == {ONE: "unloaded"}
    server.on_load = lambda: None
    place.clock.now += timedelta(seconds=2)
    assert place.round() == [f"{ONE} unload", f"{ONE} load"]
    assert place.state(made) == ("loaded", None)


def test_withdrawn_adapter_counts_as_loaded_until_its_server_unloads_it(place: Place) -> None:
    made = place.adapter("a")
    del place.servers.at[TWO]
    place.desire(made)
    place.round()
    place.desire(made, "unloaded")
    place.clock.now += timedelta(days=1)
    place.servers.at[ONE].stuck = True
    assert place.round() == [f"{ONE} unload: {ONE} did not answer"]
    assert (place.state(made), place.seen(made)) == (("loaded", f"{ONE}: {ONE} did not answer"), {ONE: "loaded"})
    place.servers.at[ONE].stuck = False
    place.clock.now += timedelta(seconds=61)
    assert place.round() == [f"{ONE} unload"]
    assert (place.state(made), place.servers.at[ONE].adapters) == (("unloaded", None), {})


def test_a_server_that_is_silent_for_a_moment_keeps_what_it_has(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    place.round()
    for server in place.servers.at.values():
        server.silent = True
    assert place.round() == []
    assert place.seen(made) == {ONE: "loaded", TWO: "loaded"}
    for server in place.servers.at.values():
        server.silent, server.up = False, False
    place.round()
    assert place.seen(made) == {ONE: "unloaded", TWO: "unloaded"}
    assert place.state(made) == ("unloaded", f"on 0 of 2 inference servers; {ONE} did not answer; {TWO} did not answer")


def test_a_damaged_copy_on_the_node_is_replaced_unless_a_server_answers_from_it(place: Place) -> None:
    made = place.adapter("a")
    weights = place.directory(made) / "weights"
    whole, times = weights.read_bytes(), weights.stat()
    node_files.materialise(place.platform, adapters.get_adapter(place.platform, place.tenant, made))
    weights.write_bytes(b"W" + whole[1:])
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a failing disk would leave it
    place.desire(made)
    place.round()
    assert (weights.read_bytes(), place.state(made)) == (whole, ("loaded", None))
    weights.write_bytes(b"")
    place.servers.at[TWO].adapters = {}
    place.round()
    assert (weights.read_bytes(), place.seen(made)) == (b"", {ONE: "loaded", TWO: "failed"})
    assert "deprecate it, and promote it again" in str(place.state(made)[1])
    other = "c" * 64
    place.servers.at[ONE].up = False
    place.round()
    place.servers.at[TWO].digest = other
    place.verdict(made, "passed", other)
    place.desire(made)
    place.round()
    assert place.seen(made)[TWO] == "loaded", "a directory for another base is made of whole files"
    assert weights.read_bytes() == whole


def test_a_rollback_to_what_no_server_answers_with_changes_nothing(place: Place) -> None:
    first, second = place.adapter("one"), place.adapter("two")
    place.in_production(first, second)
    refusal = Conflict("rank 8 is too much", code="adapter_refused")
    for adapter_id, refuse in ((first, refusal), (second, None)):
        for server in place.servers.at.values():
            server.refuse = refuse
        place.desire(adapter_id)
        place.round()
    for server in place.servers.at.values():
        server.refuse = refusal
    lineage = f"ft:tiny-base:{place.tenant}:bot"
    with pytest.raises(Conflict, match=r"stays in production.*rank 8 is too much") as refused:
        promotions.rollback(place.platform, place.tenant, second)
    assert refused.value.code == "previous_not_served"
    found = promotions.resolve_model(place.platform, place.tenant, lineage)
    assert (found.model, place.state(second)) == (f"{lineage}:two", ("loaded", None))
    place.servers.at[TWO].refuse = None
    done = promotions.rollback(place.platform, place.tenant, second)
    assert (done.serving.id, place.seen(first)[TWO]) == (first, "loaded")
    resolved = promotions.resolve_model(place.platform, place.tenant, lineage)
    assert resolved.adapter is not None and resolved.adapter.served_on == (TWO,)


def test_a_rollback_goes_only_to_bytes_that_the_version_before_is_accepted_on(place: Place) -> None:
    first, second = place.adapter("one"), place.adapter("two")
    place.in_production(first, second)
    for server in place.servers.at.values():
        server.digest = "c" * 64
    place.verdict(second, "passed", "c" * 64)
    for adapter_id in (first, second):
        place.desire(adapter_id)
    place.round()
    with pytest.raises(Conflict, match="base_digest_mismatch") as refused:
        promotions.rollback(place.platform, place.tenant, second)
    assert refused.value.code == "previous_not_served"
    for server in place.servers.at.values():
        server.up = False
    place.round()
    assert promotions.rollback(place.platform, place.tenant, second).serving.id == first, "nobody is there to be asked"


def test_what_is_known_of_a_server_goes_with_it(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    place.round()
    del place.servers.at[ONE]
    place.round()
    assert place.seen(made) == {TWO: "loaded"}


def test_a_lineage_is_answered_by_the_version_before_until_a_server_has_the_new_one(place: Place) -> None:
    first, second = place.adapter("one"), place.adapter("two")
    lineage = f"ft:tiny-base:{place.tenant}:bot"
    place.in_production(first, second)
    place.desire(first)
    place.round()
    place.desire(second)
    answering: list[str] = []
    place.servers.at[ONE].on_load = lambda: answering.append(promotions.resolve_model(place.platform, place.tenant, lineage).model)
    del place.servers.at[TWO]
    place.round()
    now = promotions.resolve_model(place.platform, place.tenant, lineage)
    assert now.adapter is not None
    assert (answering, now.model, now.adapter.served_on) == ([f"{lineage}:one"], f"{lineage}:two", (ONE,))
