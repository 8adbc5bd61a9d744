"""From the change to the receiver: told once it is committed, in order, at least once, and nobody at another's cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.notifications import deliveries as listed
from control_plane.notifications import outbox
from control_plane.notifications import webhook_endpoints as webhooks
from control_plane.notifications.dispatch import begin, carry_out
from control_plane.notifications.outbox import FAILING, fan_out, publish
from control_plane.notifications.rules import DELAYS_S
from control_plane.notifications.tables import deliveries, webhook_endpoints
from control_plane.notifications.tables import outbox as events
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.protocols import WebhookAnswer
from control_plane.worker.process import CONCURRENCY
from core.errors import InvalidRequest, NotFound
from core.public_addresses import parse_networks
from resources.webhook_sender import HttpWebhookSender
from tests.support.platform.background_worker import work_off, working
from tests.support.platform.notified_tenants import QUEUED, RUNNING, SUCCEEDED, World, forget_all
from tests.support.servers.webhook_receiver import Receiver, receiver, until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.0/8")


@pytest.fixture
def world(platform: Platform) -> World:
    """With nothing that earlier tests left to be sent."""
    forget_all(platform)
    return World(platform)


def test_what_is_not_committed_is_told_to_nobody(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    with world.platform.engine.connect() as conn:
        publish(conn, world.tenant, SUCCEEDED, "ftjob-1", now=world.clock())
        conn.rollback()
    world.send()
    assert world.of(endpoint) == [] and there.received == []


def test_an_event_goes_to_the_endpoints_of_its_tenant_that_want_its_type(world: World, there: Receiver) -> None:
    other = world.new_tenant()
    world.endpoint(there.url("/ok/all"))
    world.endpoint(there.url("/ok/wanted"), SUCCEEDED, RUNNING)
    world.endpoint(there.url("/ok/unwanted"), RUNNING)
    world.endpoint(there.url("/ok/other"), tenant=other)
    event = world.tell()
    happened_at = world.clock.now
    world.send()
    assert sorted(r.path for r in there.received) == ["/ok/all", "/ok/wanted"]
    assert {r.headers["webhook-id"] for r in there.received} == {event}
    assert there.received[0].event == {
        "id": event, "object": "event", "created_at": int(happened_at.timestamp()), "type": SUCCEEDED, "data": {"id": "ftjob-1"},
    }  # fmt: skip


def test_a_failure_is_tried_again_on_schedule_under_the_same_id_until_it_is_taken(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    world.tell()
    world.send()
    world.send()
    assert len(there.received) == 1, "it is not tried again before its time"
    world.later(6)
    world.send()
    there.statuses["/status/500"] = 204
    world.later(331)
    world.send()
    assert world.states(endpoint) == ["delivered"]
    assert len(there.received) == 3 and len({(r.headers["webhook-id"], r.body) for r in there.received}) == 1
    assert len({r.headers["webhook-timestamp"] for r in there.received}) == 3
    assert webhooks.get(world.platform, world.tenant, endpoint).failing_since is None


def test_after_the_last_attempt_it_is_dead_and_can_be_replayed(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    world.tell()
    for delay in (*DELAYS_S, 1):
        world.later(delay * 1.2)
        world.send()
    (dead,) = world.of(endpoint)
    assert (dead["state"], dead["attempts"], dead["last_status"]) == ("dead", 10, 500)
    assert dead["last_error"] == "HTTP 500"
    assert len(there.received) == 10
    there.statuses["/status/500"] = 200
    assert listed.replay_dead(world.platform, world.tenant, endpoint, since=world.clock()) == 0, "it came up before that"
    assert listed.replay_dead(world.platform, world.tenant, endpoint, since=dead["created_at"]) == 1
    world.send()
    assert world.states(endpoint) == ["delivered"] and len(there.received) == 11
    assert listed.replay(world.platform, world.tenant, endpoint, dead["id"]).state == "pending"
    world.send()
    assert len(there.received) == 12
    with pytest.raises(NotFound):
        listed.replay(world.platform, world.new_tenant(), endpoint, dead["id"])


def test_a_receiver_that_asks_for_time_gets_it(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/429?after=3600"))
    world.tell()
    world.send()
    (row,) = world.of(endpoint)
    assert timedelta(minutes=59) < row["next_attempt_at"] - world.clock() <= timedelta(hours=1)


def test_events_of_one_object_arrive_in_order_also_when_the_first_is_late(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/503"))
    kinds = [QUEUED, RUNNING, SUCCEEDED]
    for kind in kinds:
        world.tell(kind, "ftjob-1")
    world.tell(QUEUED, "ftjob-2")
    world.send()
    assert {(r.event["data"]["id"], r.event["type"]) for r in there.received} == {("ftjob-1", QUEUED), ("ftjob-2", QUEUED)}
    first = len(there.received)
    there.statuses["/status/503"] = 200
    world.later(10)
    world.send()
    assert [r.event["type"] for r in there.received[first:] if r.event["data"]["id"] == "ftjob-1"] == kinds
    assert world.states(endpoint) == ["delivered"] * 4


def test_a_dead_event_holds_up_nothing_after_it(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    world.tell(QUEUED)
    world.tell(RUNNING)
    world.send()
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(deliveries).where(deliveries.c.id == world.of(endpoint)[0]["id"]).values(state="dead"))
    there.statuses["/status/500"] = 200
    world.later(6)
    world.send()
    assert world.states(endpoint) == ["dead", "delivered"]


def test_a_delivery_whose_process_dies_is_sent_by_another(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    world.tell()
    fan_out(world.platform)
    lost = begin(world.platform, endpoint)
    world.later(20)
    again = begin(world.platform, endpoint)
    assert lost is not None and again is not None and (again.id, again.attempts) == (lost.id, 2)
    carry_out(world.platform, again)
    assert world.states(endpoint) == ["delivered"]
    world.later(1)
    carry_out(world.platform, lost)  # it was only slow: it is sent twice, under one id, and nothing is written over
    assert world.of(endpoint)[0]["delivered_at"] < world.clock()
    assert len({r.headers["webhook-id"] for r in there.received}) == 1


def test_a_replay_during_an_attempt_is_not_ended_by_what_becomes_of_that_attempt(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    world.tell()
    fan_out(world.platform)
    under_way = begin(world.platform, endpoint)
    assert under_way is not None
    listed.replay(world.platform, world.tenant, endpoint, under_way.id)
    world.later(1)
    again = begin(world.platform, endpoint)
    assert again is not None and (again.id, again.attempts) == (under_way.id, under_way.attempts), "the attempts begin anew"
    carry_out(world.platform, under_way)
    (row,) = world.of(endpoint)
    assert row["last_attempt_at"] == again.last_attempt_at and row["last_status"] is None, "it is the other's"


def test_an_event_that_is_replayed_during_an_attempt_is_sent_again_also_when_that_attempt_succeeds(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    world.tell()
    fan_out(world.platform)
    under_way = begin(world.platform, endpoint)
    assert under_way is not None
    listed.replay(world.platform, world.tenant, endpoint, under_way.id)
    carry_out(world.platform, under_way)
    assert world.states(endpoint) == ["pending"]
    world.send()
    assert world.states(endpoint) == ["delivered"] and len(there.received) == 2


class Broken(HttpWebhookSender):
    """Raises what nobody thought of."""

    def send(self, url: str, *, headers: Mapping[str, str], body: bytes) -> WebhookAnswer:
        raise RuntimeError("nobody thought of this")


def test_an_error_of_ours_is_an_attempt_like_any_other_and_holds_up_nothing_for_ever(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    working, world.platform = world.platform, replace(world.platform, webhooks=Broken())
    world.tell(QUEUED)
    world.tell(RUNNING)
    for delay in (*DELAYS_S, 1):
        world.later(delay * 1.2)
        world.send()
    first, second = world.of(endpoint)
    assert (first["state"], first["attempts"], first["last_error"]) == ("dead", 10, "internal error")
    assert second["state"] == "pending" and second["attempts"] >= 1
    assert webhooks.get(working, world.tenant, endpoint).failing_since is None, "the receiver was not asked"
    world.platform = working
    world.later(400)
    world.send()
    assert world.states(endpoint) == ["dead", "delivered"]


def test_what_dies_with_its_process_at_every_attempt_is_given_up(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    world.tell(QUEUED)
    world.tell(RUNNING)
    fan_out(world.platform)
    for number in range(1, len(DELAYS_S) + 1):
        lost = begin(world.platform, endpoint)
        assert lost is not None and (lost.type, lost.attempts) == (QUEUED, number)
        world.later(20)
    after = begin(world.platform, endpoint)
    assert after is not None and after.type == RUNNING
    assert world.of(endpoint)[0]["state"] == "dead" and "is not known" in world.of(endpoint)[0]["last_error"]
    world.send()
    assert world.states(endpoint) == ["dead", "delivered"]


def test_many_workers_at_once_send_everything_once_and_in_order(world: World, there: Receiver) -> None:
    world.endpoint(there.url("/ok/1"))
    world.endpoint(there.url("/ok/2"))
    for n in range(30):
        for kind in (QUEUED, RUNNING, SUCCEEDED):
            world.tell(kind, f"ftjob-{n}")
    platform = replace(world.platform, clock=World(world.platform).clock)
    threads = [threading.Thread(target=work_off, args=(platform,)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    world.send()
    for path in ("/ok/1", "/ok/2"):
        got = there.at(path)
        assert Counter(r.event["id"] for r in got).most_common(1)[0][1] == 1 and len(got) == 90
        for n in range(30):
            mine = [r.event["type"] for r in got if r.event["data"]["id"] == f"ftjob-{n}"]
            assert mine == [QUEUED, RUNNING, SUCCEEDED]


def test_a_tenant_whose_receivers_hang_delays_nobody_else(world: World, there: Receiver) -> None:
    sender = HttpWebhookSender(allowed=parse_networks("127.0.0.0/8"), timeout_s=100)
    world.platform = replace(world.platform, webhooks=sender)
    for n in range(5):
        world.endpoint(there.url(f"/hang/{n}"))
    good = world.new_tenant()
    endpoint = world.endpoint(there.url("/ok"), tenant=good)
    for n in range(20):
        world.tell(SUCCEEDED, f"ftjob-{n}")
    for n in range(20):
        world.tell(SUCCEEDED, f"ftjob-g{n}", tenant=good)
    with working(world.platform):
        until(lambda: world.states(endpoint) == ["delivered"] * 20)
        hanging = [r for r in there.received if r.path.startswith("/hang")]
        assert 0 < len(hanging) <= 5, "each of its endpoints has one thread, and no more"
        there.released.set()


def test_failing_endpoints_of_many_tenants_that_hang_leave_room_for_a_good_one(world: World, there: Receiver) -> None:
    world.platform = replace(world.platform, webhooks=HttpWebhookSender(allowed=parse_networks("127.0.0.0/8"), timeout_s=100))
    for n in range(20):
        bad = world.new_tenant()
        world.endpoint(there.url(f"/hang/{n}"), tenant=bad)
        world.tell(tenant=bad)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(webhook_endpoints).values(failing_since=world.clock()))
    good = world.endpoint(there.url("/ok"))
    with working(world.platform):
        until(lambda: len([r for r in there.received if r.path.startswith("/hang")]) == CONCURRENCY[FAILING])
        world.tell()
        until(lambda: world.states(good) == ["delivered"])
        assert len([r for r in there.received if r.path.startswith("/hang")]) == CONCURRENCY[FAILING], "the others wait for their turn"
        there.released.set()


@pytest.mark.slow
def test_nothing_is_lost_and_all_is_in_order_when_one_of_two_workers_is_killed(world: World, there: Receiver) -> None:
    platform = world.platform = replace(world.platform, clock=utc_now)
    endpoints = [world.endpoint(there.url(f"/ok/{n}")) for n in range(4)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FT_HOME": str(platform.settings.home), "FT_WEBHOOK_ALLOW": "127.0.0.0/8"}
    env |= {"FT_DATABASE_URL": platform.settings.database_url, "FT_MLFLOW_URI": "off", "FT_INFERENCE_URLS": ","}
    workers = [subprocess.Popen([sys.executable, "-m", "control_plane.worker"], env=env, cwd=ROOT) for _ in range(2)]
    try:
        until(lambda: _num_workers(platform) == 2)
        for n in range(120):
            for kind in (QUEUED, SUCCEEDED):
                with platform.engine.begin() as conn:
                    publish(conn, world.tenant, kind, f"ftjob-{n}", now=platform.clock())
            if n == 60:
                until(lambda: len(there.received) > 20)
                workers[0].send_signal(signal.SIGKILL)
        interrupted = len(there.received)
        until(lambda: all(world.states(endpoint) == ["delivered"] * 240 for endpoint in endpoints), within_s=120)
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    assert 0 < interrupted < 960, "one was killed on the way"
    for n in range(4):
        got = there.at(f"/ok/{n}")
        assert len({r.event["id"] for r in got}) == 240
        for job in range(120):
            firsts = list(dict.fromkeys(r.event["type"] for r in got if r.event["data"]["id"] == f"ftjob-{job}"))
            assert firsts == [QUEUED, SUCCEEDED]


def _num_workers(platform: Platform) -> int:
    with platform.engine.connect() as conn:
        return int(conn.execute(sa.text("SELECT count(*) FROM tasks.procrastinate_workers")).scalar_one())


def test_a_redirect_to_an_inner_address_is_a_failure_and_nobody_gets_a_connection(world: World, there: Receiver) -> None:
    with receiver() as inner:
        endpoint = world.endpoint(there.url(f"/redirect?to={inner.url('/secret')}"))
        world.tell()
        world.send()
        (row,) = world.of(endpoint)
        assert row["state"] == "pending" and "redirects are not followed" in row["last_error"]
        assert inner.num_connections == 0


def test_a_name_that_moves_to_an_inner_address_gets_nothing(world: World) -> None:
    now_at = ["8.8.8.8"]
    sender = HttpWebhookSender(resolve=lambda host, port: now_at)
    world.platform = replace(world.platform, webhooks=sender)
    with receiver() as inner:
        endpoint = world.endpoint(f"https://hooks.example.com:{inner.port}/")
        now_at[:] = ["127.0.0.1"]
        world.tell()
        world.send()
        (row,) = world.of(endpoint)
        assert row["state"] == "pending" and "public addresses alone" in row["last_error"]
        assert inner.num_connections == 0
        with pytest.raises(InvalidRequest):
            world.endpoint(f"https://hooks.example.com:{inner.port}/")


def test_an_event_whose_tenant_had_its_data_deleted_is_not_sent(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    world.tell()
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(events).where(events.c.tenant_id == world.tenant).values(data={}))
    world.send()
    assert world.states(endpoint) == ["dead"] and there.received == []
    assert webhooks.get(world.platform, world.tenant, endpoint).failing_since is None, "the receiver was not asked"


def test_old_events_are_forgotten_and_what_is_under_way_stays(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    ok = world.endpoint(there.url("/ok"))
    world.tell()
    world.send()
    world.later(31 * 86_400)
    world.tell(SUCCEEDED, "ftjob-2")
    fan_out(world.platform)
    assert outbox.forget(world.platform) == 0, "a delivery of it is still to be tried"
    assert world.states(endpoint) == ["pending", "pending"] and world.states(ok) == ["pending"]
    webhooks.update(world.platform, world.tenant, endpoint, {"state": "disabled"})
    assert outbox.forget(world.platform) == 1
    assert world.states(endpoint) == ["dead"] and world.states(ok) == ["pending"]


def test_what_waits_is_counted(world: World, there: Receiver) -> None:
    world.endpoint(there.url("/status/500"))
    assert listed.backlog(world.platform) == listed.Backlog(waiting_events=0, pending=0, dead=0, oldest_pending_age_s=0.0)
    world.tell()
    assert listed.backlog(world.platform).waiting_events == 1
    world.send()
    world.later(100)
    found = listed.backlog(world.platform)
    assert (found.waiting_events, found.pending, found.dead) == (0, 1, 0) and 100 <= found.oldest_pending_age_s < 101
