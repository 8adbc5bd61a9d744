"""Keys that encrypt the objects of a local store, one per tenant, in the store's directory and encrypted with the installation's key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from control_plane.platform.secrets import kept_secret
from ft_assets.encrypted_files import DATA_KEY_BYTES, DataKey
from ft_assets.errors import IntegrityError
from ft_assets.layout import tenant_of

KEYS = ".keys"
"""Directory of the tenants' keys, one file each: no object's key starts with a dot."""


class TenantKeys:
    """`cipher` encrypts the tenants' keys; a tenant's key is made with its first object."""

    def __init__(self, directory: Path, cipher: Callable[[], MultiFernet]) -> None:
        self._directory, self._cipher = directory, cipher
        self._known: dict[str, MultiFernet] = {}

    def new_data_key(self, key: str) -> DataKey:
        """Return a key for a new object."""
        data_key = secrets.token_bytes(DATA_KEY_BYTES)
        return DataKey(data_key, self._of(_owner(key)).encrypt(data_key + _name(key)))

    def data_key(self, key: str, envelope: bytes) -> bytes:
        """Return the key in the envelope of an object."""
        owner, opened = _owner(key), b""
        if (self._directory / owner).is_file():  # reading makes no key: one that is restored from a backup would replace it
            with suppress(InvalidToken):
                opened = self._of(owner).decrypt(envelope)
        if opened[DATA_KEY_BYTES:] != _name(key):
            raise IntegrityError(f"no key in {self._directory} decrypts object {key!r}; restore the keys or the object from a backup")
        return opened[:DATA_KEY_BYTES]

    def used(self) -> bool:
        """Whether any object of the store may be encrypted."""
        return self._directory.is_dir()

    def _of(self, owner: str) -> MultiFernet:
        if (known := self._known.get(owner)) is None:
            stored = kept_secret(self._directory / owner, lambda: self._cipher().encrypt(Fernet.generate_key()).decode())
            try:
                known = MultiFernet([Fernet(self._cipher().decrypt(line)) for line in stored.split()])
            except InvalidToken:
                raise IntegrityError(
                    f"the installation's key does not decrypt {self._directory / owner}; restore the key file that belongs to it",
                    code="secrets_key_mismatch",
                ) from None
            self._known[owner] = known
        return known


def _owner(key: str) -> str:
    """Return the name of the key file; no tenant's id starts with a dot."""
    return tenant_of(key) or ".installation"


def _name(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
