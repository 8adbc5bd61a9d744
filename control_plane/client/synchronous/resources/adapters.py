# Written by `python -m tools.client` from asynchronous/resources/adapters.py: change that, and run it again.
"""``client.adapters``: what training makes, from its registration to its end. An adapter is named by its id or its model name."""

from __future__ import annotations

from typing import Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.types import Adapter, Approve, Decide, Lineage, RolledBack
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class Adapters(Resource):
    """The registry of adapters."""

    def list(self, *, stage: str | None = None, approval: str | None = None, limit: int = 100, after: str | None = None) -> Pages[Adapter]:
        """Adapters, newest first; ``approval="pending"`` are those that wait for a person."""
        return self._api.pages(Adapter, at("/v1/adapters"), given(stage=stage, approval=approval, limit=limit, after=after))

    def retrieve(self, adapter_id: str) -> Adapter:
        """One adapter."""
        return self._api.call(Adapter, "GET", at("/v1/adapters/{adapter_id}", adapter_id=adapter_id))

    def promote(self, adapter_id: str) -> Adapter:
        """Put an adapter that passed its gates into production and serve it."""
        return self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/promote", adapter_id=adapter_id), repeatable=True)

    def rollback(self, adapter_id: str) -> RolledBack:
        """Serve the one that was in production before it, and withdraw it."""
        return self._api.call(RolledBack, "POST", at("/v1/adapters/{adapter_id}/rollback", adapter_id=adapter_id), repeatable=True)

    def deprecate(self, adapter_id: str) -> Adapter:
        """Stop serving an adapter; its files stay for the days of grace."""
        return self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/deprecate", adapter_id=adapter_id), repeatable=True)

    def approve(self, adapter_id: str, **body: Unpack[Approve]) -> Adapter:
        """Let an adapter be promoted whose job asked for a person's approval; ``promote=True`` does that at once."""
        path = at("/v1/adapters/{adapter_id}/approve", adapter_id=adapter_id)
        return self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    def reject(self, adapter_id: str, **body: Unpack[Decide]) -> Adapter:
        """Keep an adapter from being promoted."""
        path = at("/v1/adapters/{adapter_id}/reject", adapter_id=adapter_id)
        return self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    def lineage(self, adapter_id: str, *, verify: bool = False) -> Lineage:
        """Where an adapter comes from, back to the uploaded files; `verify` reads the stored bytes again."""
        path, params = at("/v1/adapters/{adapter_id}/lineage", adapter_id=adapter_id), given(verify=verify or None)
        return self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)

    def manifest(self, adapter_id: str) -> str:
        """YAML of a whole model's own server on a cluster."""
        return (self._api.content(at("/v1/adapters/{adapter_id}/server", adapter_id=adapter_id))).decode()
