"""New keys for what the installation encrypts, while everything runs: a second key is added, everything is encrypted with it, the first is
removed.

- The installation's keys (``secrets.key``) encrypt secrets in the database and the tenants' keys.
- A tenant's key encrypts the data keys of its objects in a local store. In a bucket, KMS does that.

Every process reads a key file again when it has changed. Until :func:`retire`, both keys open everything, so nothing stops working
between two steps, and a call that was interrupted is repeated. A key file with more than one key is a rotation under way: :func:`rotate`
continues it and adds no third key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy.engine import Connection

from control_plane.datasets.validation_tasks import FETCH
from control_plane.notifications.tables import webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.platform.secrets import cipher, keys_in, new_key, replace_keys
from control_plane.queue.tables import reservations
from control_plane.tracking.tables import integrations
from core.errors import Conflict, IntegrityError, InvalidRequest
from core.layout import tenant_prefix
from resources.object_store import object_links
from resources.object_store.local import LocalObjectStore, Renewed
from resources.object_store.tenant_keys import KEYS, TenantKeys

RETIRE_AFTER_S = 3600.0
"""How long a new key must have been in use before older ones are removed: every process has read it by then, and what takes longer to
write is a slow upload, which gets its envelope at its end."""
Seal = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotated:
    """What :func:`rotate` did."""

    added: tuple[str, ...]
    """Owners that got a new key: ``secrets.key``, tenants, and ``.installation`` for objects of no tenant."""
    continued: tuple[str, ...]
    """Owners with a rotation under way, which got none: :func:`retire` comes first."""
    num_secrets: int
    """Rows of the database whose secrets were encrypted again."""
    num_objects: int
    num_bytes: int
    unreadable: tuple[str, ...]
    """Objects and key files that no key opens; they stay as they are."""


def rotate(platform: Platform, *, tenant: str | None = None) -> Rotated:
    """Add new keys and encrypt with them what older ones had encrypted; of one tenant only, or of the whole installation.

    Raises ``InvalidRequest`` for a tenant without a key of its own, ``Conflict`` while a backup runs.
    """
    with _without_backup(platform):
        return _rotate(platform, tenant)


def _rotate(platform: Platform, tenant: str | None) -> Rotated:
    store, keys = _encrypted_store(platform)
    if tenant is not None and tenant not in (keys.owners() if keys is not None else ()):
        raise InvalidRequest(
            f"tenant {tenant!r} has no key in the object store; keys are made with FT_TENANT_KEY=local, and KMS has those of a bucket",
            code="tenant_key_missing",
        )
    added, continued, unreadable, secrets = list[str](), list[str](), list[str](), 0
    if tenant is None:
        file = platform.settings.secrets_key_file
        (added if _add_installation_key(file) else continued).append(file.name)
        secrets = _seal_again(platform)
    renewed = Renewed(num_objects=0, num_bytes=0, unreadable=())
    if keys is not None and store is not None:
        owners = [tenant] if tenant is not None else keys.owners()
        unreadable = _wrap_again(keys, owners)
        for owner in sorted(set(owners) - set(unreadable)):
            if (num_keys := len(keys.lines(owner))) == 1:
                keys.add(owner)
                added.append(owner)
            elif num_keys:
                continued.append(owner)
        renewed = store.renew_envelopes(tenant_prefix(tenant) if tenant is not None else "")
    return Rotated(
        added=tuple(added), continued=tuple(continued), num_secrets=secrets, num_objects=renewed.num_objects,
        num_bytes=renewed.num_bytes, unreadable=(*(f"{KEYS}/{owner}" for owner in unreadable), *renewed.unreadable),
    )  # fmt: skip


def _wrap_again(keys: TenantKeys, owners: Sequence[str]) -> list[str]:
    """Encrypt the owners' keys with the installation's newest key; returns those whose keys it does not open."""
    unreadable = []
    for owner in owners:
        try:
            keys.wrap_again(owner)
        except IntegrityError:
            unreadable.append(owner)
    return unreadable


def retire(platform: Platform) -> Mapping[str, int]:
    """Remove the older keys of every rotation under way; returns how many by owner.

    What was encrypted with them in the meantime is encrypted again first. Raises ``Conflict`` while something may still use them: keys
    that were added less than :data:`RETIRE_AFTER_S` ago, workloads that started before, imports that wait with a token, a backup.
    """
    with _without_backup(platform):
        return _retire(platform)


def _retire(platform: Platform) -> Mapping[str, int]:
    store, keys = _encrypted_store(platform)
    file = platform.settings.secrets_key_file
    files = {file.name: file} if len(keys_in(file)) > 1 else {}
    open_ = files | ({o: keys.file(o) for o in keys.owners() if len(keys.lines(o)) > 1} if keys is not None else {})
    if not open_:
        return {}
    _refuse_if_in_use(platform, max(path.stat().st_mtime for path in open_.values()))
    _seal_again(platform)
    if keys is not None:  # a rotation may have stopped before it did so
        for unreadable in _wrap_again(keys, keys.owners()):
            open_.pop(unreadable, None)
    if store is not None:
        store.renew_envelopes("")
    retired = {}
    for owner in open_:
        if owner == file.name:
            newest, *old = keys_in(file)
            replace_keys(file, [newest])
            retired[owner] = len(old)
        elif keys is not None:
            retired[owner] = keys.retire(owner)
    return retired


def _without_backup(platform: Platform) -> AbstractContextManager[None]:
    """Keep backups away, which would hold objects and keys of different moments, and other rotations, which would add keys of their own."""
    return object_links.locked(platform.objects.root if isinstance(platform.objects, LocalObjectStore) else platform.settings.home)


def _encrypted_store(platform: Platform) -> tuple[LocalObjectStore | None, TenantKeys | None]:
    """Return the local store and its keys, if any of its objects may be encrypted."""
    store = platform.objects
    if isinstance(store, LocalObjectStore) and store.tenant_keys is not None and store.tenant_keys.used():
        return store, store.tenant_keys
    return None, None


def _add_installation_key(file: Path) -> bool:
    lines = keys_in(file)
    if len(lines) > 1:
        return False
    replace_keys(file, [new_key(), *lines])
    return True


def _seal_again(platform: Platform) -> int:
    """Encrypt the secrets of the database with the newest key; returns the rows that changed."""
    newest, both = Fernet(keys_in(platform.settings.secrets_key_file)[0]), cipher(platform.settings)

    def again(sealed: str) -> str:
        if not sealed:
            return sealed
        try:
            newest.decrypt(sealed)
        except InvalidToken:
            with suppress(InvalidToken):  # no key opens it: it stays as it is, as everywhere
                return both.rotate(sealed.encode()).decode()
        return sealed

    with platform.engine.begin() as conn:
        return _endpoints_again(conn, again) + _integrations_again(conn, again)


def _endpoints_again(conn: Connection, again: Seal) -> int:
    table, changed = webhook_endpoints, 0
    for row in conn.execute(sa.select(table.c.id, table.c.sealed_url, table.c.secrets).order_by(table.c.id).with_for_update()).all():
        secrets: list[dict[str, Any]] = [{**one, "secret": again(one["secret"])} for one in row.secrets]
        values = {"sealed_url": again(row.sealed_url), "secrets": secrets}
        if values != {"sealed_url": row.sealed_url, "secrets": row.secrets}:
            changed += conn.execute(sa.update(table).where(table.c.id == row.id).values(values)).rowcount
    return changed


def _integrations_again(conn: Connection, again: Seal) -> int:
    table, changed = integrations, 0
    query = sa.select(table.c.tenant_id, table.c.type, table.c.sealed_key).order_by(table.c.tenant_id, table.c.type)
    for row in conn.execute(query.with_for_update()).all():
        if (sealed := again(row.sealed_key)) != row.sealed_key:
            this = (table.c.tenant_id == row.tenant_id) & (table.c.type == row.type)
            changed += conn.execute(sa.update(table).where(this).values(sealed_key=sealed)).rowcount
    return changed


def _refuse_if_in_use(platform: Platform, added_at: float) -> None:
    left = RETIRE_AFTER_S - (time.time() - added_at)
    if left > 0:
        raise Conflict(
            f"the newest key is {RETIRE_AFTER_S - left:.0f} s old, and a write with the one before may still be under way; retire it in "
            f"{left / 60:.0f} min",
            code="key_in_use",
        )
    older = sa.func.extract("epoch", reservations.c.granted_at) < added_at
    held = sa.select(reservations.c.job_id).where(reservations.c.released_at.is_(None), older).limit(1)
    tokens = (
        "SELECT count(*) FROM tasks.procrastinate_jobs WHERE task_name = :name AND args ->> 'sealed_token' <> '' AND status <> 'succeeded'"
    )
    with platform.engine.connect() as conn:
        job_id = conn.scalar(held)
        imports = conn.scalar(sa.text(tokens), {"name": FETCH})
    if job_id is not None or imports:
        what = f"a workload of job {job_id} started before the newest key, and may write objects" if job_id else f"{imports} imports wait"
        raise Conflict(f"{what} with an older one; retire it when that has ended", code="key_in_use")
