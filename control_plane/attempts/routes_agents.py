"""``/internal/attempt``: for the agents of running attempts, each with its attempt's token. Not part of the public API."""

from __future__ import annotations

from typing import Annotated

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
from control_plane.http.store_calls import COMPLETE_WAIT_S, Calls
from core.errors import Conflict, InvalidRequest
from core.telemetry import correlation

router = APIRouter(prefix="/internal/attempt", include_in_schema=False)


def recognize(request: Request) -> str:
    """Return the token of the request; raise what the routes raise for one that no attempt has, or had, and count it as an unknown key."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise agents.released()
    token, limits = token.strip(), request.app.state.rate_limits
    if not limits.knows(token):
        with limits.watching_unknown_keys(request, token, unknown=Conflict):
            agents.check_token(request.app.state.platform, token)
    return token


Token = Annotated[str, Depends(recognize)]


def _held(platform: WholePlatform, token: Token) -> Claim:
    held = agents.held_by(platform, token)
    correlation.bind(tenant=held.tenant, job=held.job_id, attempt=held.attempt)
    return held


Held = Annotated[Claim, Depends(_held)]


@router.post("/heartbeat")
def heartbeat(platform: WholePlatform, token: Token, body: Heartbeat) -> HeartbeatAnswer:
    return agents.heartbeat(platform, token, body)


@router.post("/restored")
def restored(platform: WholePlatform, held: Held, body: Restored) -> Reported:
    return agents.restored(platform, held, body)


@router.post("/objects/read")
async def read_urls(platform: WholePlatform, held: Held, calls: Calls, body: ReadRequest) -> ReadGrants:
    return await calls.run(agents.read_urls, platform, held, body.keys)


@router.post("/objects/write")
async def write_urls(platform: WholePlatform, held: Held, calls: Calls, body: WriteRequest) -> WriteGrant:
    return await calls.run(agents.write_urls, platform, held, body)


@router.post("/objects/complete")
async def complete_upload(platform: WholePlatform, held: Held, calls: Calls, body: Completion) -> Done:
    await calls.run(agents.complete_upload, platform, held, body, wait_s=COMPLETE_WAIT_S)
    return Done()


@router.post("/checkpoints")
async def commit(platform: WholePlatform, held: Held, calls: Calls, body: Commit) -> Done:
    await calls.run(agents.commit, platform, held, body, wait_s=COMPLETE_WAIT_S)
    return Done()


@router.put("/log/{begins}")
async def store_log(request: Request, platform: WholePlatform, held: Held, calls: Calls, begins: Annotated[int, Path(ge=0)]) -> Done:
    data = await request.body()
    if len(data) > agents.MAX_PIECE_BYTES:
        raise InvalidRequest(f"a piece of {len(data)} bytes is larger than {agents.MAX_PIECE_BYTES}", code="body_too_large")
    await calls.run(agents.store_log, platform, held, begins, data)
    return Done()
