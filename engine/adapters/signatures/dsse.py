"""DSSE envelopes: a JSON payload, and Ed25519 signatures over its type and bytes.

Format: DSSE 1.0 (https://github.com/secure-systems-lab/dsse), payload type of in-toto. Ed25519 is deterministic, so the same statement and
key give the same envelope.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from core.errors import IntegrityError
from engine.adapters.signatures.public_keys import key_id

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MALFORMED, UNKNOWN_KEY, BAD_SIGNATURE = "signature_malformed", "signing_key_unknown", "signature_invalid"

FIELDS, SIGNATURE_FIELDS = frozenset({"payloadType", "payload", "signatures"}), frozenset({"keyid", "sig"})
Envelope = Mapping[str, Any]
"""``{"payloadType", "payload" (base64), "signatures": [{"keyid", "sig" (base64)}]}``."""


def sign_statement(statement: Mapping[str, Any], key: Ed25519PrivateKey) -> Envelope:
    """Returns `statement` in an envelope that `key` signs."""
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    signature = {"keyid": key_id(key.public_key()), "sig": base64.b64encode(key.sign(_signed_bytes(payload))).decode()}
    return {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}


def open_envelope(envelope: object, keys: Mapping[str, Ed25519PublicKey]) -> Mapping[str, Any]:
    """Returns the statement of an envelope that one of `keys` (key id -> key) signed.

    Raises ``IntegrityError`` with the code ``signature_malformed``, ``signing_key_unknown`` or ``signature_invalid``.
    """
    payload, signatures = _parsed(envelope)
    known = {signer: signature for signer, signature in signatures.items() if signer in keys}
    if not known:
        signers = ", ".join(sorted(signatures)) or "no key"
        raise IntegrityError(
            f"signed by {signers[:200]}, which is not among the {len(keys)} keys of the platform; compare them with GET "
            "/.well-known/ft-signing-keys.json",
            code=UNKNOWN_KEY,
        )
    for signer, signature in known.items():
        try:
            keys[signer].verify(signature, _signed_bytes(payload))
        except InvalidSignature as e:
            raise IntegrityError(f"the signature of key {signer} does not match what it signed", code=BAD_SIGNATURE) from e
    statement = json.loads(payload)
    if not isinstance(statement, dict):
        raise IntegrityError("the signed payload is not a JSON object", code=MALFORMED)
    return statement


def _signed_bytes(payload: bytes) -> bytes:
    """Returns DSSE's pre-authentication encoding, which also signs the payload's type."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def _parsed(envelope: object) -> tuple[bytes, Mapping[str, bytes]]:
    """Returns the payload, and the signatures by key id."""
    try:
        if not isinstance(envelope, Mapping) or envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"payloadType is not {PAYLOAD_TYPE}")
        for part, known in ((envelope, FIELDS), *((one, SIGNATURE_FIELDS) for one in envelope["signatures"])):
            if unknown := sorted(set(part) - known):
                raise ValueError(f"unknown field {str(unknown[0])[:80]!r}, which nothing signs")
        signatures = {str(one["keyid"]): base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]}
        if len(signatures) < len(envelope["signatures"]):
            raise ValueError("a key signs twice, and two readers may disagree on which signature counts")
        return base64.b64decode(envelope["payload"], validate=True), signatures
    except (KeyError, TypeError, ValueError, binascii.Error) as e:
        raise IntegrityError(f"not a DSSE envelope: {type(e).__name__}: {e}", code=MALFORMED) from e
