"""The database tells of changes of the queue, and the queue listener launches the runs that they make due."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.test_utils import create_run_for_test

from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.tables import Evaluation
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.queue.launches import bind, due_runs, replace_run
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from core.errors import FtError, Unavailable
from resources.dagster.graphql_client import DagsterLaunches
from sensors.queue_listener import LAUNCHES_AT_ONCE, QueueListener, listen, run
from sensors.run_requests import MAX_REQUESTS_PER_TICK, missing
from tests.support.jobs import launched_runs
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def heard(fresh_platform: Platform) -> Iterator[list[float]]:
    """When a listener has heard of changes; the first time is the beginning."""
    times: list[float] = []
    ending = threading.Event()
    thread = threading.Thread(target=listen, args=(fresh_platform.engine.url, lambda: times.append(time.monotonic()), ending))
    thread.start()
    until(lambda: len(times) == 1)
    yield times
    ending.set()
    thread.join(60)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def submit(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Callable[[], tuple[str, str]]:
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="premium")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")

    def make() -> tuple[str, str]:
        body = {"model": "tiny-base", "training_file": file.id, "seed": uuid.uuid4().int % 1000}
        return owner.id, str(jobs.submit(fresh_platform, owner.id, JobRequest.from_body(body)).job.id)

    return make


@pytest.fixture
def many(fresh_platform: Platform, submit: Callable[[], tuple[str, str]]) -> list[str]:
    """Jobs that are due, more of them than one lap asks for."""
    _, job_id = submit()
    with fresh_platform.engine.begin() as conn:
        row = dict(conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).mappings().one())
        rows = [{**row, "id": f"{job_id}-{n}"} for n in range(MAX_REQUESTS_PER_TICK + 5)]
        conn.execute(sa.insert(jobs_table).values(rows))
    return [job_id, *(str(r["id"]) for r in rows)]


def until(true: Callable[[], bool], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"not seen in {patience_s} s"
        time.sleep(0.01)


def test_whatever_changes_the_queue_is_heard_once_it_is_committed(
    fresh_platform: Platform, heard: list[float], submit: Callable[[], tuple[str, str]]
) -> None:
    tenant, job_id = submit()
    until(lambda: len(heard) == 2)
    replace_run(fresh_platform, due_runs(fresh_platform, ("prepare",))[0])
    until(lambda: len(heard) == 3)
    with fresh_platform.engine.begin() as conn:
        held = {"job_id": job_id, "attempt": 1, "pool": "local", "num_gpus": 1, "granted_at": fresh_platform.clock()}
        conn.execute(sa.insert(reservations).values(held))
    until(lambda: len(heard) == 4)
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(reservations.c.job_id == job_id).values(released_at=fresh_platform.clock()))
        time.sleep(0.2)
        assert len(heard) == 4, "what is not committed is not told"
    until(lambda: len(heard) == 5)
    jobs.cancel(fresh_platform, tenant, job_id)
    until(lambda: len(heard) == 6)


def test_a_burst_is_a_few_rounds(fresh_platform: Platform, heard: list[float]) -> None:
    for _ in range(100):
        with fresh_platform.engine.begin() as conn:
            conn.execute(sa.text("SELECT pg_notify('ft_queue', '')"))
    until(lambda: len(heard) > 1)
    time.sleep(0.3)
    assert len(heard) < 50


def test_without_an_answer_from_dagster_the_runs_are_left_to_the_sensors_at_once(
    fresh_platform: Platform, instance: dg.DagsterInstance, submit: Callable[[], tuple[str, str]]
) -> None:
    tenant, job_id = submit()
    launches = DagsterLaunches("http://127.0.0.1:9", token="t")
    assert QueueListener(fresh_platform, instance, launches).round() == []
    launches.close()
    (due,) = missing(fresh_platform, instance, due_runs(fresh_platform, ("prepare",)), by="sensor")
    assert due.job_id == job_id
    assert instance.has_dynamic_partition("jobs", f"{tenant}:{job_id}")
    assert launched_runs.runs_by_requester(fresh_platform) == {}


def test_a_job_with_a_reservation_is_asked_for_before_a_burst_of_submissions(
    fresh_platform: Platform, instance: dg.DagsterInstance, many: list[str]
) -> None:
    asked: list[str] = []

    class Recording(DagsterLaunches):
        def launch(self, request: dg.RunRequest) -> str:
            asked.append(str(request.run_key))
            return super().launch(request)

    reserved = many[-1]
    with fresh_platform.engine.begin() as conn:
        held = {"job_id": reserved, "attempt": 1, "pool": "local", "num_gpus": 1, "granted_at": fresh_platform.clock()}
        conn.execute(sa.insert(reservations).values(held))
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == reserved).values(state="provisioning", attempt=1))
    launches = Recording("http://127.0.0.1:9", token="t")
    QueueListener(fresh_platform, instance, launches).round()
    launches.close()
    assert f"{reserved}#a1.0" in asked, "in the first lap, which a burst fills"


def test_with_more_due_than_a_lap_and_no_webserver_the_round_ends_and_says_how_long_to_pause(
    fresh_platform: Platform, instance: dg.DagsterInstance, many: list[str]
) -> None:
    refused: list[str] = []

    class Refusing(DagsterLaunches):
        def launch(self, request: dg.RunRequest) -> str:
            refused.append(str(request.run_key))
            return super().launch(request)

    launches = Refusing("http://127.0.0.1:9", token="t")
    listener = QueueListener(fresh_platform, instance, launches)
    pauses = []
    for _ in range(3):
        assert listener.round() == []
        pauses.append(listener.pause_s)
    launches.close()
    assert pauses == [2.0, 4.0, 8.0]
    assert len(refused) <= 3 * LAUNCHES_AT_ONCE, "one that is away is not asked for each of them"
    left = missing(fresh_platform, instance, due_runs(fresh_platform, ("prepare",)), by="sensor")
    assert len(left) == MAX_REQUESTS_PER_TICK < len(many)


def test_a_run_that_dagster_refuses_keeps_no_other_back_and_is_left_to_the_sensors(
    fresh_platform: Platform, instance: dg.DagsterInstance, many: list[str]
) -> None:
    asked: list[str] = []

    class Refuses(DagsterLaunches):
        def launch(self, request: dg.RunRequest) -> str:
            asked.append(str(request.run_key))
            if len(asked) == 1:
                raise FtError("its configuration is not valid")
            run_id = str(uuid.uuid4())
            with fresh_platform.engine.begin() as conn:
                bind(conn, str(request.run_key), request.tags["dagster/ft_job"], run_id, by="queue-listener")
            return run_id

    launches = Refuses("http://127.0.0.1:9", token="t")
    listener = QueueListener(fresh_platform, instance, launches)
    assert sorted(listener.round()) == sorted(asked[1:])
    assert (len(asked), len(set(asked)), listener.pause_s) == (len(many), len(many), 0.0)
    assert listener.round() == [], "nor is it asked for again at once"
    launches.close()
    (left,) = missing(fresh_platform, instance, due_runs(fresh_platform, ("prepare",)), by="sensor")
    assert left.run_key == asked[0]


def test_after_a_pause_the_next_round_needs_no_word(fresh_platform: Platform) -> None:
    times: list[float] = []
    ending = threading.Event()

    def heard() -> float:
        times.append(time.monotonic())
        if len(times) > 2:
            ending.set()
        return 0.3 if len(times) == 1 else 0.2

    thread = threading.Thread(target=listen, args=(fresh_platform.engine.url, heard, ending))
    thread.start()
    until(lambda: len(times) == 1)
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.text("SELECT pg_notify('ft_queue', '')"))
    thread.join(60)
    assert len(times) == 3
    assert times[1] - times[0] >= 0.3, "a word ends no pause"


def test_a_listener_that_is_ending_asks_for_nothing(fresh_platform: Platform, instance: dg.DagsterInstance, many: list[str]) -> None:
    ending = threading.Event()

    class Ending(DagsterLaunches):
        def launch(self, request: dg.RunRequest) -> str:
            ending.set()
            return str(request.run_key)

    launches = Ending("http://127.0.0.1:9", token="t")
    assert len(QueueListener(fresh_platform, instance, launches, ending).round()) <= LAUNCHES_AT_ONCE < len(many)
    launches.close()


def test_a_connection_that_the_server_ends_is_made_again(
    fresh_platform: Platform, submit: Callable[[], tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    ending = threading.Event()
    thread = threading.Thread(target=run, args=(fresh_platform, "http://127.0.0.1:9", ending))
    thread.start()
    listening = sa.text("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN ft_queue'")

    def listeners() -> list[int]:
        with fresh_platform.engine.connect() as conn:
            return list(conn.execute(listening).scalars())

    until(lambda: len(listeners()) == 1, 20)
    (first,) = listeners()
    with fresh_platform.engine.connect() as conn:
        conn.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": first})
    until(lambda: len(listeners()) == 1 and listeners() != [first], 10)
    assert thread.is_alive()
    ending.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_webserver_that_is_away_is_told_as_such() -> None:
    launches = DagsterLaunches("http://127.0.0.1:9", token="t")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/graphql did not launch the run"):
        launches.launch(dg.RunRequest(run_key="k", job_name="prepare"))
    launches.close()


class Launching(DagsterLaunches):
    """A webserver that takes every run."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", token="t")
        self.asked: list[str] = []

    def launch(self, request: dg.RunRequest) -> str:
        assert request.job_name is not None, "GraphQL refuses a run without"
        self.asked.append(str(request.run_key))
        return str(uuid.uuid4())


