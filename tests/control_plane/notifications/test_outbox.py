"""What publishes events: changes of jobs and adapters tell of themselves, and mail goes to the members whom it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from email import message_from_bytes
from email.message import Message
from typing import Any

import pytest
import sqlalchemy as sa
from aiosmtpd.controller import Controller

from control_plane.adapters import promotions
from control_plane.adapters.service import set_stage
from control_plane.jobs.sweeps import service as sweeps
from control_plane.jobs.transitions import transition
from control_plane.notifications.outbox import publish
from control_plane.notifications.tables import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Actor, Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import members
from control_plane.tenants.rules import Tenant
from core.errors import Conflict
from engine.adapters.stages import Stage
from resources.mail import SmtpMailer
from tests.support.jobs.finished_job import finish
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.background_worker import work_off

S = JobState


def told(platform: Platform, tenant: Tenant) -> list[tuple[str, dict[str, Any]]]:
    with platform.engine.connect() as conn:
        query = sa.select(outbox.c.type, outbox.c.data).where(outbox.c.tenant_id == tenant.id).order_by(outbox.c.seq)
        return [(kind.rpartition(".")[2], data) for kind, data in conn.execute(query)]


def move(platform: Platform, job_id: str, *states: JobState, **columns: Any) -> None:
    for state in states:
        with platform.engine.begin() as conn:
            transition(conn, job_id, state, message=f"now {state}", **columns)


def test_a_job_tells_of_each_state_that_has_a_type(platform: Platform, tenant: Tenant, job_id: str) -> None:
    move(platform, job_id, S.QUEUED, S.PROVISIONING, S.RUNNING, S.PREEMPTED, S.QUEUED, S.PROVISIONING, S.RUNNING, S.EVALUATING)
    move(platform, job_id, S.FAILED, error={"code": "oom", "message": "told to nobody else", "param": None})
    kinds = [kind for kind, _ in told(platform, tenant) if kind not in ("processed",)]
    assert kinds == ["queued", "running", "preempted", "queued", "running", "evaluating", "failed"]
    assert told(platform, tenant)[-1][1] == {"id": job_id, "status": "failed", "state": "failed", "error_code": "oom"}


def test_a_move_that_is_refused_or_undone_is_told_to_nobody(platform: Platform, tenant: Tenant, job_id: str) -> None:
    before = told(platform, tenant)
    with pytest.raises(Conflict):
        move(platform, job_id, S.RUNNING)
    with platform.engine.connect() as conn:
        transition(conn, job_id, S.QUEUED, message="queued")
        conn.rollback()
    assert told(platform, tenant) == before


def test_a_tenant_tells_of_its_own_within_its_scope(platform: Platform, tenant: Tenant, job_id: str) -> None:
    scoped = platform.in_scope_of(tenant.id, Actor(kind="key", id="key_1"))
    move(scoped, job_id, S.CANCELLED)
    assert told(platform, tenant)[-1][0] == "cancelled"


def test_adapters_tell_of_promotion_deprecation_and_rollback(platform: Platform, tenant: Tenant) -> None:
    names = [f"ft:tiny-base:{tenant.id}:bot:{n}" for n in range(2)]
    ids = [add_adapter(platform, tenant.id, name=name, stage="draft", loaded=True) for name in names]
    for id_ in ids:
        with platform.engine.begin() as conn:
            set_stage(conn, id_, Stage.PRODUCTION, promoted_at=platform.clock())
    promotions.rollback(platform, tenant.id, ids[1])
    promotions.deprecate(platform, tenant.id, ids[0])
    promotions.deprecate(platform, tenant.id, ids[0])
    events = [(kind, data["id"]) for kind, data in told(platform, tenant)]
    assert events == [("promoted", ids[0]), ("promoted", ids[1]), ("rolled_back", ids[1]), ("deprecated", ids[0])]
    assert told(platform, tenant)[0][1] == {"id": ids[0], "stage": "production", "job_id": f"ftjob-{ids[0]}"}


class Mailbox:
    def __init__(self) -> None:
        self.taken: list[Message] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        self.taken.append(message_from_bytes(envelope.content))
        return "250 OK"


class Listening(Controller):
    def _trigger_server(self) -> None:
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@dataclass
class Mailed:
    platform: Platform
    box: Mailbox


@pytest.fixture
def mailed(platform: Platform) -> Iterator[Mailed]:
    """A platform with a mail server, and nothing to be sent."""
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(deliveries))
        conn.execute(sa.delete(outbox))
    box = Mailbox()
    controller = Listening(box, hostname="127.0.0.1", port=0)
    controller.start()
    yield Mailed(replace(platform, mailer=SmtpMailer(url=f"smtp://127.0.0.1:{controller.port}", sender="ft@example.com")), box)
    controller.stop()


def test_members_who_want_it_get_mail_and_money_goes_to_those_who_decide(mailed: Mailed, tenant: Tenant) -> None:
    platform = mailed.platform
    for name, role in (("olga", "owner"), ("max", "member"), ("vera", "viewer")):
        members.add(platform, tenant.id, email=f"{name}@example.com", role=role)
    quiet = members.add(platform, tenant.id, email="quiet@example.com", role="member")
    members.update(platform, tenant.id, quiet.id, notify=False)
    gone = members.add(platform, tenant.id, email="gone@example.com", role="member")
    with platform.engine.begin() as conn:
        publish(conn, tenant.id, "fine_tuning.job.succeeded", "ftjob-1", {"state": "succeeded"}, now=platform.clock())
        publish(conn, tenant.id, "fine_tuning.job.queued", "ftjob-1", now=platform.clock())
        publish(conn, tenant.id, "invoice.issued", "inv_1", {"total_micros": 5}, now=platform.clock())
    members.remove(platform, tenant.id, gone.id)
    work_off(platform)
    got = sorted((str(m["To"]), str(m["Subject"])) for m in mailed.box.taken)
    job, invoice = f"[{tenant.id}] Job ftjob-1 has succeeded", f"[{tenant.id}] Invoice inv_1 is issued"
    assert got == [
        ("max@example.com", job), ("olga@example.com", invoice), ("olga@example.com", job), ("vera@example.com", job),
    ]  # fmt: skip
    with platform.engine.connect() as conn:
        rows = conn.execute(sa.select(deliveries.c.channel, deliveries.c.state).where(deliveries.c.tenant_id == tenant.id)).all()
    assert [tuple(row) for row in rows] == [("email", "delivered")] * 4


@dataclass
class Swept:
    """A sweep of three trials, of a tenant with one member, whose mail goes to `box`."""

    mailed: Mailed
    tenant: str
    sweep_id: str
    job_ids: list[str]

    def end(self, number: int, *, approved: bool = True, failed: bool = False) -> str:
        """End a trial as the gate leaves it; returns its adapter's id."""
        stage = "production" if approved else "quarantined"
        return finish(self.mailed.platform, self.tenant, self.job_ids[number], stage=stage, failed=failed)

    def subjects(self) -> list[str]:
        """Send what is due; returns the subjects of all mail so far."""
        work_off(self.mailed.platform)
        return [" ".join(str(m["Subject"]).split()).removeprefix(f"[{self.tenant}] ") for m in self.mailed.box.taken]


