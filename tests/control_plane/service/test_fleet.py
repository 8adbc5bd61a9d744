"""Every server follows the desired state on its own: restarted, drifted, away, refusing or slow, it holds up no other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.protocols import Replica
from control_plane.service import adapters, fleet, node_files, observations, promotions, tenants
from control_plane.service.fleet import reconcile
from control_plane.service.node_files import directory
from control_plane.service.platform import Platform
from control_plane.tables import adapters as adapters_table
from control_plane.tables import deployments, evaluations, replica_adapters
from ft_assets.adapters import serving_index
from ft_assets.errors import Conflict, Unavailable
from tests.finished_job import rewrite
from tests.registered_adapter import BASE_DIGEST, add_adapter

ONE, TWO = "http://one", "http://two"


@dataclass
class Server:
    base: str = "tiny-base"
    digest: str | None = BASE_DIGEST
    up: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    refuse: Exception | None = None
    stuck: bool = False
    """It unloads nothing."""
    silent: bool = False
    on_load: Callable[[], object] = lambda: None


class Servers:
    """A fleet in memory."""

    def __init__(self, *urls: str) -> None:
        self.at = {url: Server() for url in urls}

    def replicas(self) -> list[Replica]:
        return [self._described(url, s) for url, s in self.at.items()]

    def _described(self, url: str, s: Server) -> Replica:
        if not s.up or s.silent:
            return Replica(url=url, ready=False, base=s.base, error=f"{url} did not answer", silent=s.silent)
        return Replica(url=url, ready=True, base=s.base, base_digest=s.digest, adapters=dict(s.adapters))

    def load(self, url: str, name: str, directory: Path) -> None:
        s = self._told(url, "load", name)
        s.on_load()
        if s.refuse:
            raise s.refuse
        if s.adapters.get(name) not in (None, str(directory)):
            raise Conflict(f"{url} serves {name} from elsewhere", code="served_elsewhere")
        s.adapters[name] = str(directory)

    def unload(self, url: str, name: str) -> None:
        if self._told(url, "unload", name).stuck:
            raise Unavailable(f"{url} did not answer")
        self.at[url].adapters.pop(name, None)

    def probe(self, url: str, name: str) -> float:
        assert name in self._told(url, "probe", name).adapters
        return 0.0

    def _told(self, url: str, what: str, name: str) -> Server:
        if not self.at[url].up:
            raise Unavailable(f"{url} did not answer")
        self.at[url].told.append(f"{what} {name.rsplit(':', 1)[1]}")
        return self.at[url]


@dataclass
class Clock:
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __call__(self) -> datetime:
        self.now += timedelta(milliseconds=1)
        return self.now


@dataclass
class Place:
    platform: Platform
    servers: Servers
    clock: Clock
    tenant: str

    def adapter(self, number: str, *, lineage: str = "bot") -> str:
        """A registered adapter whose files are on the node; its id."""
        made = add_adapter(self.platform, self.tenant, name=f"ft:tiny-base:{self.tenant}:{lineage}:{number}", stage="draft", loaded=False)
        weights = f"weights of {number}".encode()
        listed = {"weights": {"sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)}}
        manifest = json.dumps({"base_digest": BASE_DIGEST, "files": listed}).encode()
        with self.platform.engine.begin() as conn:
            rewrite(conn, adapters_table.c.id == made, manifest_sha256=hashlib.sha256(manifest).hexdigest())
        record = adapters.find_record(self.platform, self.tenant, made)
        where = directory(self.platform, record)
        where.mkdir(parents=True)
        for name, content in (("manifest.json", manifest), ("weights", weights)):
            (where / name).write_bytes(content)
            self.platform.objects.put_bytes(f"{record.object_prefix}/{name}", content)
        return made

    def directory(self, adapter_id: str) -> Path:
        return directory(self.platform, adapters.find_record(self.platform, self.tenant, adapter_id))

    def in_production(self, *adapter_ids: str) -> None:
        """Promoted one after the other."""
        with self.platform.engine.begin() as conn:
            for n, made in enumerate(adapter_ids):
                at = self.clock() + timedelta(seconds=n)
                conn.execute(sa.text("UPDATE adapters SET stage = 'staging' WHERE id = :id"), {"id": made})
                conn.execute(sa.text("UPDATE adapters SET stage = 'production', promoted_at = :at WHERE id = :id"), {"at": at, "id": made})
        self.clock.now += timedelta(seconds=len(adapter_ids))

    def verdict(self, adapter_id: str, outcome: str, digest: str) -> None:
        record, now = adapters.find_record(self.platform, self.tenant, adapter_id), self.clock()
        of = {"tenant_id": self.tenant, "job_id": record.job_id, "adapter_id": adapter_id, "base_model": "tiny-base", "base_digest": digest}
        done = {"state": "succeeded", "outcome": outcome, "created_at": now, "finished_at": now, "kind": "base_update"}
        with self.platform.engine.begin() as conn:
            conn.execute(sa.insert(evaluations).values(id=f"ev-{uuid.uuid4().hex}", **of, **done))

    def desire(self, adapter_id: str, desired: str = "loaded") -> None:
        record = adapters.find_record(self.platform, self.tenant, adapter_id)
        with self.platform.engine.begin() as conn:
            fleet.desire(conn, record, desired, self.clock())

    def state(self, adapter_id: str) -> tuple[str, str | None]:
        found = adapters.get_adapter(self.platform, self.tenant, adapter_id)
        return found["observed"], found["detail"]

    def seen(self, adapter_id: str) -> dict[str, str]:
        with self.platform.engine.connect() as conn:
            return {url: row["observed"] for (url, _), row in observations.read(conn, [adapter_id]).items()}

    def round(self) -> list[str]:
        self.clock.now += timedelta(milliseconds=10)
        return [f"{r.replica} {r.action.kind}" + (f": {r.error}" if r.error else "") for r in reconcile(self.platform)]


@pytest.fixture(scope="module")
def database(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform()


@pytest.fixture
def place(database: Platform) -> Place:
    """Two servers, and nothing that earlier tests desired."""
    with database.engine.begin() as conn:
        conn.execute(sa.delete(replica_adapters))
        conn.execute(sa.text("DELETE FROM deployments"))
    tenant, clock, servers = f"t-{uuid.uuid4().hex[:8]}", Clock(), Servers(ONE, TWO)
    tenants.create(database, tenant)
    return Place(platform=replace(database, fleet=servers, clock=clock), servers=servers, clock=clock, tenant=tenant)


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
    right = str(directory(place.platform, adapters.find_record(place.platform, place.tenant, made)))
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
    place.desire(made, "unloaded")
    assert place.round() == []
    assert place.state(made) == ("loaded", "requests under way are drained first")
    place.clock.now += timedelta(seconds=4)
    place.desire(made, "unloaded")
    assert place.round() == []
    place.clock.now += timedelta(seconds=1)
    assert sorted(place.round()) == [f"{ONE} unload", f"{TWO} unload"], "a second wish does not put it off"
    assert (place.state(made), place.seen(made)) == (("unloaded", None), {ONE: "unloaded", TWO: "unloaded"})


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
    asked = fleet.ask(place.platform)
    place.round()
    late = replace(place.platform, clock=lambda: asked.at)
    assert fleet.load(late, adapters.find_record(late, place.tenant, made), asked) is None
    assert place.seen(made) == {ONE: "loaded", TWO: "loaded"}
    assert [s.told for s in place.servers.at.values()] == [["load a", "probe a"]] * 2


def test_servers_are_loaded_side_by_side_and_one_round_runs_at_a_time(place: Place) -> None:
    made = place.adapter("a")
    place.desire(made)
    both = threading.Barrier(2, timeout=5)
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
        started = time.monotonic()
        place.round()
        assert time.monotonic() - started < 5
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
    assert place.state(made) == ("loaded", observations.NOT_TOLD)


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
    index = place.platform.settings.work_dir / "adapters" / serving_index.filename(other)
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


def test_a_damaged_copy_on_the_node_is_replaced_unless_a_server_answers_from_it(place: Place) -> None:
    made = place.adapter("a")
    weights = place.directory(made) / "weights"
    whole, times = weights.read_bytes(), weights.stat()
    node_files.materialise(place.platform, adapters.find_record(place.platform, place.tenant, made))
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
    with pytest.raises(Conflict, match=r"goes on being served.*rank 8 is too much") as refused:
        promotions.rollback(place.platform, place.tenant, second)
    assert refused.value.code == "previous_not_served"
    found = promotions.resolve_model(place.platform, place.tenant, lineage)
    assert (found.model, place.state(second)) == (f"{lineage}:two", ("loaded", None))
    place.servers.at[TWO].refuse = None
    done = promotions.rollback(place.platform, place.tenant, second)
    assert (done.serving["id"], place.seen(first)[TWO]) == (first, "loaded")
    assert promotions.resolve_model(place.platform, place.tenant, lineage).served_on == [TWO]


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
    assert promotions.rollback(place.platform, place.tenant, second).serving["id"] == first, "nobody is there to be asked"


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
    assert (answering, now.model, now.served_on) == ([f"{lineage}:one"], f"{lineage}:two", [ONE])