def test_what_is_open_is_looked_at_again_without_a_word_and_an_idle_queue_is_not(
    fresh_platform: Platform, instance: dg.DagsterInstance, submit: Callable[[], tuple[str, str]]
) -> None:
    listener = QueueListener(fresh_platform, instance, Launching(), open_look_s=0.3)
    assert listener.is_due(), "what happened before the start"
    listener.look()
    time.sleep(0.4)
    assert not listener.is_due()
    tenant, job_id = submit()
    listener.look()
    assert not listener.is_due()
    until(listener.is_due)
    jobs.cancel(fresh_platform, tenant, job_id)
    listener.look()
    time.sleep(0.4)
    assert not listener.is_due()


def test_a_run_that_ended_is_replaced_while_its_job_is_open(
    fresh_platform: Platform, instance: dg.DagsterInstance, submit: Callable[[], tuple[str, str]]
) -> None:
    launches = Launching()
    _, job_id = submit()
    create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": f"{job_id}#prepare0"}, status=dg.DagsterRunStatus.FAILURE)
    time.sleep(1.1)  # a run that ended just now may still move its job
    listener = QueueListener(fresh_platform, instance, launches)
    listener.look()
    listener.look()
    assert launches.asked == [f"{job_id}#prepare1"]


def ordered(platform: Platform) -> Evaluation:
    """An evaluation of a new adapter."""
    tenant, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    digest = platform.models.get("tiny-base").digest
    adapter = add_adapter(platform, tenant.id, name=name, stage="production", loaded=False, base_digest=digest)
    return evaluations.request(platform, tenant.id, adapter)


