"""MLflow on a real store in a file: runs, metrics, resumed attempts, and a store that is not there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.platform.protocols import TrackedRun
from resources.object_store import LocalObjectStore
from resources.tracking.mlflow_tracker import MAX_FILE_BYTES, MAX_QUEUED, MAX_UPLOADS, MlflowRunLog, MlflowTracker, file_of

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own: it uses what SQLAlchemy 2.1 has deprecated


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store of the module's own: making one takes seconds."""
    before = dict(os.environ)
    directory = tmp_path_factory.mktemp("mlflow")
    (directory / "mlflow.db.draft").write_text("of a process that was killed while it made the store")
    os.environ["FT_OBJECT_STORE"] = (directory / "objects").as_uri()  # where MLflow itself finds the files
    yield f"sqlite:///{directory}/mlflow.db"
    assert sorted(p.name for p in directory.iterdir()) == ["mlflow.db", "mlflow.db.lock", "objects"]
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def runs_of(uri: str) -> Callable[[str], list[Any]]:
    def find(tenant: str) -> list[Any]:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(tenant)
        return [] if experiment is None else list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]))

    return find


def objects_of(uri: str) -> Path:
    """The directory of the object store beside a store."""
    file = file_of(uri)
    assert file is not None
    return file.parent / "objects"


def tracker_of(uri: str) -> MlflowTracker:
    return MlflowTracker(uri=uri, objects=LocalObjectStore(objects_of(uri)))


def run(tenant: str, *, attempt: int = 1) -> TrackedRun:
    tags, params = {"tenant": tenant, "dataset": "ds_1"}, {"optimization.learning_rate": "0.001"}
    return TrackedRun(tenant=tenant, job_id="ftjob-1", attempt=attempt, tags=tags, params=params)


def lines(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": s, "total_steps": 9, "time": 1000.0 + s, "train_loss": 1 / s, "mfu": None, "rewards/margins": 0.1 * s, "odd(name)": 1}
        for s in range(first, last + 1)
    ]


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    return [(m.step, m.value) for m in MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)]


