"""Base of all resources: the connection of their calls."""

from __future__ import annotations

from control_plane.client.asynchronous.connection import AsyncConnection


class AsyncResource:
    """The calls of one resource."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._api = connection
