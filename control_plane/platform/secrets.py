"""Secrets of keys: made at random, kept as a hash, shown by their last characters."""

from __future__ import annotations

import hashlib
import secrets

TENANT_PREFIX = "ft-sk-"
OPERATOR_PREFIX = "ft-op-"


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
