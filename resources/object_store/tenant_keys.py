"""Keys that encrypt the objects of a local store, one per tenant, in the store's directory and encrypted with the installation's key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from control_plane.platform.secrets import kept_secret, replace_keys
from core.encrypted_files import DATA_KEY_BYTES, DataKey
from core.errors import IntegrityError
from core.layout import tenant_of

KEYS = ".keys"
"""Directory of the tenants' keys, one file each: no object's key starts with a dot."""
INSTALLATION = ".installation"
"""In the place of a tenant, for objects of none; other names with a dot are files that are being written."""


class TenantKeys:
    """`cipher` encrypts the tenants' keys; a tenant's key is made with its first object."""

    def __init__(self, directory: Path, cipher: Callable[[], MultiFernet]) -> None:
        self._directory, self._cipher = directory, cipher
        self._known: dict[str, tuple[tuple[int, int], Sequence[Fernet]]] = {}
        """By owner: the file that was read (inode and time of its change), and its keys."""

    def new_data_key(self, key: str) -> DataKey:
        """Return a key for a new object."""
        data_key = secrets.token_bytes(DATA_KEY_BYTES)
        return DataKey(data_key, self.envelope(key, data_key))

    def envelope(self, key: str, data_key: bytes) -> bytes:
        """Return the data key of an object, encrypted with its owner's newest key."""
        return self._of(_owner(key))[0].encrypt(data_key + _name(key))

    def data_key(self, key: str, envelope: bytes) -> bytes:
        """Return the key in the envelope of an object."""
        owner, opened = _owner(key), b""
        if (self._directory / owner).is_file():  # reading makes no key: one that is restored from a backup would replace it
            with suppress(InvalidToken):
                opened = MultiFernet(self._of(owner)).decrypt(envelope)
        if opened[DATA_KEY_BYTES:] != _name(key):
            raise IntegrityError(f"no key in {self._directory} decrypts object {key!r}; restore the keys or the object from a backup")
        return opened[:DATA_KEY_BYTES]

    def used(self) -> bool:
        """Whether any object of the store may be encrypted."""
        return self._directory.is_dir()

    def owners(self) -> list[str]:
        """Return the names of the key files: tenants, and the installation's own."""
        names = sorted(path.name for path in self._directory.iterdir()) if self.used() else []
        return [name for name in names if name == INSTALLATION or not name.startswith(".")]

    def file(self, owner: str) -> Path:
        return self._directory / owner

    def lines(self, owner: str) -> list[str]:
        """Return the owner's encrypted keys, newest first; none if its file was deleted."""
        with suppress(FileNotFoundError):
            return self.file(owner).read_text().split()
        return []

    def add(self, owner: str) -> None:
        """Give the owner a newer key for new objects; the others still open old ones."""
        self._replace(owner, [_wrapped(self._cipher(), Fernet.generate_key()), *self.lines(owner)])

    def wrap_again(self, owner: str) -> None:
        """Encrypt the owner's keys with the installation's newest key; ``IntegrityError`` if no key of the installation opens them."""
        try:
            wrapped = [self._cipher().rotate(line).decode() for line in self.lines(owner)]
        except InvalidToken:
            raise self._undecryptable(owner) from None
        if wrapped:
            self._replace(owner, wrapped)

    def retire(self, owner: str) -> int:
        """Remove all keys but the newest; returns how many. What is encrypted with them is lost."""
        first, *old = self.lines(owner)
        if old:
            self._replace(owner, [first])
        return len(old)

    def newer_envelope(self, key: str, envelope: bytes) -> bytes | None:
        """Return the envelope of an object, encrypted with its owner's newest key; None if it is already.

        Raises ``IntegrityError`` if none of its owner's keys opens it.
        """
        keys = self._of(_owner(key))
        with suppress(InvalidToken):
            keys[0].decrypt(envelope)
            return None
        try:
            return MultiFernet(keys).rotate(envelope)
        except InvalidToken:
            raise IntegrityError(f"no key in {self._directory} decrypts object {key!r}") from None

    def _replace(self, owner: str, lines: Sequence[str]) -> None:
        replace_keys(self.file(owner), lines)

    def _of(self, owner: str) -> Sequence[Fernet]:
        """Return the owner's keys, newest first; a changed file is read again."""
        file = self.file(owner)
        kept_secret(file, lambda: _wrapped(self._cipher(), Fernet.generate_key()))
        stat = file.stat()  # before it is read: a file that is replaced meanwhile is read again
        read = stat.st_ino, stat.st_mtime_ns
        if owner not in self._known or self._known[owner][0] != read:
            try:
                self._known[owner] = read, [Fernet(self._cipher().decrypt(line)) for line in self.lines(owner)]
            except InvalidToken:
                raise self._undecryptable(owner) from None
        return self._known[owner][1]

    def check(self, owner: str) -> None:
        """Raise ``IntegrityError`` if no key of the installation opens the owner's keys."""
        self._of(owner)

    def _undecryptable(self, owner: str) -> IntegrityError:
        return IntegrityError(
            f"the installation's key does not decrypt {self.file(owner)}; restore the key file that belongs to it",
            code="secrets_key_mismatch",
        )


def _wrapped(cipher: MultiFernet, key: bytes) -> str:
    return cipher.encrypt(key).decode()


def _owner(key: str) -> str:
    """Return the name of the key file; no tenant's id starts with a dot."""
    return tenant_of(key) or INSTALLATION


def _name(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
