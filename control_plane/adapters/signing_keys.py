"""The platform's signing keys: the private one in a file of the worker, every public one in the database.

The newest key signs. A key that was replaced still verifies what it signed; one that was revoked no longer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy.dialects.postgresql import insert

from control_plane.adapters.tables import SigningKey, adapters, exports, signing_keys
from control_plane.platform.context import Platform
from control_plane.platform.records import many
from control_plane.platform.secrets import kept_secret
from core.durable_files import sync_to_disk
from core.errors import Conflict, IntegrityError, NotFound
from engine.adapters import decode_key, encode_key, key_id, key_set


def current(platform: Platform) -> Ed25519PrivateKey:
    """Return the key that signs, with its public key published; a missing file is made.

    Raises ``IntegrityError``: ``signing_key_unreadable``, or ``signing_key_revoked`` until the file holds another key.
    """
    key = _parsed(platform.settings.signing_key_file)
    id_ = key_id(key.public_key())
    known = {one.id: one for one in list_keys(platform)}
    if id_ not in known:
        _publish(platform, key.public_key())
    elif known[id_].revoked_at is not None:
        raise IntegrityError(
            f"signing key {id_} of {platform.settings.signing_key_file} was revoked; run `ft admin signing-keys rotate`, or replace the "
            "Secret that holds it",
            code="signing_key_revoked",
        )
    return key


def list_keys(platform: Platform) -> list[SigningKey]:
    """Return every key that ever signed, newest first."""
    with platform.engine.connect() as conn:
        return many(conn, sa.select(signing_keys).order_by(signing_keys.c.created_at.desc(), signing_keys.c.id), SigningKey)


def trusted(platform: Platform) -> dict[str, Ed25519PublicKey]:
    """Return the keys that were not revoked by their ids, newest first."""
    return {one.id: decode_key(one.public_key) for one in list_keys(platform) if one.revoked_at is None}


def published(platform: Platform) -> Mapping[str, Any]:
    """Return the trusted keys as a JSON Web Key Set."""
    return key_set(trusted(platform).values())


def rotate(platform: Platform) -> SigningKey:
    """Replace the key file of this machine and publish the new key; running workers use it from their next signature on."""
    file = platform.settings.signing_key_file
    if not file.exists():
        raise Conflict(
            f"there is no key file {file} on this machine; on a cluster, replace `signing.key` in its Secret and restart the worker",
            code="no_signing_key_file",
        )
    beside = file.with_name(f".{file.name}.new")
    beside.unlink(missing_ok=True)  # left by a call that was killed
    kept_secret(beside, _new_key)
    _publish(platform, _parsed(beside).public_key())
    beside.replace(file)
    sync_to_disk(file.parent)
    return list_keys(platform)[0]


def revoke(platform: Platform, id_: str) -> SigningKey:
    """Trust a key no longer; the worker signs again what it had signed. Revoking it again changes nothing."""
    with platform.engine.begin() as conn:
        mine = signing_keys.c.id == id_
        conn.execute(sa.update(signing_keys).where(mine, signing_keys.c.revoked_at.is_(None)).values(revoked_at=platform.clock()))
        found = many(conn, sa.select(signing_keys).where(mine), SigningKey)
        if not found:
            raise NotFound(
                f"no signing key {id_[:80]!r}; `ft admin signing-keys list` shows them", code="signing_key_not_found", param="id"
            )
        for table in (adapters, exports):
            conn.execute(sa.update(table).where(table.c.signing_key_id == id_).values(signing_key_id=None, signature=sa.null()))
    return found[0]


def _publish(platform: Platform, key: Ed25519PublicKey) -> None:
    values = {"id": key_id(key), "public_key": encode_key(key), "created_at": platform.clock()}
    with platform.engine.begin() as conn:
        conn.execute(insert(signing_keys).values(values).on_conflict_do_nothing())


def _new_key() -> str:
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, *form).decode().strip()


def _parsed(file: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(kept_secret(file, _new_key).encode(), password=None)
    except (ValueError, TypeError) as e:  # TypeError: it needs a password
        raise IntegrityError(
            f"{file} holds no unencrypted private key in PEM: {e}; `openssl genpkey -algorithm ed25519` makes one",
            code="signing_key_unreadable",
        ) from e
    if not isinstance(key, Ed25519PrivateKey):
        raise IntegrityError(
            f"{file} holds another kind of key than Ed25519; `openssl genpkey -algorithm ed25519` makes one", code="signing_key_unreadable"
        )
    return key
