# Written by `python -m tools.client` from asynchronous/resource.py: change that, and run it again.
"""Base of all resources: the connection of their calls."""

from __future__ import annotations

from control_plane.client.synchronous.connection import Connection


class Resource:
    """The calls of one resource."""

    def __init__(self, connection: Connection) -> None:
        self._api = connection