def test_evaluations_wait_for_a_webserver_that_is_away(fresh_platform: Platform, instance: dg.DagsterInstance) -> None:
    orders = [ordered(fresh_platform) for _ in range(2)]
    with fresh_platform.engine.begin() as conn:
        for each in orders:
            held = {"attempt": 1, "pool": "local", "num_gpus": 1, "granted_at": fresh_platform.clock(), "kind": "evaluate"}
            conn.execute(sa.insert(reservations).values(job_id=each.job_id, evaluation_id=each.id, **held))
    asked: list[str] = []

    class Refusing(DagsterLaunches):
        def launch(self, request: dg.RunRequest) -> str:
            asked.append(str(request.run_key))
            return super().launch(request)

    launches = Refusing("http://127.0.0.1:9", token="t")
    listener = QueueListener(fresh_platform, instance, launches)
    pauses = []
    for _ in range(3):
        assert listener.look() == []
        pauses.append(listener.pause_s)
    launches.close()
    assert (len(asked), pauses) == (3, [2.0, 4.0, 8.0]), "one launch in each look"


def test_notifications_do_not_put_off_the_look_for_dead_runs(
    fresh_platform: Platform, instance: dg.DagsterInstance, submit: Callable[[], tuple[str, str]]
) -> None:
    launches = Launching()
    listener = QueueListener(fresh_platform, instance, launches, open_look_s=1.5)
    listener.look()
    _, job_id = submit()
    create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": f"{job_id}#prepare0"}, status=dg.DagsterRunStatus.FAILURE)

    def replaced() -> bool:
        listener.look()
        return launches.asked == [f"{job_id}#prepare1"]

    until(replaced, 20)


def test_an_ordered_evaluation_is_heard_and_requested_once(
    fresh_platform: Platform, instance: dg.DagsterInstance, heard: list[float]
) -> None:
    before = len(heard)
    order = ordered(fresh_platform)
    until(lambda: len(heard) > before)
    launches = Launching()
    listener = QueueListener(fresh_platform, instance, launches)
    listener.look()
    assert launches.asked == [f"{order.id}#0"]
    create_run_for_test(instance, job_name="reevaluate", tags={"dagster/ft_run_key": f"{order.id}#0"}, status=dg.DagsterRunStatus.STARTED)
    listener.look()
    assert len(launches.asked) == 1
