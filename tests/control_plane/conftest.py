"""Clients of the API, and files and jobs made through the service itself."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from agent import messages
from control_plane.api.app import create_app
from control_plane.attempts.inputs import stored_base_models
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.serving.tables import deployments, model_servers, replica_adapters
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from ft_client import FtClient
from tests.support.jobs.followed_jobs import Job, Scripted, store_pack
from tests.support.jobs.training_specs import SPEC
from tests.support.platform.fleet_in_memory import ONE, TWO, Clock, Place, Servers
from tests.support.platform.tenant_accounts import MID_MONTH, Account
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    import openai


@pytest.fixture
def client(api_url: str, api_key: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client, as a user of the platform configures it."""
    import openai

    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=api_key) as made:
        yield made


@pytest.fixture
def ft(api_url: str, api_key: str) -> Iterator[FtClient]:
    with FtClient(base_url=api_url, api_key=api_key) as made:
        yield made


@pytest.fixture
def training_file(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> str:
    """Id of a validated file of `tenant`."""
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(platform, tenant.id, stream, filename="support.jsonl", purpose="fine-tune")
    assert file.status == "processed", file.status_details
    return str(file.id)


@pytest.fixture
def job_id(platform: Platform, tenant: Tenant, training_file: str) -> str:
    """Id of a job that was just submitted."""
    request = JobRequest.from_body({"model": "tiny-base", "training_file": training_file})
    return str(jobs.submit(platform, tenant.id, request).job.id)


@pytest.fixture
def new_job(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """Makes a packed job on a platform of its own, whose API is served; `objects` and `models` replace its own, `env` is the platform's.

    Its agents send heartbeats five times as often as others do.
    """
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.2)
    made: list[Job] = []
    with contextlib.ExitStack() as servers:

        def make(objects: Any = None, *, env: Mapping[str, str] | None = None, models: Catalogue | None = None, **changes: Any) -> Job:
            platform = new_platform(**(env or {}))
            platform = replace(platform, models=models or platform.models)
            if objects is not None:
                platform = replace(platform, objects=objects)
            url = servers.enter_context(served(create_app(platform)))
            platform = replace(platform, settings=replace(platform.settings, internal_url=url))
            owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
            with write_chat_rows().open("rb") as rows:
                file = uploaded_files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
            job = jobs.submit(platform, owner.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job
            spec = replace(SPEC, base_digest=platform.models.get("tiny-base").digest, **changes)
            store_pack(platform, owner.id, spec.pack_fingerprint)
            stored_base_models.publish(platform, "tiny-base", spec.base_digest)
            mark_packed(platform, owner.id, job.id, spec=spec, total_steps=2000, expected_s=60.0)
            made.append(Job(platform, owner.id, job.id, Scripted(platform.settings.work_dir / "launcher")))
            return made[-1]

        yield make
        for job in made:
            for name in job.launcher.names:
                job.launcher.stop(name, grace_s=0.1)


@pytest.fixture
def place(platform: Platform) -> Place:
    """Two servers, and nothing that earlier tests desired."""
    with platform.engine.begin() as conn:
        conn.execute(sa.delete(model_servers))
        conn.execute(sa.delete(replica_adapters))
        conn.execute(sa.delete(deployments))
    tenant, clock, servers = f"t-{uuid.uuid4().hex[:8]}", Clock(), Servers(ONE, TWO)
    tenants.create(platform, tenant)
    return Place(platform=replace(platform, fleet=servers, clock=clock), servers=servers, clock=clock, tenant=tenant)


@pytest.fixture
def account(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]) -> Account:
    now = [MID_MONTH]
    platform = replace(new_platform(local_gpus="8"), clock=lambda: now[0])
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard", max_jobs_in_flight=100)
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    return Account(platform, now, owner.id, str(file.id))
