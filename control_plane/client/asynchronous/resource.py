"""Base class of the resources."""

from __future__ import annotations

from control_plane.client.asynchronous.connection import AsyncConnection


class AsyncResource:
    """Base class of a group of endpoints."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._api = connection
