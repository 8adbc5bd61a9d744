"""A job that ends with an earlier one's adapter serves it, or leaves it as it was."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import service as adapters
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Replica
from control_plane.serving import rollout
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from core.errors import FtError
from core.telemetry import provenance
from engine.evals.gate.verdict import Verdict
from engine.evals.scoring.report import EvalReport
from tests.support.jobs.finished_job import COMMIT, prepare
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

REPORT = EvalReport(
    base_model="tiny", base_digest="b", adapter_manifest_sha256="a", suite_digest="s", adapter_applied=True, max_logit_difference=1.0,
    literal=True, scores=(), golden_faults=(), samples=(), seconds=1.0,
)  # fmt: skip


class Server:
    """A fleet of one that does what the test says when it is given an adapter."""

    def __init__(self, on_load: Callable[[], None] = lambda: None) -> None:
        self.on_load = on_load
        self.served: dict[str, str] = {}

    def replicas(self, also: Sequence[str] = ()) -> list[Replica]:
        return [Replica(url="http://one", ready=True, base="tiny", adapters=self.served)]

    def load(self, url: str, name: str, directory: Path) -> None:
        self.on_load()
        self.served[name] = str(directory)

    def probe(self, url: str, name: str) -> float:
        assert name in self.served
        return 0.0

    def unload(self, url: str, name: str) -> None:
        self.served.pop(name, None)


@pytest.fixture(autouse=True)
def installed_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FT_COMMIT", COMMIT)
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], base: Path) -> Platform:
    return replace(new_platform(drain_s="0"), models=Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)}))


@pytest.fixture
def twice(platform: Platform, base: Path, write_chat_rows: Callable[..., Path], tmp_path: Path) -> tuple[str, str, str]:
    """A tenant, the adapter in draft of its finished job, and a second job that asks for the same, not prepared yet."""
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(platform, owner.id, stream, filename="rows.jsonl", purpose="fine-tune").id

    def submitted(number: str) -> str:
        body = {"model": "tiny", "training_file": file, "seed": 5, "metadata": {"n": number}}
        return str(jobs.submit(platform, owner.id, JobRequest.from_body(body)).job.id)

    first = submitted("1")
    prepare(platform, owner.id, first)
    directory = build_tiny_adapter(tmp_path / "adapter", base, base_name="trained-at", seed=1)
    made, _ = adapters.register(
        platform, tenant=owner.id, job_id=first, directory=directory, report=REPORT, verdict=Verdict(outcome="passed", findings=()),
        eval_report_key="k",
    )  # fmt: skip
    assert made.stage == "draft"
    with platform.engine.begin() as conn:
        for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
            transition(conn, first, state, message="")
        transition(conn, first, JobState.SUCCEEDED, message="", adapter_id=made.id, fine_tuned_model=made.name)
    return owner.id, made.id, submitted("2")


def row(platform: Platform, job_id: str) -> Any:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()


def test_the_adapter_of_the_earlier_job_is_served_if_the_job_asks_for_that(platform: Platform, twice: tuple[str, str, str]) -> None:
    tenant, adapter_id, second = twice
    server = Server()
    prepare(replace(platform, fleet=server), tenant, second)
    found = adapters.get_adapter(platform, tenant, adapter_id)
    assert row(platform, second).state == "succeeded"
    assert (found.stage, found.observed) == ("production", "loaded")
    assert set(server.served) == {found.name}


def test_a_job_that_is_cancelled_while_the_adapter_is_loaded_leaves_it_unserved(platform: Platform, twice: tuple[str, str, str]) -> None:
    tenant, adapter_id, second = twice
    cancelled: list[str] = []
    server = Server(on_load=lambda: cancelled.append(jobs.cancel(platform, tenant, second).job.state))
    prepare(replace(platform, fleet=server), tenant, second)
    found = adapters.get_adapter(platform, tenant, adapter_id)
    assert row(platform, second).state == "cancelled"
    assert (found.stage, found.promoted_at, found.desired) == ("staging", None, "unloaded")
    rollout.reconcile(replace(platform, fleet=server))
    assert found.name not in server.served


def test_a_job_whose_adapter_no_server_takes_fails_as_a_trained_one_would(platform: Platform, twice: tuple[str, str, str]) -> None:
    tenant, adapter_id, second = twice

    def refuse() -> None:
        raise FtError("no room for rank 8", code="adapter_refused")

    prepare(replace(platform, fleet=Server(on_load=refuse)), tenant, second)
    ended = row(platform, second)
    assert (ended.state, ended.error["code"], ended.fine_tuned_model) == ("failed", "not_servable", None)
    assert "no room for rank 8" in ended.error["message"]
    assert adapters.get_adapter(platform, tenant, adapter_id).stage == "staging"