@pytest.fixture
def swept(mailed: Mailed, tenant: Tenant, training_file: str) -> Swept:
    members.add(mailed.platform, tenant.id, email="olga@example.com", role="owner")
    body = {"model": "tiny-base", "training_file": training_file, "sweep": {"parameters": {"learning_rate": [1e-4, 2e-4, 3e-4]}}}
    made = sweeps.create(mailed.platform, tenant.id, body)
    return Swept(mailed, tenant.id, made.id, [str(trial.job_id) for trial in made.trials])


def test_a_sweep_is_mailed_once_when_its_last_trial_has_ended(swept: Swept) -> None:
    platform, now = swept.mailed.platform, swept.mailed.platform.clock()
    adapter_id = swept.end(0, approved=False)
    assert swept.subjects() == [], "the other trials are not over"
    swept.end(1)
    move(platform, swept.job_ids[2], S.FAILED, error={"code": "oom", "message": "m", "param": None})
    assert swept.subjects() == [f"Sweep {swept.sweep_id} has ended"], "both ends are fanned out together"
    (mail,) = swept.mailed.box.taken
    text = str(mail.get_payload()).replace("\r\n", "\n")
    assert "  trials: 3\n" in text and "  approved: 1\n" in text and "  not_approved: 1\n" in text and "  without_model: 1\n" in text
    assert f"`ft sweep best {swept.sweep_id}`" in text
    with platform.engine.begin() as conn:
        publish(conn, swept.tenant, "adapter.quarantined", adapter_id, {"job_id": swept.job_ids[0]}, now=now + timedelta(days=1))
    assert swept.subjects()[1:] == [f"Model {adapter_id} is trained, not approved"], "an evaluation after the sweep"


