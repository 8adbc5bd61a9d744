"""Runs calls that wait for the object store in threads of their own, so that a store that hangs delays no other request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import anyio
from fastapi import Depends, Request

from control_plane.http.rate_limits import TenantLimiter
from control_plane.http.turns import caller_of, give_up_turn
from core.errors import Unavailable

STORE_CALLS, STORE_CALLS_OF_ONE = 8, 4
"""Calls that may wait for the object store at once, and those of one tenant's attempts."""
CODE = "object_store_unavailable"
WAIT_S = 20.0
"""Time limit until a call begins: an agent waits no longer, and sends it again."""
COMPLETE_WAIT_S = 300.0
"""The same for the end of an upload, which would begin anew; an agent waits 600 s for it."""
_R = TypeVar("_R")


class StoreCalls:
    """The threads of one API process, for one request, which gives up its turn: a heartbeat of its caller would wait for the store too."""

    def __init__(self, limiter: TenantLimiter, request: Request) -> None:
        self._limiter, self._request = limiter, request

    async def run(self, call: Callable[..., _R], *given: object, wait_s: float = WAIT_S) -> _R:
        """Return what `call` returns; ``Unavailable`` if it could not begin in time. One that has begun is not cut off."""
        await give_up_turn(self._request)
        try:
            with anyio.fail_after(wait_s):
                return await self._limiter.run(caller_of(self._request), partial(call, *given))
        except TimeoutError as error:
            message = f"the object store has not answered {STORE_CALLS} calls for {wait_s:g} s; retry later"
            raise Unavailable(message, code=CODE) from error


async def _of_process(request: Request) -> StoreCalls:
    limiter: TenantLimiter | None = getattr(request.app.state, "store_calls", None)
    if limiter is None:  # here: a limiter belongs to a running loop
        limiter = TenantLimiter(total=STORE_CALLS, each=STORE_CALLS_OF_ONE, wait_s=2 * COMPLETE_WAIT_S, what="calls", code=CODE)
        request.app.state.store_calls = limiter
    return StoreCalls(limiter, request)


Calls = Annotated[StoreCalls, Depends(_of_process)]
