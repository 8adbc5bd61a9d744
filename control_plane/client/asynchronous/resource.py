"""What the nouns share: the connection that their calls go over."""

from __future__ import annotations

from control_plane.client.asynchronous.connection import AsyncConnection


class AsyncResource:
    """The calls of one noun."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._api = connection
