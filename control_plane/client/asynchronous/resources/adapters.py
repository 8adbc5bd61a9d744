"""``client.adapters``: what training makes, from its registration to its end. An adapter is named by its id or its model name."""

from __future__ import annotations

from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Adapter, Approve, Decide, Lineage, RolledBack
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class AsyncAdapters(AsyncResource):
    """The registry of adapters."""

    def list(
        self, *, stage: str | None = None, approval: str | None = None, limit: int = 100, after: str | None = None
    ) -> AsyncPages[Adapter]:
        """Adapters, newest first; ``approval="pending"`` are those that wait for a person."""
        return self._api.pages(Adapter, at("/v1/adapters"), given(stage=stage, approval=approval, limit=limit, after=after))

    async def retrieve(self, adapter_id: str) -> Adapter:
        """One adapter."""
        return await self._api.call(Adapter, "GET", at("/v1/adapters/{adapter_id}", adapter_id=adapter_id))

    async def promote(self, adapter_id: str) -> Adapter:
        """Put an adapter that passed its gates into production and serve it."""
        return await self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/promote", adapter_id=adapter_id), repeatable=True)

    async def rollback(self, adapter_id: str) -> RolledBack:
        """Serve the one that was in production before it, and withdraw it."""
        return await self._api.call(RolledBack, "POST", at("/v1/adapters/{adapter_id}/rollback", adapter_id=adapter_id), repeatable=True)

    async def deprecate(self, adapter_id: str) -> Adapter:
        """Stop serving an adapter; its files stay for the days of grace."""
        return await self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/deprecate", adapter_id=adapter_id), repeatable=True)

    async def approve(self, adapter_id: str, **body: Unpack[Approve]) -> Adapter:
        """Let an adapter be promoted whose job asked for a person's approval; ``promote=True`` does that at once."""
        path = at("/v1/adapters/{adapter_id}/approve", adapter_id=adapter_id)
        return await self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    async def reject(self, adapter_id: str, **body: Unpack[Decide]) -> Adapter:
        """Keep an adapter from being promoted."""
        path = at("/v1/adapters/{adapter_id}/reject", adapter_id=adapter_id)
        return await self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    async def lineage(self, adapter_id: str, *, verify: bool = False) -> Lineage:
        """Where an adapter comes from, back to the uploaded files; `verify` reads the stored bytes again."""
        path, params = at("/v1/adapters/{adapter_id}/lineage", adapter_id=adapter_id), given(verify=verify or None)
        return await self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)

    async def manifest(self, adapter_id: str) -> str:
        """YAML of a whole model's own server on a cluster."""
        return (await self._api.content(at("/v1/adapters/{adapter_id}/server", adapter_id=adapter_id))).decode()
