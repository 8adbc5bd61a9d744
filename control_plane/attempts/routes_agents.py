"""``/internal/attempt``: for the agents of running attempts, each with its attempt's token. Not part of the public API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.concurrency import run_in_threadpool

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
)  # fmt: skip
from control_plane.attempts import agents
from control_plane.attempts.claims import Claim
from control_plane.http.authentication import WholePlatform
from ft_assets.errors import InvalidRequest
from ft_assets.telemetry import correlation

router = APIRouter(prefix="/internal/attempt", include_in_schema=False)


def _held(request: Request, platform: WholePlatform) -> Claim:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise agents.released()
    held = agents.held_by(platform, token.strip())
    correlation.bind(tenant=held.tenant, job=held.job_id, attempt=held.attempt)
    return held


Held = Annotated[Claim, Depends(_held)]


@router.post("/heartbeat")
def heartbeat(platform: WholePlatform, held: Held, body: Heartbeat) -> HeartbeatAnswer:
    return agents.heartbeat(platform, held, body)


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
def complete_upload(platform: WholePlatform, held: Held, body: Completion) -> Done:
    agents.complete_upload(platform, held, body)
    return Done()


@router.post("/checkpoints")
def commit(platform: WholePlatform, held: Held, body: Commit) -> Done:
    agents.commit(platform, held, body)
    return Done()


@router.put("/log/{begins}")
async def store_log(request: Request, platform: WholePlatform, held: Held, begins: Annotated[int, Path(ge=0)]) -> Done:
    data = await request.body()
    if len(data) > agents.MAX_PIECE_BYTES:
        raise InvalidRequest(f"a piece of {len(data)} bytes is larger than {agents.MAX_PIECE_BYTES}", code="body_too_large")
    await run_in_threadpool(agents.store_log, platform, held, begins, data)
    return Done()
