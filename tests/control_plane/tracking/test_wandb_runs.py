"""Jobs at Weights & Biases: what is sent and when, with which key, and what an outage changes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.transitions import record, transition
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_events import as_reported, metrics_event
from control_plane.platform.job_states import JobState
from control_plane.tenants import audit_log
from control_plane.tenants import service as tenants
from control_plane.tracking import rules, service, wandb_runs
from control_plane.tracking.tables import integrations
from control_plane.tracking.tables import wandb_runs as table
from control_plane.worker.periodic_work import FREQUENT
from core.errors import InvalidRequest, NotFound
from ft_client import FtClient
from resources.tracking.wandb_server import HttpWandb
from tests.support.platform.background_worker import work_off
from tests.support.servers.served_app import served
from tests.support.tracking.wandb_server import KEY, StoredRun, WandbServer, wandb_server

WANDB: Mapping[str, Any] = {"project": "bots", "name": "first", "tags": ["lora"]}


@dataclass(kw_only=True)
class Sending:
    """A tenant with a stored key, and a job whose metrics go to `server`."""

    platform: Platform
    now: list[datetime]
    tenant: str
    job_id: str
    server: WandbServer

    @property
    def run(self) -> StoredRun:
        return self.server.runs["acme", "bots", self.job_id]

    def report(self, *lines: Mapping[str, Any]) -> None:
        with self.platform.engine.begin() as conn:
            for line in lines:
                record(conn, self.job_id, metrics_event(as_reported(line)), now=self.now[0])

    def enter(self, *states: JobState) -> None:
        with self.platform.engine.begin() as conn:
            for state in states:
                transition(conn, self.job_id, state, message=f"now {state}", now=self.now[0])

    def send(self, *, after: timedelta = timedelta()) -> int:
        """One round of the worker, `after` a while; how many jobs had something to send."""
        self.now[0] += after
        due = wandb_runs.add_due(self.platform)
        work_off(self.platform)
        return due

    @property
    def next_at(self) -> datetime | None:
        with self.platform.engine.connect() as conn:
            found: datetime | None = conn.execute(sa.select(table.c.next_at)).scalar_one()
        return found

    def events(self, prefix: str = "wandb_") -> list[tuple[str | None, str, Any]]:
        found = jobs.list_events(self.platform, self.tenant, self.job_id, limit=100).items
        return [(e.code, e.message, e.data) for e in reversed(found) if (e.code or "").startswith(prefix)]


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as running:
        yield running


@pytest.fixture
def sending(new_platform: Callable[..., Platform], server: WandbServer, write_chat_rows: Callable[..., Path]) -> Sending:
    now = [utc_now()]
    platform = replace(new_platform(), wandb=HttpWandb(url=server.url), clock=lambda: now[0])
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    service.set_wandb(platform, owner.id, api_key=KEY)
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    body = {"model": "tiny-base", "training_file": file.id, "seed": 7, "integrations": [{"type": "wandb", "wandb": WANDB}]}
    job = jobs.submit(platform, owner.id, JobRequest.from_body(body)).job
    return Sending(platform=platform, now=now, tenant=owner.id, job_id=job.id, server=server)


def steps(first: int, last: int) -> Sequence[Mapping[str, Any]]:
    return [{"step": n, "total_steps": 9, "loss": 1 / n, "mfu": None, "time": 1000.0 + n} for n in range(first, last + 1)]


def test_a_job_is_one_run_that_grows_while_it_trains_and_ends_with_it(sending: Sending) -> None:
    assert sending.send() == 0, "a job in the queue has nothing to send"
    assert sending.server.requests == []
    sending.enter(JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING)
    sending.report(*steps(1, 2), {"step": 2, "eval_loss": 0.5, "perplexity": 1.6, "time": 1002.5})
    assert (sending.send(), sending.send()) == (1, 0), "nothing is new, and 15 s are not over"
    assert (sending.run.name, sending.run.tags, sending.run.exit_code) == ("first", ["lora"], None)
    assert sending.run.config["seed"] == {"value": 7} and sending.run.config["model"] == {"value": "tiny-base"}
    sending.report(*steps(3, 3))
    assert sending.send(after=rules.EVERY) == 1
    shown = [{k: v for k, v in line.items() if k not in ("_runtime", "_timestamp")} for line in sending.run.history]
    assert shown == [
        {"_step": 0, "step": 1, "train_loss": 1.0},
        {"_step": 1, "step": 2, "train_loss": 0.5},
        {"_step": 2, "step": 2, "valid_loss": 0.5, "valid_perplexity": 1.6},
        {"_step": 3, "step": 3, "train_loss": pytest.approx(1 / 3)},
    ]
    assert (sending.run.summary["valid_loss"], sending.run.summary["train_loss"]) == (0.5, pytest.approx(1 / 3)), "the last of each"
    sending.enter(JobState.CANCELLED)
    sending.send(after=rules.EVERY)
    assert sending.run.exit_code == 1
    assert sending.send(after=timedelta(days=1)) == 0, "nothing is left to send"
    address = f"{sending.server.url}/acme/bots/runs/{sending.job_id}"
    assert sending.events() == [("wandb_run_created", f"Metrics are sent to {address}", {"url": address})]


def test_a_long_job_is_sent_in_pieces_without_a_pause(sending: Sending) -> None:
    num_steps = 2 * wandb_runs.MAX_LINES + 1
    many = f"""INSERT INTO job_events (id, job_id, level, type, code, message, data, created_at)
        SELECT 'many-' || n, '{sending.job_id}', 'info', 'metrics', 'metrics', 'm', jsonb_build_object('step', n), now()
        FROM generate_series(1, {num_steps}) n"""
    with sending.platform.engine.begin() as conn:
        conn.execute(sa.text(many))
    sending.enter(JobState.CANCELLED)
    rounds = 0
    while sending.send():
        rounds += 1
    assert ([line["step"] for line in sending.run.history], rounds) == (list(range(1, num_steps + 1)), 3)
    assert sending.run.exit_code == 1


def test_an_outage_changes_nothing_for_the_job_and_ends_with_what_was_not_sent(sending: Sending) -> None:
    sending.enter(JobState.QUEUED, JobState.PROVISIONING, JobState.RUNNING)
    sending.report(*steps(1, 2))
    sending.send()
    sending.server.answers["file_stream"] = (503, "down")
    sending.report(*steps(3, 5))
    sending.send(after=rules.EVERY)
    assert [code for code, _, _ in sending.events()] == ["wandb_run_created", "wandb_delayed"]
    assert "answers with status 503" in sending.events()[1][1]
    sending.enter(JobState.CANCELLED)
    num_tries, began = 1, sending.now[0]
    while (next_at := sending.next_at) is not None:
        sending.now[0] = next_at
        wandb_runs.send(sending.platform, sending.tenant, sending.job_id)
        num_tries += 1
    assert timedelta(hours=24) <= sending.now[0] - began < timedelta(hours=25)
    assert 45 < num_tries < 65, "pauses double up to 30 minutes"
    (*_, (code, message, data)) = sending.events()
    assert code == "wandb_incomplete" and message.startswith("The metrics of steps 3 to 5 were not sent")
    assert {name: data[name] for name in ("num_lines", "first_step", "last_step")} == {"num_lines": 3, "first_step": 3, "last_step": 5}
    assert jobs.get(sending.platform, sending.tenant, sending.job_id).job.error is None
    sending.server.answers.clear()
    assert sending.send(after=timedelta(days=1)) == 0 and len(sending.run.history) == 2


def test_sending_goes_on_where_it_was_after_an_outage(sending: Sending) -> None:
    sending.report(*steps(1, 2))
    sending.server.answers["/graphql"] = (500, "")
    sending.send()
    assert sending.server.runs == {}
    sending.report(*steps(3, 3))
    sending.server.answers.clear()
    sending.send(after=rules.EVERY)
    assert [line["step"] for line in sending.run.history] == [1, 2, 3]
    assert [code for code, _, _ in sending.events()] == ["wandb_delayed", "wandb_run_created"]
    sending.server.answers["file_stream"] = (500, "")
    sending.report(*steps(4, 4))
    sending.send(after=rules.EVERY)
    assert [code for code, _, _ in sending.events()][-1] == "wandb_delayed", "each outage is reported once"


def test_a_lines_task_that_died_after_sending_sends_them_again_in_their_place(sending: Sending) -> None:
    sending.report(*steps(1, 2))
    sending.send()
    with sending.platform.engine.begin() as conn:
        conn.execute(sa.update(table).values(sent_seq=0, sent_lines=0, next_at=sending.now[0]))
    assert sending.send() == 1
    assert [line["step"] for line in sending.run.history] == [1, 2]


def test_a_replaced_key_is_used_by_the_next_request(sending: Sending) -> None:
    service.set_wandb(sending.platform, sending.tenant, api_key="revoked-" * 5)
    sending.report(*steps(1, 1))
    sending.send()
    assert "status 401" in sending.events()[0][1] and "revoked-" not in str(sending.events())
    service.set_wandb(sending.platform, sending.tenant, api_key=KEY)
    sending.send(after=rules.EVERY)
    assert len(sending.run.history) == 1
    service.remove_wandb(sending.platform, sending.tenant)
    sending.report(*steps(2, 2))
    sending.send(after=rules.EVERY)
    assert "no key is stored" in sending.events()[-1][1] and len(sending.run.history) == 1


def test_another_tenants_task_sends_nothing(sending: Sending) -> None:
    sending.report(*steps(1, 1))
    wandb_runs.send(sending.platform, "somebody-else", sending.job_id)
    assert sending.server.requests == []


def test_the_round_of_the_worker_adds_what_is_due(sending: Sending) -> None:
    sending.report(*steps(1, 1))
    assert "jobs with metrics for W&B: 1" in FREQUENT.run(sending.platform)
    assert "jobs with metrics for W&B: 0" in FREQUENT.run(replace(sending.platform, wandb=None))


def test_a_key_is_set_seen_by_its_end_and_never_read_again(sending: Sending) -> None:
    platform = sending.platform
    key = tenants.create_key(platform, sending.tenant, name="admin", scopes=["admin"]).secret
    with served(create_app(platform)) as url, FtClient(base_url=url, api_key=key) as client:
        stored = client.wandb.set(api_key=f" {KEY}\n")
        assert stored == client.wandb.retrieve() and (stored["type"], stored["hint"]) == ("wandb", f"...{KEY[-4:]}")
        assert KEY not in json.dumps(stored)
        changes = list(audit_log.every(platform, sending.tenant, audit_log.Wanted()))
        assert KEY not in str(changes) and "integration" in {line.object_type for line in changes}
        with platform.engine.connect() as conn:
            (sealed,) = conn.execute(sa.select(integrations.c.sealed_key)).scalars()
        assert KEY not in sealed and sealed not in str(changes)
        assert client.wandb.remove()["deleted"] is True
        with pytest.raises(NotFound) as missing:
            client.wandb.retrieve()
        assert missing.value.code == "integration_not_found"
        with pytest.raises(InvalidRequest) as short:
            client.wandb.set(api_key="too short")
        assert short.value.code == "invalid_integration_key"


def test_openais_client_names_the_integration_and_reads_it_back(sending: Sending) -> None:
    file = jobs.row(sending.platform, sending.tenant, sending.job_id).training_file
    key = tenants.create_key(sending.platform, sending.tenant, name="write", scopes=["write"]).secret
    with served(create_app(sending.platform)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        made = client.fine_tuning.jobs.create(
            model="tiny-base", training_file=file, integrations=[{"type": "wandb", "wandb": {"project": "bots", "entity": "team"}}]
        )
        (found,) = client.fine_tuning.jobs.retrieve(made.id).integrations or ()
    assert (found.type, found.wandb.project, found.wandb.entity) == ("wandb", "bots", "team")
    sending.job_id = made.id
    sending.report(*steps(1, 1))
    sending.send()
    assert len(sending.server.runs["team", "bots", made.id].history) == 1


def test_a_job_needs_a_stored_key_and_an_installation_that_sends(sending: Sending) -> None:
    body = {"model": "tiny-base", "training_file": "file-x", "integrations": [{"type": "wandb", "wandb": WANDB}]}
    request = JobRequest.from_body(body)
    service.remove_wandb(sending.platform, sending.tenant)
    with pytest.raises(InvalidRequest) as missing:
        jobs.submit(sending.platform, sending.tenant, request)
    assert (missing.value.code, missing.value.param) == ("integration_key_missing", "integrations")
    off = replace(sending.platform, wandb=None)
    for refused in (lambda: jobs.submit(off, sending.tenant, request), lambda: service.set_wandb(off, sending.tenant, api_key=KEY)):
        with pytest.raises(InvalidRequest) as unsupported:
            refused()
        assert unsupported.value.code == "unsupported_integration"
    with pytest.raises(NotFound):
        service.remove_wandb(sending.platform, sending.tenant)


NOW = utc_now()


@pytest.mark.parametrize(
    ("failing_for", "pause"),
    [
        (timedelta(0), timedelta(seconds=15)),
        (timedelta(seconds=15), timedelta(seconds=15)),
        (timedelta(minutes=4), timedelta(minutes=4)),
        (timedelta(hours=3), timedelta(minutes=30)),
        (timedelta(hours=24), None),
    ],
)
def test_pauses_double_up_to_half_an_hour_for_a_day(failing_for: timedelta, pause: timedelta | None) -> None:
    assert rules.next_attempt(NOW - failing_for, NOW) == (None if pause is None else NOW + pause)
