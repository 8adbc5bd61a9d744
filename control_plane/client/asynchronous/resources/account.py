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
    """Identity of the API key in use."""

    async def retrieve(self) -> Me:
        """Returns the key's tenant, its limits, and the key's scopes."""
        return await self._api.call(Me, "GET", at("/v1/me"))


class AsyncQuotas(AsyncResource):
    """Limits of the tenant."""

    async def retrieve(self) -> Quota:
        """Returns the tenant's limits, its usage and reservations this month, and what is left."""
        return await self._api.call(Quota, "GET", at("/v1/quota"))


class AsyncQueues(AsyncResource):
    """The tenant's part of the queue."""

    async def retrieve(self) -> Queue:
        """Returns queued jobs with position, reason, expected start and what is ahead of them, running jobs, and GPU totals."""
        return await self._api.call(Queue, "GET", at("/v1/queue"))


class AsyncApiKeys(AsyncResource):
    """API keys of the tenant."""

    async def create(self, **body: Unpack[CreateKey]) -> NewApiKey:
        """Creates a key; only this response contains its ``secret``."""
        return await self._api.call(NewApiKey, "POST", at("/v1/api_keys"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[ApiKey]:
        """Lists keys, newest first, including revoked ones. Secrets are never returned."""
        return self._api.pages(ApiKey, at("/v1/api_keys"), given(limit=limit, after=after))

    async def retrieve(self, key_id: str) -> ApiKey:
        """Returns a key without its secret."""
        return await self._api.call(ApiKey, "GET", at("/v1/api_keys/{key_id}", key_id=key_id))

    async def rotate(self, key_id: str, **body: Unpack[RotateKey]) -> NewApiKey:
        """Creates a replacement for a key, which stays valid for another ``overlap`` seconds (default: one day)."""
        return await self._api.call(NewApiKey, "POST", at("/v1/api_keys/{key_id}/rotate", key_id=key_id), json=body)

    async def revoke(self, key_id: str) -> ApiKey:
        """Revokes a key immediately."""
        return await self._api.call(ApiKey, "DELETE", at("/v1/api_keys/{key_id}", key_id=key_id))


class AsyncMembers(AsyncResource):
    """Members of the tenant."""

    async def create(self, **body: Unpack[CreateMember]) -> Member:
        """Adds a member; create keys for the member with ``member_id`` in ``api_keys.create``."""
        return await self._api.call(Member, "POST", at("/v1/members"), json=body)

    def list(self, *, removed: bool | None = None, limit: int = 100, after: str | None = None) -> AsyncPages[Member]:
        """Lists members, newest first; with `removed`, including those who were removed."""
        return self._api.pages(Member, at("/v1/members"), given(removed=removed, limit=limit, after=after))

    async def retrieve(self, member_id: str) -> Member:
        """Returns a member, including one who was removed."""
        return await self._api.call(Member, "GET", at("/v1/members/{member_id}", member_id=member_id))

    async def update(self, member_id: str, **body: Unpack[UpdateMember]) -> Member:
        """Changes a member's role, name or notifications; a lower role restricts the member's keys from the next request on."""
        return await self._api.call(Member, "POST", at("/v1/members/{member_id}", member_id=member_id), json=body, repeatable=True)

    async def remove(self, member_id: str) -> RemovedMember:
        """Removes a member and revokes all of the member's keys."""
        return await self._api.call(RemovedMember, "DELETE", at("/v1/members/{member_id}", member_id=member_id))


class AsyncAuditLog(AsyncResource):
    """Permanent record of every change."""

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
        """Lists changes, newest first: who changed what, from where, and how. Times are Unix seconds."""
        asked = given(object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        return self._api.pages(
            AuditLine, at("/v1/audit_log"), asked | given(**{"created[gte]": created_from, "created[lt]": created_before})
        )


class AsyncDataExport(AsyncResource):
    """All data of the tenant in one archive."""

    async def download(self, target: Path) -> str:
        """Writes the ZIP archive to `target` atomically and returns its SHA-256; its ``manifest.json`` lists all other files."""
        return await self._api.download(at("/v1/data_export"), target)


class AsyncDeletions(AsyncResource):
    """Deletions with their proofs, and the deletion of all data."""

    async def request_everything(self, **body: Unpack[DeleteData]) -> Deletion:
        """Deletes all data of the tenant permanently, in the background; ``confirm`` must be the tenant's id."""
        return await self._api.call(Deletion, "POST", at("/v1/data_deletions"), json=body, repeatable=True)

    def list(self, *, limit: int = 100, after: str | None = None) -> AsyncPages[Deletion]:
        """Lists deletions of adapters and of the tenant's data, newest first, without their proofs."""
        return self._api.pages(Deletion, at("/v1/deletions"), given(limit=limit, after=after))

    async def retrieve(self, deletion_id: str) -> Deletion:
        """Returns a deletion, with its proof once it is complete."""
        return await self._api.call(Deletion, "GET", at("/v1/deletions/{deletion_id}", deletion_id=deletion_id))