def test_quarantined_model_of_a_trial_is_not_mailed_and_reaches_webhooks(swept: Swept) -> None:
    platform, url = swept.mailed.platform, "https://203.0.113.9/hook"
    endpoint = {
        "id": "we_1",
        "tenant_id": swept.tenant,
        "name": "all",
        "url": url,
        "event_types": ["*"],
        "secrets": [],
        "state": "disabled",
    }
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(webhook_endpoints).values(**endpoint, created_at=platform.clock(), updated_at=platform.clock()))
    data = {"stage": "quarantined", "job_id": swept.job_ids[0]}
    with platform.engine.begin() as conn:
        publish(conn, swept.tenant, "adapter.quarantined", "adp-1", data, now=platform.clock())
        publish(conn, swept.tenant, "adapter.quarantined", "adp-2", {**data, "job_id": "ftjob-single"}, now=platform.clock())
    assert swept.subjects() == ["Model adp-2 is trained, not approved"]
    with platform.engine.connect() as conn:
        query = sa.select(deliveries.c.subject).where(deliveries.c.target == "we_1").order_by(deliveries.c.event_seq)
        assert [subject for subject in conn.execute(query).scalars() if subject.startswith("adp-")] == ["adp-1", "adp-2"]


def test_sweep_whose_last_trials_end_at_once_is_mailed_once(swept: Swept) -> None:
    """The end that was written first is committed last: neither is taken for the last one until both are known."""
    swept.end(0)
    assert swept.subjects() == []
    platform = swept.mailed.platform
    with platform.engine.begin() as conn:
        transition(conn, swept.job_ids[1], S.FAILED, message="")
        move(platform, swept.job_ids[2], S.FAILED)
        assert swept.subjects() == []
    assert swept.subjects() == [f"Sweep {swept.sweep_id} has ended"]


def test_cancelled_sweep_is_not_mailed(swept: Swept) -> None:
    swept.end(0)
    sweeps.cancel(swept.mailed.platform, swept.tenant, swept.sweep_id)
    assert swept.subjects() == []


def test_mail_that_a_server_does_not_take_now_waits_for_its_next_attempt(mailed: Mailed, tenant: Tenant) -> None:
    platform = replace(mailed.platform, mailer=SmtpMailer(url="smtp://127.0.0.1:9", sender="ft@example.com"))
    members.add(platform, tenant.id, email="olga@example.com", role="owner")
    with platform.engine.begin() as conn:
        publish(conn, tenant.id, "fine_tuning.job.failed", "ftjob-1", now=platform.clock())
    work_off(platform)
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(deliveries).where(deliveries.c.tenant_id == tenant.id)).mappings().one()
    assert (row["state"], row["attempts"]) == ("pending", 1) and "mail server did not answer" in row["last_error"]
