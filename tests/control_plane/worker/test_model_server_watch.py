"""One worker keeps the servers of whole models, beside the rollout and until it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from control_plane.platform.context import Platform
from control_plane.platform.protocols import ModelServer
from control_plane.worker import model_server_watch
from core.errors import Unavailable
from engine.adapters.record import AdapterRecord
from tests.support.jobs.followed_jobs import until
from tests.support.platform.background_worker import working
from tests.support.platform.fleet_in_memory import OwnServers, Place


@dataclass
class Hanging:
    """A cluster that answers no more than that it has no pools, until the test lets it."""

    asked: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def keep(self, models: Sequence[AdapterRecord]) -> dict[str, ModelServer]:
        self.asked.set()
        assert self.released.wait(60)
        raise Unavailable("the Kubernetes API did not answer")

    def pool_urls(self) -> tuple[str, ...]:
        return ()


@contextmanager
def watched(platform: Platform) -> Iterator[threading.Event]:
    """Keep the servers as a worker does; ends when the event is set."""
    ending = threading.Event()
    thread = threading.Thread(target=model_server_watch.watch, args=(platform, ending), daemon=True)
    thread.start()
    try:
        yield ending
    finally:
        ending.set()
        thread.join(30)
        assert not thread.is_alive()


def test_a_cluster_that_hangs_delays_no_adapter(place: Place) -> None:
    adapter, cluster = place.adapter("a"), Hanging()
    with working(replace(place.platform, servers=cluster)):
        assert cluster.asked.wait(30)
        place.desire(adapter)
        until(lambda: place.state(adapter) == ("loaded", None))
        assert not cluster.released.is_set()
        cluster.released.set()


def test_a_model_is_served_on_and_asked_for_again_when_the_cluster_answers(place: Place) -> None:
    own = OwnServers(place.servers)
    platform = place.platform = replace(place.platform, servers=own)
    first, second = place.whole_model("a"), place.whole_model("b")
    with working(platform):
        place.desire(first)
        until(lambda: place.state(first) == ("loaded", None))
        own.away = True
        place.desire(second)
        until(lambda: "the cluster does not answer" in str(place.state(second)[1]))
        assert place.state(first) == ("loaded", None)
        own.away = False
        until(lambda: place.state(second) == ("loaded", None))


@pytest.mark.slow
def test_a_worker_of_another_version_takes_over_when_this_one_ends_and_never_before(place: Place) -> None:
    old, new = OwnServers(place.servers), OwnServers(place.servers)
    place.desire(place.whole_model("w"))
    with watched(replace(place.platform, servers=old)) as ends:
        until(lambda: len(old.kept) >= 1)
        with watched(replace(place.platform, servers=new)):
            until(lambda: len(old.kept) >= 4)
            assert new.kept == []
            ends.set()
            until(lambda: len(new.kept) >= 1)
            kept = len(old.kept)
            until(lambda: len(new.kept) >= 3)
            assert len(old.kept) == kept


def test_without_servers_to_start_the_models_say_so(place: Place) -> None:
    whole = place.whole_model("w")
    place.desire(whole)
    with watched(place.platform):
        until(lambda: place.state(whole)[0] == "failed")
    assert "this platform starts no servers" in str(place.state(whole)[1])
