"""The tenant's account: ``client.me``, ``client.queue``, ``client.api_keys``, ``client.members``, ``client.audit_log``, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import ApiKey, AuditLine, Deleted, Deletion, Integration, Me, Member, NewApiKey, Queue, Quota, RemovedMember
from ft_client.wire import at, given


class Identity(Resource):
    """The owner of the API key."""

    def retrieve(self) -> Me:
        """Returns the tenant of the key, its limits, and the key's scopes."""
        return self._api.call("GET", at("/v1/me"))


class Quotas(Resource):
    """The tenant's limits and use."""

    def retrieve(self) -> Quota:
        """Returns the tenant's limits, and what it has used, reserved and left this month."""
        return self._api.call("GET", at("/v1/quota"))


class Queues(Resource):
    """The tenant's part of the queue."""

    def retrieve(self) -> Queue:
        """Returns waiting jobs with position, reason, expected start and the kinds of jobs ahead; running jobs; and totals of GPUs."""
        return self._api.call("GET", at("/v1/queue"))


class ApiKeys(Resource):
    """API keys of the caller's own tenant."""

    def create(self, *, name: str, **options: Any) -> NewApiKey:
        """Creates a key; its ``secret`` is only in this response.

        Options: `scopes`, `expires_in`, `member_id`, `requests_per_minute`.
        """
        return self._api.call("POST", at("/v1/api_keys"), json={"name": name, **options})

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[ApiKey]:
        """Lists keys, newest first, including revoked ones, without their secrets."""
        return self._api.pages(at("/v1/api_keys"), given(limit=limit, after=after))

    def retrieve(self, key_id: str) -> ApiKey:
        """Returns one key, without its secret."""
        return self._api.call("GET", at("/v1/api_keys/{key_id}", key_id))

    def rotate(self, key_id: str, **options: Any) -> NewApiKey:
        """Creates a key that replaces this one, which remains valid for ``overlap`` seconds: a day by default.

        Options: `overlap`, `expires_in`.
        """
        return self._api.call("POST", at("/v1/api_keys/{key_id}/rotate", key_id), json=options)

    def revoke(self, key_id: str) -> ApiKey:
        """Revokes a key at once."""
        return self._api.call("DELETE", at("/v1/api_keys/{key_id}", key_id))


class WandbIntegration(Resource):
    """The tenant's key for Weights & Biases."""

    def set(self, *, api_key: str) -> Integration:
        """Stores the key, in place of an earlier one; it is never returned."""
        return self._api.call("PUT", at("/v1/integrations/wandb"), json={"api_key": api_key}, repeatable=True)

    def retrieve(self) -> Integration:
        """Returns when a key was stored, and its last characters."""
        return self._api.call("GET", at("/v1/integrations/wandb"))

    def remove(self) -> Deleted:
        """Deletes the key; running jobs stop sending."""
        return self._api.call("DELETE", at("/v1/integrations/wandb"))


class Members(Resource):
    """Members of the tenant."""

    def create(self, *, email: str, **options: Any) -> Member:
        """Adds a member; create keys for it with ``member_id`` in ``api_keys.create``.

        Options: `role`, `name`.
        """
        return self._api.call("POST", at("/v1/members"), json={"email": email, **options})

    def list(self, *, removed: bool | None = None, limit: int = 100, after: str | None = None) -> Pages[Member]:
        """Lists members, newest first; with `removed`, former members too."""
        return self._api.pages(at("/v1/members"), given(removed=removed, limit=limit, after=after))

    def retrieve(self, member_id: str) -> Member:
        """Returns one member, who may have been removed."""
        return self._api.call("GET", at("/v1/members/{member_id}", member_id))

    def update(self, member_id: str, **options: Any) -> Member:
        """Changes role, name or notification; a lower role restricts the member's keys from the next call on.

        Options: `role`, `name`, `notify`.
        """
        return self._api.call("POST", at("/v1/members/{member_id}", member_id), json=options, repeatable=True)

    def remove(self, member_id: str) -> RemovedMember:
        """Removes a member and revokes their keys."""
        return self._api.call("DELETE", at("/v1/members/{member_id}", member_id))


class AuditLog(Resource):
    """The permanent record of every change."""

    def list(
        self,
        *,
        object_type: str | None = None,
        object_id: str | None = None,
        action: str | None = None,
        actor: str | None = None,
        created_from: int | None = None,
        created_before: int | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[AuditLine]:
        """Lists changes, newest first: who made each, of what, from where, and what it changed. Times are Unix seconds."""
        requested = given(object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        return self._api.pages(at("/v1/audit_log"), requested | given(**{"created[gte]": created_from, "created[lt]": created_before}))


class DataExport(Resource):
    """All data of the tenant in one archive."""

    def download(self, target: Path) -> str:
        """Writes the ZIP archive to `target` atomically; returns its sha256. ``manifest.json`` in it lists every other member."""
        return self._api.download(at("/v1/data_export"), target)


class Deletions(Resource):
    """Deletions with their proofs, and the deletion of all data."""

    def request_everything(self, *, confirm: str, reason: str, close_account: bool = False) -> Deletion:
        """Permanently deletes everything that the tenant stored; ``confirm`` is its id. Carried out after the response. `close_account`:
        members, keys, webhook endpoints and budgets end with it; only for owners."""
        body = {"confirm": confirm, "reason": reason, "close_account": close_account}
        return self._api.call("POST", at("/v1/data_deletions"), json=body, repeatable=True)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Deletion]:
        """Lists deletions of adapters and of the tenant's data, newest first, without their proofs."""
        return self._api.pages(at("/v1/deletions"), given(limit=limit, after=after))

    def retrieve(self, deletion_id: str) -> Deletion:
        """Returns one deletion, with its proof once it is done."""
        return self._api.call("GET", at("/v1/deletions/{deletion_id}", deletion_id))
