"""Webhooks are verified as Standard Webhooks says: against the platform's own signatures and the reference library's."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook

from control_plane.notifications import signatures
from core.errors import InvalidRequest
from ft_client import webhooks

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BODY = json.dumps({"id": "evt_1", "object": "event", "type": "fine_tuning.job.succeeded", "data": {"id": "ftjob-1"}}).encode()


def now() -> float:
    return NOW.timestamp()


def test_what_the_platform_signs_is_verified_during_a_rotation_too() -> None:
    old, new = signatures.new_secret(), signatures.new_secret()
    headers = {k.title(): v for k, v in signatures.headers(event_id="evt_1", body=BODY, live=[old, new], now=NOW).items()}
    for secret in (old, new):
        assert webhooks.verify(BODY, headers, secret, now=now)["data"] == {"id": "ftjob-1"}


def test_what_the_reference_library_signs_is_verified() -> None:
    secret = signatures.new_secret()
    signature = Webhook(secret).sign("evt_1", NOW, BODY.decode())
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(now())), "webhook-signature": f"v1a,AAAA v1,!! {signature}"}
    assert webhooks.verify(BODY.decode(), headers, secret, now=now)["type"] == "fine_tuning.job.succeeded"


@pytest.mark.parametrize("change", ["body", "id", "late", "early", "secret", "missing", "no_time", "no_ascii", "no_utf8", "no_age"])
def test_what_was_changed_or_is_old_is_refused(change: str) -> None:
    secret = signatures.new_secret()
    headers = dict(signatures.headers(event_id="evt_1", body=BODY, live=[secret], now=NOW))
    at = now()
    body: bytes | str = BODY
    if change == "body":
        body = BODY.replace(b"ftjob-1", b"ftjob-2")
    elif change == "id":
        headers["webhook-id"] = "evt_2"
    elif change == "late":
        at += 301
    elif change == "early":
        at -= 301
    elif change == "secret":
        secret = signatures.new_secret()
    elif change == "missing":
        del headers["webhook-signature"]
    elif change == "no_ascii":
        headers["webhook-signature"] = "v1,\u00e9"
    elif change == "no_utf8":
        headers["webhook-id"], body = "evt_\udcff", "\udcff"
    else:
        headers["webhook-timestamp"] = "yesterday" if change == "no_time" else "9" * 400
    with pytest.raises(InvalidRequest) as refused:
        webhooks.verify(body, headers, secret, now=lambda: at)
    assert refused.value.code == "invalid_webhook_signature"


def test_a_secret_that_is_none_says_so() -> None:
    headers = signatures.headers(event_id="evt_1", body=BODY, live=[signatures.new_secret()], now=NOW)
    for wrong in ("not a secret", "whsec_\u00e9"):
        with pytest.raises(InvalidRequest, match="not base64"):
            webhooks.verify(BODY, headers, wrong, now=now)
