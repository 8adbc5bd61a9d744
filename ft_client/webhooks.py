"""Verifies that a webhook comes from the platform, by Standard Webhooks (https://www.standardwebhooks.com).

event = webhooks.verify(request.body, request.headers, secret="whsec_...")
if event.type == "fine_tuning.job.succeeded":
    ...
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping

from core.errors import InvalidRequest
from ft_client.record import Record, parse

SECRET_PREFIX = "whsec_"
TOLERANCE_S = 300.0
"""Most seconds that a webhook may be old, or ahead of this clock: the standard's five minutes prevent replays."""


def verify(
    body: bytes | str,
    headers: Mapping[str, str],
    secret: str,
    *,
    tolerance_s: float = TOLERANCE_S,
    now: Callable[[], float] = time.time,
) -> Record:
    """Returns the event of a webhook with a valid signature and time; raises :class:`InvalidRequest` otherwise.

    `body` must be the received bytes: JSON that was parsed and written again has another signature.
    """
    raw = _bytes(body) if isinstance(body, str) else body
    sent = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in ("webhook-id", "webhook-timestamp", "webhook-signature") if not sent.get(name)]
    if missing:
        raise _refusal(f"the header {missing[0]} is missing; pass all headers of the request", param=missing[0])
    _check_time(sent["webhook-timestamp"], tolerance_s=tolerance_s, now=now())
    signed = b".".join((_bytes(sent["webhook-id"]), sent["webhook-timestamp"].encode(), raw))
    expected = hmac.new(_key(secret), signed, hashlib.sha256).digest()
    if not any(hmac.compare_digest(expected, given) for given in _signatures(sent["webhook-signature"])):
        raise _refusal("no signature matches; check the secret, and pass the body exactly as received", param="webhook-signature")
    event: Record = parse(raw)
    return event


def _bytes(text: str) -> bytes:
    """Never raises: servers hand on bytes of a header that are not UTF-8 as surrogates, which nothing signed has."""
    return text.encode(errors="replace")


def _check_time(timestamp: str, *, tolerance_s: float, now: float) -> None:
    try:
        age_s = now - int(timestamp)
    except (ValueError, OverflowError):
        raise _refusal(f"webhook-timestamp {timestamp[:40]!r} is not a time in seconds", param="webhook-timestamp") from None
    if abs(age_s) > tolerance_s:
        raise _refusal(
            f"the webhook was signed {age_s:.0f} s ago, more than {tolerance_s:g} s; check the clock here, or pass tolerance_s",
            param="webhook-timestamp",
        )


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        raise InvalidRequest("the secret is not base64; pass the endpoint's signing secret, whsec_...", param="secret") from None


def _signatures(header: str) -> list[bytes]:
    """Returns the signatures of version 1; there are several while a secret is rotated."""
    found = []
    for one in header.split(" "):
        version, _, value = one.partition(",")
        if version == "v1":
            try:
                found.append(base64.b64decode(value, validate=True))
            except ValueError:
                continue
    return found


def _refusal(message: str, *, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_webhook_signature", param=param)
