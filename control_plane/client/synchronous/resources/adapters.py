# Written by `python -m tools.client` from asynchronous/resources/adapters.py: change that, and run it again.
"""``client.adapters``: fine-tuned models from registration to deletion. An adapter is named by its id or its model name."""

from __future__ import annotations

from typing import Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.types import Adapter, Approve, Decide, Lineage, RolledBack
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class Adapters(Resource):
    """The registry of adapters."""

    def list(self, *, stage: str | None = None, approval: str | None = None, limit: int = 100, after: str | None = None) -> Pages[Adapter]:
        """Lists adapters, newest first; ``approval="pending"`` returns those that approval."""
        return self._api.pages(Adapter, at("/v1/adapters"), given(stage=stage, approval=approval, limit=limit, after=after))

    def retrieve(self, adapter_id: str) -> Adapter:
        """Returns an adapter."""
        return self._api.call(Adapter, "GET", at("/v1/adapters/{adapter_id}", adapter_id=adapter_id))

    def promote(self, adapter_id: str) -> Adapter:
        """Promotes an adapter that passed its evaluation to production and serves it."""
        return self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/promote", adapter_id=adapter_id), repeatable=True)

    def rollback(self, adapter_id: str) -> RolledBack:
        """Withdraws an adapter from production and serves the one that was in production before it."""
        return self._api.call(RolledBack, "POST", at("/v1/adapters/{adapter_id}/rollback", adapter_id=adapter_id), repeatable=True)

    def deprecate(self, adapter_id: str) -> Adapter:
        """Stops serving an adapter; its files are kept for the grace period."""
        return self._api.call(Adapter, "POST", at("/v1/adapters/{adapter_id}/deprecate", adapter_id=adapter_id), repeatable=True)

    def approve(self, adapter_id: str, **body: Unpack[Approve]) -> Adapter:
        """Approves an adapter whose job requires approval; ``promote=True`` also promotes it."""
        path = at("/v1/adapters/{adapter_id}/approve", adapter_id=adapter_id)
        return self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    def reject(self, adapter_id: str, **body: Unpack[Decide]) -> Adapter:
        """Rejects an adapter, so that it cannot be promoted."""
        path = at("/v1/adapters/{adapter_id}/reject", adapter_id=adapter_id)
        return self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    def lineage(self, adapter_id: str, *, verify: bool = False) -> Lineage:
        """Traces an adapter back to the uploaded files; `verify` checks the hashes of all stored bytes."""
        path, params = at("/v1/adapters/{adapter_id}/lineage", adapter_id=adapter_id), given(verify=verify or None)
        return self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)

    def manifest(self, adapter_id: str) -> str:
        """Returns Kubernetes manifests for serving a whole model, as YAML."""
        return (self._api.content(at("/v1/adapters/{adapter_id}/server", adapter_id=adapter_id))).decode()
