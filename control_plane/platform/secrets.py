"""Secrets of keys: made at random, kept as a hash, shown by their last characters."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from control_plane.platform.settings import Settings
from core.durable_files import sync_to_disk
from core.errors import IntegrityError

TENANT_PREFIX = "ft-sk-"
OPERATOR_PREFIX = "ft-op-"
SESSION_PREFIX = "ft-ss-"


def new_secret(prefix: str) -> str:
    """A secret that nobody has yet."""
    return prefix + secrets.token_urlsafe(32)


def sha256_of(secret: str) -> str:
    """A plain hash is enough: the secret is 256 random bits, which no list of passwords holds."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def hint_of(secret: str) -> str:
    """What tells a key from others without opening anything."""
    prefix = next((p for p in (TENANT_PREFIX, OPERATOR_PREFIX) if secret.startswith(p)), None)
    if prefix is None:
        return f"(not of the form {TENANT_PREFIX}...)"
    return f"{prefix}...{secret[-4:]}" if len(secret) > 20 else f"{prefix}... (too short)"


TOKEN_BYTES = 32


def inference_token(settings: Settings) -> str:
    """Bearer token of the inference servers: ``FT_INFERENCE_TOKEN``, else the one of this installation."""
    return settings.inference_token or kept_secret(settings.home / "inference.token", _new_token)


def dagster_token(settings: Settings) -> str:
    """Bearer token of the platform's own calls of Dagster's webserver: ``FT_DAGSTER_TOKEN``, else the one of this installation."""
    return settings.dagster_token or kept_secret(settings.home / "dagster.token", _new_token)


def oidc_client_secret(settings: Settings) -> str:
    """Secret of this platform at the identity provider, read again at each use, so that a changed file is seen; empty: it has none."""
    file = settings.oidc_client_secret_file
    return file.read_text().strip() if file else settings.oidc_client_secret


def cipher(settings: Settings) -> MultiFernet:
    """Encrypts with the newest key of the installation and decrypts with each."""
    return _cipher(settings.secrets_key_file)


def seal(settings: Settings, text: str) -> str:
    """`text`, encrypted for the database."""
    return cipher(settings).encrypt(text.encode()).decode()


def unseal(settings: Settings, sealed: str) -> str:
    """The text of :func:`seal`; ``IntegrityError`` where no key of this installation opens it."""
    try:
        return cipher(settings).decrypt(sealed).decode()
    except InvalidToken as e:
        raise IntegrityError(
            f"no key in {settings.secrets_key_file} decrypts a secret of the database; restore the key file that belongs to it",
            code="secrets_key_mismatch",
        ) from e


def _cipher(key_file: Path) -> MultiFernet:
    """One key per line, newest first; old ones stay until ``ft admin keys retire``. A changed file is read again."""
    kept_secret(key_file, new_key)
    found = key_file.stat()
    return _cipher_of(key_file, found.st_ino, found.st_mtime_ns)


@lru_cache(maxsize=16)
def _cipher_of(key_file: Path, _inode: int, _changed_ns: int) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in keys_in(key_file)])


def new_key() -> str:
    return Fernet.generate_key().decode()


def keys_in(key_file: Path) -> list[str]:
    """Return the lines of a key file, newest first."""
    return kept_secret(key_file, new_key).split()


def replace_keys(key_file: Path, lines: Sequence[str]) -> None:
    """Replace a key file in one step: readers see the keys of before or these."""
    beside = key_file.with_name(f".{key_file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write("".join(f"{line}\n" for line in lines))
        out.flush()
        os.fsync(out.fileno())
    beside.replace(key_file)
    sync_to_disk(key_file.parent)


def _new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def kept_secret(path: Path, new: Callable[[], str]) -> str:
    """The content of `path`; a missing file is written first. Of several processes that write it at once, one wins."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"{new()}\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(beside, path)  # refuses where the file exists, unlike a rename
        except FileExistsError:
            pass
        finally:
            beside.unlink()
        sync_to_disk(path.parent)  # what is sealed with a key outlives a power cut only if the key does
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise IntegrityError(f"{path} has mode {mode:04o}: others can read it; run chmod 600 {path}", code="secret_file_readable")
    return path.read_text().strip()
