"""Webhook signatures as defined by Standard Webhooks (https://www.standardwebhooks.com), and the encrypted secrets of endpoints.

Every active secret signs; a receiver needs to know one of them. The id, the time and the bytes of the body are signed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from urllib.parse import urlsplit

from control_plane.notifications.tables import Endpoint, SigningSecret
from control_plane.platform.secrets import seal, unseal
from control_plane.platform.settings import Settings

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
"""Bytes of a secret; the standard requires 24 to 64."""
USER_AGENT = "ft-platform-webhooks/1"


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """Enough characters to tell one's secrets apart, but useless to others."""
    return f"{SECRET_PREFIX}...{secret[-4:]}"


def headers(*, event_id: str, body: bytes, live: Sequence[str], now: datetime) -> Mapping[str, str]:
    """Return the headers for `body`; the id stays the same over all attempts, time and signature change."""
    timestamp = str(int(now.timestamp()))
    signed = b".".join((event_id.encode(), timestamp.encode(), body))
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "webhook-id": event_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{_mac(secret, signed)}" for secret in live),
    }


def _mac(secret: str, signed: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def sealed_url(settings: Settings, url: str) -> Mapping[str, object]:
    """Encrypt `url` into columns."""
    parts = urlsplit(url)
    return {"url": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", "sealed_url": seal(settings, url)}


def sealed_secrets(settings: Settings, *secrets: SigningSecret) -> Mapping[str, object]:
    """Encrypt `secrets` into a column."""
    return {"secrets": [asdict(replace(one, secret=seal(settings, one.secret))) for one in secrets]}


def opened(settings: Settings, endpoint: Endpoint) -> Endpoint:
    """Return `endpoint` with its URL and secrets decrypted."""
    secrets = tuple(replace(one, secret=unseal(settings, one.secret)) for one in endpoint.secrets)
    url = unseal(settings, endpoint.sealed_url) if endpoint.sealed_url else endpoint.url  # a deleted endpoint has none
    return replace(endpoint, url=url, secrets=secrets)
