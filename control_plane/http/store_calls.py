"""Runs calls that wait for the object store in threads of their own, so that a store that hangs delays no other request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from control_plane.http.turns import give_up_turn
from ft_assets.errors import Unavailable

STORE_CALLS = 8
"""Calls that may wait for the object store at once."""
WAIT_S = 20.0
"""Time limit until a call begins: an agent waits no longer, and sends it again."""
COMPLETE_WAIT_S = 300.0
"""The same for the end of an upload, which would begin anew; an agent waits 600 s for it."""
_R = TypeVar("_R")


class StoreCalls:
    """The threads of one API process, for one request, which gives up its turn: a heartbeat of its caller would wait for the store too."""

    def __init__(self, limiter: anyio.CapacityLimiter, request: Request) -> None:
        self._limiter, self._request = limiter, request

    async def run(self, call: Callable[..., _R], *given: object, wait_s: float = WAIT_S) -> _R:
        """Return what `call` returns; ``Unavailable`` if it could not begin in time. One that has begun is not cut off."""
        await give_up_turn(self._request)
        try:
            with anyio.fail_after(wait_s):
                return await anyio.to_thread.run_sync(call, *given, limiter=self._limiter)
        except TimeoutError as error:
            message = f"the object store has not answered {STORE_CALLS} calls for {wait_s:g} s; retry later"
            raise Unavailable(message, code="object_store_unavailable") from error


async def _of_process(request: Request) -> StoreCalls:
    limiter: anyio.CapacityLimiter | None = getattr(request.app.state, "store_calls", None)
    if limiter is None:  # here: a limiter belongs to a running loop
        limiter = request.app.state.store_calls = anyio.CapacityLimiter(STORE_CALLS)
    return StoreCalls(limiter, request)


Calls = Annotated[StoreCalls, Depends(_of_process)]