def test_an_attempt_is_one_run_with_its_tags_settings_and_every_step(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    tracker = tracker_of(uri)
    log = tracker.begin(run("acme"))
    log.log(lines(1, 3))
    log.log([{"step": 3, "time": 1003.5, "valid_loss": 0.5}])
    log.end(outcome="succeeded")
    assert log.flush(timeout_s=60.0) and log.problem() is None
    (found,) = runs_of("acme")
    assert (found.info.run_name, found.info.status) == ("ftjob-1-a1", "FINISHED")
    assert found.data.params == {"optimization.learning_rate": "0.001"}
    tags = {k: v for k, v in found.data.tags.items() if k.startswith("ft.")}
    assert tags == {"ft.tenant": "acme", "ft.dataset": "ds_1", "ft.job": "ftjob-1", "ft.attempt": "1", "ft.outcome": "succeeded"}
    assert history(uri, found.info.run_id, "train_loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert history(uri, found.info.run_id, "valid_loss") == [(3, 0.5)]
    assert set(found.data.metrics) == {"train_loss", "valid_loss", "rewards/margins", "odd_name_"}


def test_a_resumed_attempt_lies_under_the_first_and_a_second_follower_goes_on_in_the_same_run(
    uri: str, runs_of: Callable[[str], list[Any]]
) -> None:
    tracker = tracker_of(uri)
    for attempt, (first, last), outcome in ((1, (1, 2), "preempted"), (2, (2, 3), "node_lost"), (2, (3, 4), "succeeded")):
        log = tracker.begin(run("resumed", attempt=attempt))
        log.log(lines(first, last))
        log.end(outcome=outcome)
        assert log.flush(timeout_s=60.0) and log.problem() is None
    one, two = runs_of("resumed")
    assert (one.info.status, two.info.status) == ("KILLED", "FINISHED")
    assert two.data.tags["mlflow.parentRunId"] == one.info.run_id
    assert "mlflow.parentRunId" not in one.data.tags
    assert [s for s, _ in history(uri, two.info.run_id, "train_loss")] == [2, 3, 4], "a line that is written twice counts once"


def test_a_tracker_that_is_away_neither_delays_nor_fails_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    log = MlflowRunLog(
        uri=f"sqlite:///{blocked}/mlflow.db", objects=LocalObjectStore(tmp_path / "objects"), run=run("away"), problem_after_s=0.0
    )
    log.start()
    deadline = time.monotonic() + 60
    while log.problem() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    log.log(lines(1, 3))
    log.end(outcome="succeeded")
    assert "Error" in str(log.problem())


def test_what_a_store_cannot_take_in_time_is_dropped_and_counted(uri: str) -> None:
    log = MlflowRunLog(uri=uri, objects=LocalObjectStore(objects_of(uri)), run=run("full"))  # not started: nobody takes from the queue
    log.log([{"step": i, "train_loss": 1.0} for i in range(MAX_QUEUED + 5)])
    assert "5 lines of metrics were dropped" in str(log.problem())


def test_a_run_whose_follower_died_is_over_when_the_next_attempt_begins(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    died = tracker_of(uri).begin(run("orphan"))
    while not runs_of("orphan"):
        time.sleep(0.05)
    log = tracker_of(uri).begin(run("orphan", attempt=2))
    log.end(outcome="succeeded")
    assert log.flush(timeout_s=60.0)
    assert [r.info.status for r in runs_of("orphan")] == ["FAILED", "FINISHED"]
    died.end(outcome="node_lost")
    assert died.flush(timeout_s=60.0)


def stored(uri: str, run_id: str, folder: str | None = None) -> dict[str, bytes]:
    """The files of a run, by path."""
    from mlflow.artifacts import download_artifacts
    from mlflow.tracking import MlflowClient

    found: dict[str, bytes] = {}
    for info in MlflowClient(tracking_uri=uri).list_artifacts(run_id, folder):
        if info.is_dir:
            found |= stored(uri, run_id, info.path)
        else:
            found[info.path] = Path(download_artifacts(run_id=run_id, artifact_path=info.path, tracking_uri=uri)).read_bytes()
    return found


def test_a_run_has_its_files_and_one_that_has_ended_gets_more_without_running_again(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    tracker = tracker_of(uri)
    log = tracker.begin(run("files"))
    log.attach({"spec.json": b"{}", "model/adapter_config.json": b'{"r": 8}', "huge.csv": b"x" * (MAX_FILE_BYTES + 1)})
    log.log(lines(1, 2))
    log.end(outcome="succeeded")
    assert "huge.csv (16777217 bytes; limit 20 files of 16777216 bytes)" in str(log.problem())
    tracker.flush(timeout_s=60.0)
    (ended,) = runs_of("files")
    assert stored(uri, ended.info.run_id) == {"spec.json": b"{}", "model/adapter_config.json": b'{"r": 8}'}
    tracker.attach(run("files"), {"evaluation/report.md": b"better"})
    tracker.attach(run("files", attempt=7), {"evaluation/report.md": b"of an attempt that was never tracked"})
    tracker.flush(timeout_s=60.0)
    (still,) = runs_of("files")
    assert (still.info.status, still.info.end_time) == ("FINISHED", ended.info.end_time)
    assert still.data.tags["ft.outcome"] == "succeeded"
    assert stored(uri, still.info.run_id)["evaluation/report.md"] == b"better"
    files = {str(path.relative_to(objects_of(uri))) for path in objects_of(uri).rglob("*.md")}
    assert files == {f"tenants/files/mlflow/{ended.info.run_id}/artifacts/evaluation/report.md"}, "an object of the tenant"


@pytest.fixture
def set_uri(uri: str) -> Iterator[None]:
    """``load_table`` searches in the store of the process."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    yield
    mlflow.set_tracking_uri("")


@pytest.mark.usefixtures("set_uri")
def test_a_table_is_read_and_compared_by_mlflow_and_replaced_by_a_later_one(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    from mlflow.tracking import MlflowClient

    tracker = tracker_of(uri)
    for attempt in (1, 2):
        log = tracker.begin(run("tables", attempt=attempt))
        log.attach({}, {"other.json": [{"a": attempt}]})
        log.end(outcome="succeeded")
        tracker.flush(timeout_s=60.0)
    for gain in (0.1, 0.25):
        tracker.attach(run("tables"), {}, {"evaluation/scores.json": [{"suite": "golden", "gain": gain}, {"suite": "mmlu", "gain": None}]})
        tracker.flush(timeout_s=60.0)
    one, two = runs_of("tables")
    client = MlflowClient(tracking_uri=uri)
    read = client.load_table(one.info.experiment_id, "evaluation/scores.json", extra_columns=["run_id"])
    assert read["run_id"].tolist() == [one.info.run_id] * 2, "the later evaluation replaces the earlier one"
    assert read["suite"].tolist() == ["golden", "mmlu"] and read["gain"].tolist()[0] == 0.25
    both = client.load_table(one.info.experiment_id, "other.json", extra_columns=["run_id"])
    assert dict(zip(both["run_id"], both["a"], strict=True)) == {one.info.run_id: 1, two.info.run_id: 2}


def test_a_store_that_takes_no_files_has_every_number_and_the_end(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    (objects_of(uri) / "tenants").mkdir(parents=True, exist_ok=True)
    (objects_of(uri) / "tenants" / "nofiles").write_text("where the directory of the tenant's files would be")
    tracker = tracker_of(uri)
    log = tracker.begin(run("nofiles"))
    log.attach({"spec.json": b"{}"})
    log.log(lines(1, 2))
    deadline = time.monotonic() + 60
    while log.problem() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    log.end(outcome="succeeded")
    tracker.flush(timeout_s=60.0)
    assert "spec.json" in str(log.problem()) and "in 3 attempts" in str(log.problem())
    (found,) = runs_of("nofiles")
    assert found.info.status == "FINISHED"
    assert history(uri, found.info.run_id, "train_loss") == [(1, 1.0), (2, 0.5)]


@pytest.mark.slow
def test_each_file_has_its_own_tries(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    (objects_of(uri) / "tenants").mkdir(parents=True, exist_ok=True)
    (objects_of(uri) / "tenants" / "tries").write_text("where the directory of the tenant's files would be")
    log = tracker_of(uri).begin(run("tries"))
    log.attach({"first.json": b"{}", "second.json": b"{}"})
    deadline = time.monotonic() + 120
    while "second.json" not in str(log.problem()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    log.end(outcome="succeeded")
    log.flush(timeout_s=60.0)
    assert sum("retrying in" in record.getMessage() for record in caplog.records) == 2 * (MAX_UPLOADS - 1)


def test_what_ended_runs_have_on_its_way_is_waited_for_once(uri: str, runs_of: Callable[[str], list[Any]]) -> None:
    tracker = tracker_of(uri)
    for attempt in (1, 2):
        log = tracker.begin(run("flushed", attempt=attempt))
        log.log(lines(1, 2))
        log.end(outcome="succeeded")
    tracker.flush(timeout_s=60.0)
    assert [r.info.status for r in runs_of("flushed")] == ["FINISHED", "FINISHED"]


def test_who_follows_a_job_waits_for_no_store_and_hears_once_of_an_end_that_it_did_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        tracker = MlflowTracker(uri=f"http://127.0.0.1:{silent.getsockname()[1]}", objects=LocalObjectStore(tmp_path))
        log = tracker.begin(run("silent"))
        log.log(lines(1, 3))
        log.end(outcome="succeeded")
        for _ in range(2):
            tracker.flush(timeout_s=0.0)
        assert sum("the store did not accept it" in record.getMessage() for record in caplog.records) == 1
        assert not log.flush(timeout_s=0.0), "it is still on its way"
