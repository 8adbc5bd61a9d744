# Written by `python -m tools.client` from asynchronous/resources/account.py: change that, and run it again.
"""The tenant's own account: ``client.me``, ``client.queue``, ``client.api_keys``, ``client.members``, ``client.audit_log``, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
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


class Identity(Resource):
    """Who the key that is used belongs to."""

    def retrieve(self) -> Me:
        """The tenant of the key, its limits, and what the key opens."""
        return self._api.call(Me, "GET", at("/v1/me"))


class Quotas(Resource):
    """What the tenant may use."""

    def retrieve(self) -> Quota:
        """What the tenant may use, has used, holds and has left in this month."""
        return self._api.call(Quota, "GET", at("/v1/quota"))


class Queues(Resource):
    """Why the tenant's jobs wait, and when they start."""

    def retrieve(self) -> Queue:
        """Waiting jobs with position, reason, expected start and who is ahead in kind; running ones; GPUs in sums."""
        return self._api.call(Queue, "GET", at("/v1/queue"))


class ApiKeys(Resource):
    """Keys of the caller's own tenant."""

    def create(self, **body: Unpack[CreateKey]) -> NewApiKey:
        """Make a key; its ``secret`` is in this answer and nowhere else."""
        return self._api.call(NewApiKey, "POST", at("/v1/api_keys"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[ApiKey]:
        """Keys, newest first, revoked ones too; never their secrets."""
        return self._api.pages(ApiKey, at("/v1/api_keys"), given(limit=limit, after=after))

    def retrieve(self, key_id: str) -> ApiKey:
        """One key, without its secret."""
        return self._api.call(ApiKey, "GET", at("/v1/api_keys/{key_id}", key_id=key_id))

    def rotate(self, key_id: str, **body: Unpack[RotateKey]) -> NewApiKey:
        """Make a key in the place of this one, which still opens for ``overlap`` seconds: a day, unless you say otherwise."""
        return self._api.call(NewApiKey, "POST", at("/v1/api_keys/{key_id}/rotate", key_id=key_id), json=body)

    def revoke(self, key_id: str) -> ApiKey:
        """End a key at once."""
        return self._api.call(ApiKey, "DELETE", at("/v1/api_keys/{key_id}", key_id=key_id))


class Members(Resource):
    """People of the tenant."""

    def create(self, **body: Unpack[CreateMember]) -> Member:
        """Add a person; keys for it are made with ``member_id`` in ``api_keys.create``."""
        return self._api.call(Member, "POST", at("/v1/members"), json=body)

    def list(self, *, removed: bool | None = None, limit: int = 100, after: str | None = None) -> Pages[Member]:
        """Members, newest first; with `removed` those who were, too."""
        return self._api.pages(Member, at("/v1/members"), given(removed=removed, limit=limit, after=after))

    def retrieve(self, member_id: str) -> Member:
        """One member, also one who was removed."""
        return self._api.call(Member, "GET", at("/v1/members/{member_id}", member_id=member_id))

    def update(self, member_id: str, **body: Unpack[UpdateMember]) -> Member:
        """Change role, name or notification; a lower role narrows the member's keys from the next call on."""
        return self._api.call(Member, "POST", at("/v1/members/{member_id}", member_id=member_id), json=body, repeatable=True)

    def remove(self, member_id: str) -> RemovedMember:
        """Remove a member and revoke all keys of theirs."""
        return self._api.call(RemovedMember, "DELETE", at("/v1/members/{member_id}", member_id=member_id))


class AuditLog(Resource):
    """Every change, for good."""

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
        """Changes, newest first: who made each, of what, from where, and what it changed. Times are Unix seconds."""
        requested = given(object_type=object_type, object_id=object_id, action=action, actor=actor, limit=limit, after=after)
        return self._api.pages(
            AuditLine, at("/v1/audit_log"), requested | given(**{"created[gte]": created_from, "created[lt]": created_before})
        )


class DataExport(Resource):
    """Everything that the tenant has, in one archive."""

    def download(self, target: Path) -> str:
        """Write the ZIP archive to `target`, whole or not at all; its sha256. ``manifest.json`` in it lists every other member."""
        return self._api.download(at("/v1/data_export"), target)


class Deletions(Resource):
    """What was deleted, with the proofs; and the deletion of everything."""

    def request_everything(self, **body: Unpack[DeleteData]) -> Deletion:
        """Delete everything that the tenant stored, for good; ``confirm`` is its id. It is carried out behind the answer."""
        return self._api.call(Deletion, "POST", at("/v1/data_deletions"), json=body, repeatable=True)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[Deletion]:
        """Deletions of adapters and of the tenant's data, newest first; without their proofs."""
        return self._api.pages(Deletion, at("/v1/deletions"), given(limit=limit, after=after))

    def retrieve(self, deletion_id: str) -> Deletion:
        """One deletion, with its proof once it is done."""
        return self._api.call(Deletion, "GET", at("/v1/deletions/{deletion_id}", deletion_id=deletion_id))
