"""The tenant's account: ``client.me``, ``client.queue``, ``client.api_keys``, ``client.members``, ``client.audit_log``, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import (
    ApiKey,
    AuditLine,
    CreateKey,
    CreateMember,
    DeleteData,
    Deletion,
    Me,
    Member,
    NewApiKey,
    Queue,
    Quota,
    RemovedMember,
    RotateKey,
    UpdateMember,
)
from control_plane.client.wire import at, given


class AsyncIdentity(AsyncResource):
    """The owner of the API key."""

    async def retrieve(self) -> Me:
        """Returns the tenant of the key, its limits, and the key's scopes."""
        return await self._api.call(Me, "GET", at("/v1/me"))


class AsyncQuotas(AsyncResource):
    """The tenant's limits and use."""

    async def retrieve(self) -> Quota:
        """Returns the tenant's limits, and what it has used, reserved and left this month."""
        return await self._api.call(Quota, "GET", at("/v1/quota"))


class AsyncQueues(AsyncResource):
    """The tenant's part of the queue."""

    async def retrieve(self) -> Queue:
        """Returns waiting jobs with position, reason, expected start and the kinds of jobs ahead; running jobs; and totals of GPUs."""
        return await self._api.call(Queue, "GET", at("/v1/queue"))


class AsyncApiKeys(AsyncResource):
    """API keys of the caller's own tenant."""

    async def create(self, **body: Unpack[CreateKey]) -> NewApiKey:
        """Creates a key; its ``secret`` is only in this response."""
        return await self._api.call(NewApiKey, "POST", at("/v1/api_keys"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[ApiKey]:
        """Lists keys, newest first, including revoked ones, without their secrets."""
        return self._api.pages(ApiKey, at("/v1/api_keys"), given(limit=limit, after=after))

    async def retrieve(self, key_id: str) -> ApiKey:
        """Returns one key, without its secret."""
        return await self._api.call(ApiKey, "GET", at("/v1/api_keys/{key_id}", key_id=key_id))

    async def rotate(self, key_id: str, **body: Unpack[RotateKey]) -> NewApiKey:
        """Creates a key that replaces this one, which remains valid for ``overlap`` seconds: a day by default."""
        return await self._api.call(NewApiKey, "POST", at("/v1/api_keys/{key_id}/rotate", key_id=key_id), json=body)

    async def revoke(self, key_id: str) -> ApiKey:
        """Revokes a key at once."""
        return await self._api.call(ApiKey, "DELETE", at("/v1/api_keys/{key_id}", key_id=key_id))


class AsyncMembers(AsyncResource):
    """Members of the tenant."""

    async def create(self, **body: Unpack[CreateMember]) -> Member:
        """Adds a member; create keys for it with ``member_id`` in ``api_keys.create``."""
        return await self._api.call(Member, "POST", at("/v1/members"), json=body)

    def list(self, *, removed: bool | None = None, limit: int = 100, after: str | None = None) -> AsyncPages[Member]:
        """Lists members, newest first; with `removed`, former members too."""
        return self._api.pages(Member, at("/v1/members"), given(removed=removed, limit=limit, after=after))

    async def retrieve(self, member_id: str) -> Member:
        """Returns one member, who may have been removed."""
        return await self._api.call(Member, "GET", at("/v1/members/{member_id}", member_id=member_id))

    async def update(self, member_id: str, **body: Unpack[UpdateMember]) -> Member:
        """Changes role, name or notification; a lower role restricts the member's keys from the next call on."""
        return await self._api.call(Member, "POST", at("/v1/members/{member_id}", member_id=member_id), json=body, repeatable=True)

    async def remove(self, member_id: str) -> RemovedMember:
        """Removes a member and revokes their keys."""
        return await self._api.call(RemovedMember, "DELETE", at("/v1/members/{member_id}", member_id=member_id))


class AsyncAuditLog(AsyncResource):
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
    ) -> AsyncPages[AuditLine]:
        """Lists changes, newest first: who made each, of what, from where, and what it changed. Times are Unix seconds."""
        requested = given(object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        return self._api.pages(
            AuditLine, at("/v1/audit_log"), requested | given(**{"created[gte]": created_from, "created[lt]": created_before})
        )


class AsyncDataExport(AsyncResource):
    """All data of the tenant in one archive."""

    async def download(self, target: Path) -> str:
        """Writes the ZIP archive to `target` atomically; returns its sha256. ``manifest.json`` in it lists every other member."""
        return await self._api.download(at("/v1/data_export"), target)


class AsyncDeletions(AsyncResource):
    """Deletions with their proofs, and the deletion of all data."""

    async def request_everything(self, **body: Unpack[DeleteData]) -> Deletion:
        """Permanently deletes everything that the tenant stored; ``confirm`` is its id. Carried out after the response."""
        return await self._api.call(Deletion, "POST", at("/v1/data_deletions"), json=body, repeatable=True)

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[Deletion]:
        """Lists deletions of adapters and of the tenant's data, newest first, without their proofs."""
        return self._api.pages(Deletion, at("/v1/deletions"), given(limit=limit, after=after))

    async def retrieve(self, deletion_id: str) -> Deletion:
        """Returns one deletion, with its proof once it is done."""
        return await self._api.call(Deletion, "GET", at("/v1/deletions/{deletion_id}", deletion_id=deletion_id))
