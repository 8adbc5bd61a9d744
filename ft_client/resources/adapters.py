"""``client.adapters``: trained adapters, from registration to deletion. An adapter is named by its id or its model name."""

from __future__ import annotations

from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import Adapter, Lineage, RolledBack, Signature
from ft_client.wire import GENERATION_TIMEOUT, at, given


class Adapters(Resource):
    """The registry of adapters."""

    def list(self, *, stage: str | None = None, approval: str | None = None, limit: int = 100, after: str | None = None) -> Pages[Adapter]:
        """Lists adapters, newest first; ``approval="pending"`` selects those that wait for approval."""
        return self._api.pages(at("/v1/adapters"), given(stage=stage, approval=approval, limit=limit, after=after))

    def retrieve(self, adapter_id: str) -> Adapter:
        """Returns one adapter."""
        return self._api.call("GET", at("/v1/adapters/{adapter_id}", adapter_id))

    def promote(self, adapter_id: str) -> Adapter:
        """Puts an adapter that passed its gates into production and serves it."""
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/promote", adapter_id), repeatable=True)

    def rollback(self, adapter_id: str) -> RolledBack:
        """Serves the previous production adapter again, and withdraws this one."""
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/rollback", adapter_id), repeatable=True)

    def deprecate(self, adapter_id: str) -> Adapter:
        """Stops serving an adapter; its files stay for the grace period."""
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/deprecate", adapter_id), repeatable=True)

    def approve(self, adapter_id: str, **options: Any) -> Adapter:
        """Approves an adapter whose job requires approval; ``promote=True`` also promotes it.

        Options: `note`, `promote`.
        """
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/approve", adapter_id), json=options, repeatable=True)

    def reject(self, adapter_id: str, **options: Any) -> Adapter:
        """Rejects an adapter, which then cannot be promoted.

        Options: `note`.
        """
        return self._api.call("POST", at("/v1/adapters/{adapter_id}/reject", adapter_id), json=options, repeatable=True)

    def release(self, adapter_id: str, *, reason: str) -> Adapter:
        """Serves an adapter that did not pass its gate; its job succeeds."""
        path = at("/v1/adapters/{adapter_id}/release", adapter_id)
        return self._api.call("POST", path, json={"reason": reason}, repeatable=True)

    def lineage(self, adapter_id: str, *, verify: bool = False) -> Lineage:
        """Returns the origin of an adapter, back to the uploaded files; `verify` reads the stored bytes again."""
        path, params = at("/v1/adapters/{adapter_id}/lineage", adapter_id), given(verify=verify or None)
        return self._api.call("GET", path, params=params, timeout=GENERATION_TIMEOUT)

    def signature(self, adapter_id: str) -> Signature:
        """Returns the signature over an adapter's manifest and files, a DSSE envelope."""
        return self._api.call("GET", at("/v1/adapters/{adapter_id}/signature", adapter_id))

    def manifest(self, adapter_id: str) -> str:
        """Returns the YAML of a whole model's own server on a cluster."""
        return (self._api.content(at("/v1/adapters/{adapter_id}/server", adapter_id))).decode()
