"""An agent's calls of a served API, for an attempt whose workload a test plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from agent.api_client import ApiClient
from control_plane.api.app import create_app
from control_plane.attempts import agents
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from tests.support.jobs.started_job import start_job


@pytest.fixture(scope="module")
def internal_url(platform: Platform, serve: Callable[[ASGIApp], str]) -> str:
    return serve(create_app(platform))


@pytest.fixture
def held(platform: Platform, write_chat_rows: Callable[..., Path]) -> Iterator[Claim]:
    """A started attempt of a new job."""
    claim = start_job(platform, write_chat_rows)
    yield claim
    cycle.release(platform, claim.job_id, claim.attempt)


@pytest.fixture
def api(platform: Platform, internal_url: str, held: Claim) -> Iterator[ApiClient]:
    """The calls of the attempt's agent."""
    with contextlib.closing(ApiClient(internal_url, agents.introduce(platform, held, may_read=[]))) as made:
        yield made
