"""Both clients against the real API; the examples of the documentation are programs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import FtError, InvalidRequest, NotFound
from ft_client import FtClient
from tests.support.jobs.finished_job import finish
from tests.support.models.tiny_model import build_tiny_model

MODEL = "demo-llama-3m"
DOCS = Path(__file__).resolve().parents[2] / "docs"
NOT_HERE = ("client.chat.", "client.jobs.evaluation(", "matplotlib")
"""What programs use that this platform has not: an inference server, evaluations; and a library that draws."""


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform whose only base model, called as the demo's is, has a real tokenizer and template."""
    directory = build_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    return replace(new_platform(), models=Catalogue({MODEL: ({"id": MODEL, "path": str(directory)}, directory.parent)}))


@pytest.fixture
def ft(api_url: str, api_key: str) -> Iterator[FtClient]:
    with FtClient(base_url=api_url, api_key=api_key) as made:
        yield made


@pytest.fixture
def trainer(platform: Platform, tenant: Tenant) -> Iterator[None]:
    """Whatever the tenant submits is trained at once, as rows and objects tell it."""
    over = threading.Event()

    def train() -> None:
        waiting = sa.select(jobs.c.id).where(jobs.c.tenant_id == tenant.id, jobs.c.state == "validating")
        while not over.wait(0.1):
            with platform.engine.connect() as conn:
                found = list(conn.scalars(waiting))
            for job_id in found:
                with platform.engine.begin() as conn:
                    for step in (5, 10):
                        record(conn, job_id, metrics_event({"step": step, "total_steps": 10, "train_loss": 1.0 / step}))
                finish(platform, tenant.id, job_id)

    thread = threading.Thread(target=train)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.parametrize(("page", "num_programs"), [("client.md", 9), ("notebook.md", 5)])
def test_the_examples_of_the_documentation_run(
    page: str,
    num_programs: int,
    api_url: str,
    api_key: str,
    trainer: None,
    write_chat_rows: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    programs = [program for program in programs if not any(used in program for used in NOT_HERE)]
    assert len(programs) >= num_programs
    monkeypatch.chdir(write_chat_rows(120, name="tickets.jsonl").parent)
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_API_KEY", api_key)
    names: dict[str, object] = {"__name__": "example"}
    try:
        for number, program in enumerate(programs):
            exec(compile(program, f"{page}, program {number}", "exec"), names)
    finally:
        if isinstance(client := names.get("client"), FtClient):
            client.close()
    job = names["job"]
    assert isinstance(job, dict)
    assert job["status"] == "succeeded"


class LosesAnswers(httpx.BaseTransport):
    """The network, which loses the answer to each request for which `is_lost` says so."""

    def __init__(self, is_lost: Callable[[httpx.Request], bool]) -> None:
        self._inner, self._is_lost = httpx.HTTPTransport(), is_lost

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._inner.handle_request(request)
        if self._is_lost(request):
            answer.read()
            answer.close()
            raise httpx.ReadError("the answer was lost", request=request)
        return answer

    def close(self) -> None:
        self._inner.close()


def test_a_submission_whose_answer_was_lost_is_one_job(
    api_url: str, api_key: str, ft: FtClient, write_chat_rows: Callable[..., Path]
) -> None:
    file = ft.files.create(write_chat_rows())
    lost: list[str] = []

    def first_submission(request: httpx.Request) -> bool:
        lost.append(request.headers.get("idempotency-key", ""))
        return len(lost) == 1

    with FtClient(base_url=api_url, api_key=api_key, transport=LosesAnswers(first_submission), backoff_s=0.01) as shaky:
        made = shaky.jobs.create(model=MODEL, training_file=file["id"])
    assert (len(lost), len(set(lost))) == (2, 1)
    assert [j["id"] for j in ft.jobs.list()] == [made["id"]]


def test_an_upload_that_broke_off_goes_on_with_what_is_missing(
    api_url: str, api_key: str, ft: FtClient, write_chat_rows: Callable[..., Path]
) -> None:
    file, part_bytes = write_chat_rows(400), 8192
    num_parts = -(-file.stat().st_size // part_bytes)
    assert num_parts > 3
    sent: list[str] = []

    def from_the_third_part_on(request: httpx.Request) -> bool:
        sent.extend([request.url.path] if request.url.path.endswith("/parts") else [])
        return len(sent) > 2

    shaky = FtClient(base_url=api_url, api_key=api_key, transport=LosesAnswers(from_the_third_part_on), backoff_s=0.01)
    with shaky, pytest.raises(httpx.ReadError) as broken:
        shaky.uploads.send(file, part_bytes=part_bytes)
    upload_id = sent[0].split("/")[3]
    assert upload_id in broken.value.__notes__[0]
    stored = ft.uploads.retrieve(upload_id)
    assert [p["sha256"] for p in stored["parts"]] == [
        hashlib.sha256(file.read_bytes()[n * part_bytes : (n + 1) * part_bytes]).hexdigest() for n in range(3)
    ], "the third part arrived three times, and is there once"
    with pytest.raises(InvalidRequest, match="bytes but upload"):
        ft.uploads.resume(upload_id, write_chat_rows(5, name="other.jsonl"), part_bytes=part_bytes)
    done = ft.uploads.resume(upload_id, file, part_bytes=part_bytes)
    made = done.get("file")
    assert made is not None
    assert made["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert ft.files.wait(made["id"])["status"] == "processed"


def test_a_job_is_listed_followed_and_waited_for(ft: FtClient, write_chat_rows: Callable[..., Path], tmp_path: Path) -> None:
    file = ft.files.create(write_chat_rows())
    job = ft.jobs.create(model=MODEL, training_file=file.id, metadata={"team": "a"})
    assert [j.id for j in ft.jobs.list(metadata={"team": "a"}, limit=1)] == [job.id]
    assert ft.jobs.list(without_metadata=True).all() == []
    assert ft.files.download(file.id, tmp_path / "copy") == file.sha256
    ft.jobs.cancel(job.id)
    said = [e.message for e in ft.jobs.follow(job.id)]
    assert said == [e.message for e in ft.jobs.events(job.id)][::-1]
    assert ft.jobs.wait(job.id, timeout_s=60).status == "cancelled"
    with pytest.raises(NotFound) as missing:
        ft.jobs.retrieve("ftjob-none")
    assert missing.value.request_id is not None
    assert missing.value.request_id.startswith("req_")
    frame = ft.jobs.list().frame()
    assert list(frame["id"]) == [job.id]
    assert list(frame["metadata.team"]) == ["a"]


def test_any_other_call_goes_by_its_path(ft: FtClient) -> None:
    assert ft.request("GET", "/v1/models")["object"] == "list"
    with pytest.raises(FtError, match="no route GET"):
        ft.request("GET", "/v1/nothing")
    assert json.dumps(ft.me.retrieve())
