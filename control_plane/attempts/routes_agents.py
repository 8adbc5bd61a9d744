"""``/internal/attempt``: for the agents of running attempts, each with its attempt's token. Not part of the public API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Request

from agent.messages import (
    Commit,
    Completion,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    ReadGrants,
    ReadRequest,
    Reported,
    Restored,
    WriteGrant,
    WriteRequest,
)
from control_plane.attempts import agents
from control_plane.attempts.claims import Claim
from control_plane.http.authentication import WholePlatform
from ft_assets.errors import InvalidRequest
from ft_assets.telemetry import correlation

router = APIRouter(prefix="/internal/attempt", include_in_schema=False)


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise agents.released()
    return token.strip()


Token = Annotated[str, Depends(_token)]


def _held(platform: WholePlatform, token: Token) -> Claim:
    held = agents.held_by(platform, token)
    correlation.bind(tenant=held.tenant, job=held.job_id, attempt=held.attempt)
    return held


Held = Annotated[Claim, Depends(_held)]
STORE_CALLS = 8
"""Calls of agents that may wait for the object store at once: one that hangs takes no thread from tenants' requests or heartbeats."""


class StoreCalls:
    """Runs calls in threads of their own number."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(STORE_CALLS)

    async def run(self, call: Callable[..., None], *given: object) -> Done:
        await anyio.to_thread.run_sync(call, *given, limiter=self._limiter)
        return Done()


async def _store_calls(request: Request) -> StoreCalls:
    found: StoreCalls | None = getattr(request.app.state, "store_calls", None)
    if found is None:
        found = request.app.state.store_calls = StoreCalls()  # here: a limiter belongs to a running loop
    return found


Calls = Annotated[StoreCalls, Depends(_store_calls)]


@router.post("/heartbeat")
def heartbeat(platform: WholePlatform, token: Token, body: Heartbeat) -> HeartbeatAnswer:
    return agents.heartbeat(platform, token, body)


@router.post("/restored")
def restored(platform: WholePlatform, held: Held, body: Restored) -> Reported:
    return agents.restored(platform, held, body)


@router.post("/objects/read")
def read_urls(platform: WholePlatform, held: Held, body: ReadRequest) -> ReadGrants:
    return agents.read_urls(platform, held, body.keys)


@router.post("/objects/write")
def write_urls(platform: WholePlatform, held: Held, body: WriteRequest) -> WriteGrant:
    return agents.write_urls(platform, held, body)


@router.post("/objects/complete")
async def complete_upload(platform: WholePlatform, held: Held, calls: Calls, body: Completion) -> Done:
    return await calls.run(agents.complete_upload, platform, held, body)


@router.post("/checkpoints")
async def commit(platform: WholePlatform, held: Held, calls: Calls, body: Commit) -> Done:
    return await calls.run(agents.commit, platform, held, body)


@router.put("/log/{begins}")
async def store_log(request: Request, platform: WholePlatform, held: Held, calls: Calls, begins: Annotated[int, Path(ge=0)]) -> Done:
    data = await request.body()
    if len(data) > agents.MAX_PIECE_BYTES:
        raise InvalidRequest(f"a piece of {len(data)} bytes is larger than {agents.MAX_PIECE_BYTES}", code="body_too_large")
    return await calls.run(agents.store_log, platform, held, begins, data)
