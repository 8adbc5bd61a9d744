"""Another launcher in place of the local one: each workload has a root directory of its own and shares no path with anything, so that all
it has arrives through the API and a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadStatus
from core.workload import Workload
from resources.launcher import LocalGangs
from resources.object_store.s3 import S3ObjectStore
from tests.support.jobs.followed_jobs import Job, plain_weights
from tests.support.processes.scripted_training import Scenario
from tests.support.processes.workload_logs import log_of
from tests.support.servers.checked_s3 import checked_s3


class SeparateNodes:
    """Every workload on a node of its own: no directory outlives it or is shared with another."""

    def __init__(self, root: Path, scenario: Callable[[str], Scenario]) -> None:
        self._root, self._scenario = root, scenario
        self.names: list[str] = []

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        self.names.append(workload.name)
        self._scenario(workload.name).write(self.node(workload.name) / "jobs" / workload.job)
        scripted = replace(workload, command=("tests.support.processes.scripted_agent",))
        return self._of(workload.name).start_or_adopt(scripted, token=token)

    def get(self, name: str) -> WorkloadStatus:
        return self._of(name).get(name)

    def list(self) -> Sequence[WorkloadStatus]:
        return [self.get(name) for name in self.names]

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        return self._of(name).stop(name, grace_s=grace_s)

    def read_log(self, name: str) -> bytes:
        return log_of(self.node(name) / "launcher", name)

    def forget(self, name: str) -> None:
        self._of(name).forget(name)

    def node(self, name: str) -> Path:
        return self._root / name

    def _of(self, name: str) -> LocalGangs:
        return LocalGangs(self.node(name) / "launcher")


SECRET = "hunter2-of-the-bucket"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3ObjectStore]:
    """A bucket whose credentials are in the environment, as in production."""
    given = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with checked_s3() as (host, port):
        url = f"http://{host}:{port}"
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="objects")
        yield S3ObjectStore.connect(bucket="objects", endpoint_url=url)


@pytest.mark.slow
def test_a_job_goes_from_node_to_node_with_nothing_but_the_api_and_a_bucket(
    new_job: Callable[..., Job], bucket: S3ObjectStore, tmp_path: Path
) -> None:
    early = {"a1": {"step": 5, "outcome": "kill"}, "a2": {"step": 7, "outcome": "oom"}}
    nodes = SeparateNodes(tmp_path, lambda name: Scenario(steps=9, each_stored=False, step_s=0.1, end_at=early.get(name[-2:], {})))
    job = new_job(bucket)
    job.launcher = nodes  # type: ignore[assignment]
    assert [job.run() for _ in range(3)] == [JobState.QUEUED, JobState.QUEUED, JobState.EVALUATING]
    assert job.from_steps() == [0, 4, 6]
    assert job.weights() == plain_weights(9)
    assert not job.work_dir.exists(), "nothing was written where the step runs"
    inputs = [sorted(p.name for p in (nodes.node(name) / "inputs").rglob("*") if p.is_file()) for name in nodes.names]
    assert inputs[0] == inputs[1] == inputs[2] != [], "each node fetched the same files, named by their digests"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()], "no node was given the bucket's credentials"
