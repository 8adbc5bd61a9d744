"""The platform's public keys as a JSON Web Key Set (RFC 7517, 8037). A key's id is the thumbprint of RFC 7638."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from core.errors import InvalidRequest


def key_id(key: Ed25519PublicKey) -> str:
    """Returns the id of `key`: the base64url SHA-256 of its required members in order."""
    members = json.dumps(_required(key), sort_keys=True, separators=(",", ":"))
    return _base64url(hashlib.sha256(members.encode()).digest())


def key_set(keys: Iterable[Ed25519PublicKey]) -> Mapping[str, Any]:
    """Returns the document that :func:`read_key_set` reads."""
    return {"keys": [{**_required(key), "kid": key_id(key), "use": "sig", "alg": "EdDSA"} for key in keys]}


def read_key_set(document: object) -> dict[str, Ed25519PublicKey]:
    """Returns the Ed25519 keys of a key set by their ids, which are computed; ``InvalidRequest`` if there are none."""
    entries = document.get("keys") if isinstance(document, Mapping) else None
    try:
        found = [decode_key(str(one["x"])) for one in entries or () if (one.get("kty"), one.get("crv")) == ("OKP", "Ed25519")]
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise InvalidRequest(f"not a set of Ed25519 keys: {type(e).__name__}: {e}; `ft models keys -o FILE` saves one", param="keys") from e
    if not found:
        raise InvalidRequest("no Ed25519 key in the key set; `ft models keys -o FILE` saves one", param="keys")
    return {key_id(key): key for key in found}


def encode_key(key: Ed25519PublicKey) -> str:
    """Returns the 32 bytes of `key` in base64url, the member ``x`` of its JSON Web Key."""
    return _base64url(key.public_bytes_raw())


def decode_key(x: str) -> Ed25519PublicKey:
    """Inverse of :func:`encode`; ``ValueError`` for anything but 32 bytes."""
    return Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(x + "=" * (-len(x) % 4)))


def _required(key: Ed25519PublicKey) -> dict[str, str]:
    return {"crv": "Ed25519", "kty": "OKP", "x": encode_key(key)}


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
