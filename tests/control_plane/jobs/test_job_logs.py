"""The log of a training as its tenant reads it: while training runs, from where a reader stopped, and as a whole afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from control_plane.attempts import service as attempts
from control_plane.jobs import job_logs
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from core.errors import NotFound, Unavailable
from core.layout import attempt_prefix
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import Job, until
from tests.support.processes.scripted_training import Scenario


@pytest.fixture
def followed(new_job: Callable[..., Job]) -> Iterator[tuple[Job, httpx.Client]]:
    job = new_job()
    key = tenants.create_key(job.platform, job.tenant, name="k", scopes=["read"]).secret
    root = f"{job.platform.settings.internal_url}/v1/fine_tuning/jobs/{job.id}"
    with httpx.Client(base_url=root, headers={"authorization": f"Bearer {key}"}, timeout=30) as client:
        yield job, client


def test_a_log_is_streamed_while_training_runs_and_taken_up_where_it_broke_off(followed: tuple[Job, httpx.Client]) -> None:
    job, client = followed
    missing = client.get("/logs")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "log_not_found")
    with client.stream("GET", "/logs", params={"follow": "true"}) as answer:  # begins before the attempt does
        assert answer.headers["content-type"].startswith("text/plain")
        held, thread, endings = job.following(Scenario(steps=6, hold_at=3, says="password=hunter2"))
        arriving = answer.iter_lines()
        assert [next(arriving) for _ in range(3)] == [f"step {i} password=***" for i in (1, 2, 3)]
        assert not endings
        assert job.platform.objects.exists(f"{attempt_prefix(job.tenant, job.id, 1)}/train.log") is False
    so_far = client.get("/logs")  # the reader is gone, the training is not
    assert (so_far.headers["x-log-attempt"], so_far.headers["x-log-offset"]) == ("1", "0")
    (job.work_dir / "go").touch()
    with client.stream("GET", "/logs", params={"follow": "true", "attempt": 1, "offset": len(so_far.content)}) as answer:
        assert answer.headers["x-log-offset"] == str(len(so_far.content))
        until(lambda: endings)
        attempts.finish(job.platform, held, endings[0])
        rest = answer.read()
    thread.join(timeout=20)
    assert (so_far.content + rest).decode().splitlines() == [f"step {i} password=***" for i in range(1, 7)]
    assert client.get("/logs").content == so_far.content + rest
    assert client.get("/logs", params={"offset": 10**9}).content == b""
    for wrong in ({"attempt": 2}, {"attempt": 0}, {"attempt": 2, "follow": "true"}):
        assert client.get("/logs", params=wrong).status_code == 404, wrong


def test_no_log_of_another_tenant_is_read(new_job: Callable[..., Job]) -> None:
    job = new_job()
    with pytest.raises(NotFound, match="no fine-tuning job"):
        job_logs.read(job.platform, "somebody-else", job.id)
    with pytest.raises(NotFound, match="no log"):
        job_logs.read(job.platform, job.tenant, job.id)


class TakesNoWholeLog(LocalObjectStore):
    def put_bytes(self, key: str, data: bytes) -> None:
        if key.endswith("/train.log"):
            raise Unavailable("the object store is away", code="object_store_unavailable")
        super().put_bytes(key, data)


def test_a_job_ends_also_where_its_log_stays_in_pieces(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job(TakesNoWholeLog(tmp_path / "objects"))
    assert job.train(Scenario(steps=2, says="once"))[1] is JobState.EVALUATING
    excerpt = job_logs.read(job.platform, job.tenant, job.id)
    assert (excerpt.data, excerpt.is_over) == (b"step 1 once\nstep 2 once\n", True)
