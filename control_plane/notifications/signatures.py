"""Signatures of webhooks, as Standard Webhooks has them: https://www.standardwebhooks.com.

Each secret that is live signs; a receiver that knows one of them is content. What is signed is the id, the time and the body's bytes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from control_plane.platform.secrets import seal, unseal
from control_plane.platform.settings import Settings

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
"""The standard asks for 24 to 64."""
USER_AGENT = "ft-platform-webhooks/1"


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """Enough to tell one's secrets apart, and of no use to anybody else."""
    return f"{SECRET_PREFIX}...{secret[-4:]}"


def headers(*, event_id: str, body: bytes, live: Sequence[str], now: datetime) -> Mapping[str, str]:
    """What goes with `body`; the id is the same at every attempt, the time and so the signature are the attempt's."""
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


def sealed_url(settings: Settings, url: str) -> dict[str, Any]:
    """`url` as columns."""
    parts = urlsplit(url)
    return {"url": f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", "sealed_url": seal(settings, url)}


def sealed_secrets(settings: Settings, secrets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`secrets` as a column."""
    return {"secrets": [{**s, "secret": seal(settings, s["secret"])} for s in secrets]}


def opened(settings: Settings, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of ``webhook_endpoints`` with its URL and secrets in clear."""
    secrets = [{**s, "secret": unseal(settings, s["secret"])} for s in row["secrets"]]
    url = unseal(settings, row["sealed_url"]) if row["sealed_url"] else row["url"]  # a deleted one has none
    return {**row, "url": url, "secrets": secrets}
