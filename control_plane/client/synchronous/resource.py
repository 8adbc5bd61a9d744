# Written by `python -m tools.client` from asynchronous/resource.py: change that, and run it again.
"""What the nouns share: the connection that their calls go over."""

from __future__ import annotations

from control_plane.client.synchronous.connection import Connection


class Resource:
    """The calls of one noun."""

    def __init__(self, connection: Connection) -> None:
        self._api = connection
