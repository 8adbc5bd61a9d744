# Written by `python -m tools.client` from asynchronous/resource.py: change that, and run it again.
"""Base class of the resources."""

from __future__ import annotations

from control_plane.client.synchronous.connection import Connection


class Resource:
    """Base class of a group of endpoints."""

    def __init__(self, connection: Connection) -> None:
        self._api = connection
