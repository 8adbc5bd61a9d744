"""Webhook endpoints as OpenAI's client drives them, and events as its ``unwrap`` and Standard Webhooks' library verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from cryptography.fernet import Fernet
from standardwebhooks import Webhook, WebhookVerificationError

from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.platform.secrets import _cipher_of
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.event_types import EVENT_TYPES
from tests.support.servers.webhook_receiver import Receiver, receiver, until

SUCCEEDED = "fine_tuning.job.succeeded"


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.1/32")


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


@pytest.fixture
def rest(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{api_url}/v1", headers={"authorization": f"Bearer {api_key}"}, timeout=30) as made:
        yield made


def tell(platform: Platform, tenant: Tenant, kind: str = SUCCEEDED, subject: str = "ftjob-1") -> None:
    with platform.engine.begin() as conn:
        publish(conn, tenant.id, kind, subject, now=platform.clock())


def test_an_event_is_delivered_and_both_libraries_verify_it(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, there: Receiver
) -> None:
    made = client.webhooks.create(name="production", url=there.url(), event_types=[SUCCEEDED])
    tell(platform, tenant)
    until(lambda: there.received)
    (got,) = there.received
    event = client.webhooks.unwrap(got.body, got.headers, secret=made.signing_secret)
    assert (event.type, event.data.id, event.id) == (SUCCEEDED, "ftjob-1", got.headers["webhook-id"])
    assert Webhook(made.signing_secret).verify(got.body, dict(got.headers))["type"] == SUCCEEDED
    assert got.headers["user-agent"].startswith("ft-platform-webhooks/")
    other = client.webhooks.create(name="other", url=there.url("/ok/other"), event_types=[SUCCEEDED])
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(got.body, got.headers, secret=other.signing_secret)
    with pytest.raises(WebhookVerificationError):
        Webhook(made.signing_secret).verify(got.body + b" ", dict(got.headers))


def test_the_client_unwraps_every_type(client: openai.OpenAI, rest: httpx.Client, there: Receiver) -> None:
    made = rest.post("/webhook_endpoints", json={"name": "all", "url": there.url(), "event_types": ["*"]}).json()
    for kind in EVENT_TYPES:
        tried = client.webhooks.test(made["id"], event_type=kind)  # type: ignore[arg-type]
        assert (tried.status_code, tried.event_type, tried.webhook_endpoint_id) == (200, kind, made["id"])
        event = client.webhooks.unwrap(there.received[-1].body, there.received[-1].headers, secret=made["signing_secret"])
        assert event.type == kind and event.data.id.startswith("test_")  # type: ignore[union-attr]


def test_the_client_lists_changes_and_deletes_endpoints(client: openai.OpenAI, there: Receiver) -> None:
    assert client.webhooks.event_types.list().data == list(EVENT_TYPES)
    made = [client.webhooks.create(name=f"e{n}", url=there.url(), event_types=[SUCCEEDED]) for n in range(3)]
    assert [e.id for e in client.webhooks.list(limit=2)] == [m.id for m in reversed(made)], "it asks for the next page itself"
    found = client.webhooks.retrieve(made[0].id)
    assert found.signing_secret_hint == f"whsec_...{made[0].signing_secret[-4:]}"
    assert "signing_secret" not in found.model_dump() and made[0].signing_secret.startswith("whsec_")
    changed = client.webhooks.update(made[0].id, name="new", url=there.url("/ok/new"))
    assert (changed.name, changed.url, changed.event_types) == ("new", there.url("/ok/new"), [SUCCEEDED])
    assert client.webhooks.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.webhooks.retrieve(made[0].id)


def test_endpoints_whose_key_is_lost_are_listed_without_a_hint_and_can_be_deleted(
    client: openai.OpenAI, rest: httpx.Client, platform: Platform, there: Receiver
) -> None:
    made = client.webhooks.create(name="production", url=there.url("/hook"), event_types=[SUCCEEDED])
    keys = platform.settings.secrets_key_file
    kept = keys.read_text()
    try:
        keys.write_text(Fernet.generate_key().decode())
        _cipher_of.cache_clear()  # as a restart
        (listed,) = rest.get("/webhook_endpoints").json()["data"]
        assert (listed["id"], listed["signing_secret_hint"]) == (made.id, "") and not listed["url"].endswith("/hook")
        assert rest.delete(f"/webhook_endpoints/{made.id}").status_code == 200
    finally:
        keys.write_text(kept)
        _cipher_of.cache_clear()


def test_a_rotated_secret_signs_beside_the_old_one_or_alone(client: openai.OpenAI, there: Receiver) -> None:
    first = client.webhooks.create(name="e", url=there.url(), event_types=[SUCCEEDED])
    second = client.webhooks.rotate_secret(first.id, keep_old_secret_active_for_24_hours=True)
    client.webhooks.test(first.id, event_type=SUCCEEDED)
    for secret in (first.signing_secret, second.signing_secret):
        client.webhooks.verify_signature(there.received[0].body, there.received[0].headers, secret=secret)
    third = client.webhooks.rotate_secret(first.id)
    client.webhooks.test(first.id, event_type=SUCCEEDED)
    client.webhooks.verify_signature(there.received[1].body, there.received[1].headers, secret=third.signing_secret)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(there.received[1].body, there.received[1].headers, secret=second.signing_secret)


def test_a_test_tells_what_the_receiver_said_and_that_it_said_nothing(client: openai.OpenAI, there: Receiver) -> None:
    bad = client.webhooks.create(name="bad", url=there.url("/status/418"), event_types=[SUCCEEDED])
    assert client.webhooks.test(bad.id, event_type=SUCCEEDED).status_code == 418
    silent = client.webhooks.create(name="silent", url=there.url("/close"), event_types=[SUCCEEDED])
    with pytest.raises(openai.BadRequestError, match="closed the connection") as refused:
        client.webhooks.test(silent.id, event_type=SUCCEEDED)
    assert refused.value.code == "webhook_not_received"


INNER = [
    "http://169.254.169.254/latest/meta-data/",
    "https://127.0.0.3:8443/x",
    "https://10.0.0.1/",
    "http://127.0.0.2/",
    "https://u:p@127.0.0.1/",
]


@pytest.mark.parametrize("url", INNER)
def test_an_inner_address_is_refused_when_an_endpoint_is_made_or_changed(client: openai.OpenAI, there: Receiver, url: str) -> None:
    made = client.webhooks.create(name="e", url=there.url(), event_types=[SUCCEEDED])
    for call in (
        lambda: client.webhooks.create(name="e", url=url, event_types=[SUCCEEDED]),
        lambda: client.webhooks.update(made.id, url=url),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert (refused.value.code, refused.value.param) == ("invalid_webhook_url", "url")


def test_deliveries_are_listed_with_what_became_of_them_and_replayed(
    rest: httpx.Client, platform: Platform, tenant: Tenant, there: Receiver
) -> None:
    made = rest.post("/webhook_endpoints", json={"name": "e", "url": there.url("/status/410"), "event_types": ["*"]}).json()
    path = f"/webhook_endpoints/{made['id']}"
    tell(platform, tenant)
    until(lambda: rest.get(path).json()["state"] == "disabled")
    tell(platform, tenant, subject="ftjob-2")

    def dead() -> list[dict[str, Any]]:
        return list(rest.get(f"{path}/deliveries", params={"state": "dead"}).json()["data"])

    until(lambda: len([d for d in dead() if d["subject"].startswith("ftjob")]) == 2)
    first = next(d for d in dead() if d["subject"] == "ftjob-1")
    assert (first["last_status_code"], first["event_type"], first["attempts"]) == (410, SUCCEEDED, 1)
    page = rest.get(f"{path}/deliveries", params={"limit": 1}).json()
    assert page["has_more"] and len(page["data"]) == 1
    assert rest.post(f"{path}/deliveries/{first['id']}/replay").json()["error"]["code"] == "webhook_endpoint_disabled"
    there.statuses["/status/410"] = 200
    assert rest.post(path, json={"state": "enabled"}).json()["disabled_reason"] is None
    assert rest.post(f"{path}/deliveries/{first['id']}/replay").json()["state"] == "pending"
    assert rest.post(f"{path}/replay", json={"since": first["created_at"] - 1}).json()["replayed"] >= 1
    until(lambda: not dead() and rest.get(f"{path}/deliveries", params={"state": "pending"}).json()["data"] == [])
    assert {r.headers["webhook-id"] for r in there.received} >= {first["event_id"]}


def test_another_tenants_endpoint_is_not_there_and_a_reader_changes_nothing(
    client: openai.OpenAI, api_url: str, platform: Platform, tenant: Tenant, there: Receiver
) -> None:
    made = client.webhooks.create(name="e", url=there.url(), event_types=[SUCCEEDED])
    _, other = tenants.create(platform, f"{tenant.id}-2")
    reader = tenants.create_key(platform, tenant.id, name="r", scopes=["read"]).secret
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=other.secret) as stranger:
        assert list(stranger.webhooks.list()) == []
        for call in (stranger.webhooks.retrieve, stranger.webhooks.delete, stranger.webhooks.rotate_secret):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=reader) as watcher:
        assert [e.id for e in watcher.webhooks.list()] == [made.id]
        with pytest.raises(openai.PermissionDeniedError):
            watcher.webhooks.delete(made.id)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"event_types": ["job.done"]}, "unknown_event_type"), ({"event_types": []}, "invalid_type"), ({"name": ""}, "invalid_type"),
        ({"name": "a\0b"}, "nul_character"), ({"url": "ftp://x"}, "invalid_webhook_url"), ({"state": "enabled"}, "invalid_type"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_carried_out_says_why(rest: httpx.Client, there: Receiver, body: dict[str, Any], code: str) -> None:
    answer = rest.post("/webhook_endpoints", json={"name": "e", "url": there.url(), "event_types": [SUCCEEDED], **body})
    assert answer.status_code == 400 and answer.json()["error"]["code"] in (code, "unknown_parameter")
