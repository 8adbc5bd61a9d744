"""Webhook endpoints of a tenant: create, change, test. :mod:`control_plane.notifications.dispatch` sends to them."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.notifications import dispatch, signatures
from control_plane.notifications.rules import EVERY_TYPE
from control_plane.notifications.signatures import opened, sealed_secrets, sealed_url
from control_plane.notifications.tables import Endpoint, SigningSecret, webhook_endpoints
from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.protocols import WebhookSender
from control_plane.tenants.rules import check_name
from core.errors import Conflict, IntegrityError, InvalidRequest, NotFound, QuotaExceeded, RateLimited, Unavailable
from core.event_types import EVENT_TYPES

MAX_ENDPOINTS = 10
MAX_PAGE = 100
OVERLAP = timedelta(hours=24)
"""How long a replaced secret also signs, if requested: as in OpenAI's API."""
MAX_SECRETS = 5
"""Active secrets per endpoint: all signatures go into one header."""
AT_ONCE, AT_ONCE_OF_ONE_TENANT, WAIT_S = 8, 2, 2.0
"""Calls of the API that wait for a tenant's name server or receiver: they use few threads, and no tenant can use all of these."""
ENABLED, DISABLED = "enabled", "disabled"
BY_TENANT = "it was disabled by its tenant"

_changed = threading.Condition()
_outside: Counter[str] = Counter()
"""Number of these calls, by tenant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WithSecret:
    """A new endpoint, or one with a new secret; the only time that the secret is returned."""

    endpoint: Endpoint
    secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A receiver's answer to a test event."""

    endpoint_id: str
    event_type: str
    status: int
    text: str


def create(platform: Platform, tenant: str, *, name: str, url: str, event_types: Sequence[str]) -> WithSecret:
    """Create an endpoint for events from now on. Its URL is resolved and checked now, and again for each delivery."""
    types = _known(event_types)
    check_name(name)
    with _sender(platform, tenant) as sender:
        sender.check(url)
    now, secret = platform.clock(), signatures.new_secret()
    values = {
        "id": f"we_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "name": name, "event_types": types, "state": ENABLED, "created_at": now,
        "updated_at": now, **sealed_url(platform.settings, url), **sealed_secrets(platform.settings, SigningSecret(secret=secret)),
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"webhook_endpoints:{tenant}", 0))))
        count = conn.execute(sa.select(sa.func.count()).select_from(_mine(tenant).subquery())).scalar_one()
        if count >= MAX_ENDPOINTS:
            raise QuotaExceeded(
                f"the tenant has {count} webhook endpoints, at most {MAX_ENDPOINTS} are allowed; delete one",
                code="too_many_webhook_endpoints",
            )
        made = records.one(conn, sa.insert(webhook_endpoints).values(**values).returning(webhook_endpoints), Endpoint)
    return WithSecret(endpoint=opened(platform.settings, made), secret=secret)


def list_endpoints(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Endpoint]:
    """Return the endpoints, newest first."""
    keys = (webhook_endpoints.c.created_at, webhook_endpoints.c.id)
    with platform.engine.connect() as conn:
        found = page(
            conn, _mine(tenant), keys, of=Endpoint, id_column=webhook_endpoints.c.id, after=after, limit=limit, max_limit=MAX_PAGE
        )  # fmt: skip
    return replace(found, items=[_shown(platform, endpoint) for endpoint in found.items])


def _shown(platform: Platform, endpoint: Endpoint) -> Endpoint:
    """Decrypt `endpoint`; if no key decrypts it, only scheme and host are shown, so that it can be found and deleted."""
    try:
        return opened(platform.settings, endpoint)
    except IntegrityError:
        return replace(endpoint, secrets=())


def get(platform: Platform, tenant: str, endpoint_id: str) -> Endpoint:
    with platform.engine.connect() as conn:
        return opened(platform.settings, _one(conn, _mine(tenant).where(webhook_endpoints.c.id == endpoint_id), endpoint_id))


def update(platform: Platform, tenant: str, endpoint_id: str, changes: Mapping[str, Any]) -> Endpoint:
    """Set `name`, `url`, `event_types` or `state`; unchanged values change nothing.

    Disabling ends pending deliveries (they can be replayed); enabling clears earlier failures.
    """
    wanted = {k: v for k, v in changes.items() if v is not None}
    check_name(wanted.get("name"))
    if (state := wanted.get("state", ENABLED)) not in (ENABLED, DISABLED):
        raise InvalidRequest(f"state {state[:40]!r} is neither {ENABLED} nor {DISABLED}; send one of them", param="state")
    if "event_types" in wanted:
        wanted["event_types"] = tuple(_known(wanted["event_types"]))
    if "url" in wanted:
        get(platform, tenant, endpoint_id)
        with _sender(platform, tenant) as sender:
            sender.check(wanted["url"])
    with platform.engine.begin() as conn:
        present = opened(platform.settings, locked(conn, tenant, endpoint_id))
        values = {k: v for k, v in wanted.items() if getattr(present, k) != v}
        if not values:
            return present
        if "url" in values:
            values |= sealed_url(platform.settings, values["url"])
        if values.get("state") == DISABLED:
            values |= {"disabled_reason": BY_TENANT}
            dispatch.give_up(conn, endpoint_id, f"the endpoint was disabled: {BY_TENANT}")
        elif values.get("state") == ENABLED:
            values |= {"disabled_reason": None, "failing_since": None}
        return opened(platform.settings, _set(conn, endpoint_id, {**values, "updated_at": platform.clock()}))


def delete(platform: Platform, tenant: str, endpoint_id: str) -> None:
    """Delete an endpoint: nothing is sent to it any more, and its URL and secrets are erased."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        locked(conn, tenant, endpoint_id)
        dispatch.give_up(conn, endpoint_id, "the endpoint was deleted")
        ended = {"state": DISABLED, "deleted_at": now, "updated_at": now, "failing_since": None}
        _set(conn, endpoint_id, {**ended, "secrets": [], "url": "", "sealed_url": ""})


def rotate_secret(platform: Platform, tenant: str, endpoint_id: str, *, keep_old: bool = False) -> WithSecret:
    """Give an endpoint a new secret. The previous one ends at once or, with `keep_old`, also signs for another 24 hours."""
    now, secret = platform.clock(), signatures.new_secret()
    end = (now + OVERLAP).timestamp()
    with platform.engine.begin() as conn:
        present = opened(platform.settings, locked(conn, tenant, endpoint_id)).secrets
        live = set(dispatch.live_secrets(present, now))
        old = [replace(one, until=one.until or end) for one in present if one.secret in live] if keep_old else []
        sealed = sealed_secrets(platform.settings, SigningSecret(secret=secret), *old[: MAX_SECRETS - 1])
        changed = _set(conn, endpoint_id, {**sealed, "updated_at": now})
        return WithSecret(endpoint=opened(platform.settings, changed), secret=secret)


def send_test(platform: Platform, tenant: str, endpoint_id: str, *, event_type: str | None = None) -> Tried:
    """Send a signed event of `event_type` now, even to a disabled endpoint; ``InvalidRequest`` if no answer comes.

    Its object does not exist: the id begins with ``test_``. It is sent once, and counts for nothing.
    """
    endpoint = get(platform, tenant, endpoint_id)
    kind = event_type or next((t for t in endpoint.event_types if t != EVERY_TYPE), next(iter(EVENT_TYPES)))
    _known([kind])
    if kind == EVERY_TYPE:
        raise _unknown_types([kind])
    now, event_id = platform.clock(), f"evt_test_{uuid.uuid4().hex}"
    body = dispatch.event_body(event_id, kind, {"id": f"test_{uuid.uuid4().hex[:12]}"}, now)
    headers = signatures.headers(event_id=event_id, body=body, live=dispatch.live_secrets(endpoint.secrets, now), now=now)
    with _sender(platform, tenant) as sender:
        answer = sender.send(endpoint.url, headers=headers, body=body)
    if answer.status is None:
        raise InvalidRequest(
            f"the test event did not arrive: {answer.error}; mend the receiver, or set another url",
            code="webhook_not_received",
            param="url",
        )
    return Tried(endpoint_id=endpoint_id, event_type=kind, status=answer.status, text=answer.text)


def locked(conn: Connection, tenant: str, endpoint_id: str) -> Endpoint:
    return _one(conn, _mine(tenant).where(webhook_endpoints.c.id == endpoint_id).with_for_update(), endpoint_id)


def check_enabled(endpoint: Endpoint) -> None:
    if endpoint.state != ENABLED:
        raise Conflict(
            f"webhook endpoint {endpoint.id} is disabled ({endpoint.disabled_reason}); enable it first: state enabled",
            code="webhook_endpoint_disabled",
            param="state",
        )


def _mine(tenant: str) -> sa.Select[Any]:
    return sa.select(webhook_endpoints).where(webhook_endpoints.c.tenant_id == tenant, webhook_endpoints.c.deleted_at.is_(None))


def _one(conn: Connection, query: sa.Select[Any], endpoint_id: str) -> Endpoint:
    found = records.one_or_none(conn, query, Endpoint)
    if found is None:
        raise NotFound(
            f"no webhook endpoint {endpoint_id[:160]!r}; list yours with GET /v1/webhook_endpoints",
            code="webhook_endpoint_not_found",
            param="webhook_endpoint_id",
        )
    return found


def _set(conn: Connection, endpoint_id: str, values: Mapping[str, Any]) -> Endpoint:
    this = sa.update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id)
    return records.one(conn, this.values(**values).returning(webhook_endpoints), Endpoint)


def _known(event_types: Sequence[str]) -> list[str]:
    """Return the types without repetitions, in the order of the table; an unknown type is refused with the list of known ones."""
    requested = set(event_types)
    if not requested or (unknown := requested - {*EVENT_TYPES, EVERY_TYPE}):
        raise _unknown_types(sorted(unknown) if requested else [])
    return [t for t in (EVERY_TYPE, *EVENT_TYPES) if t in requested]


def _unknown_types(unknown: Sequence[str]) -> InvalidRequest:
    named = ", ".join(repr(t[:80]) for t in unknown[:5]) or "none"
    return InvalidRequest(
        f"event_types: {named} is not among {', '.join(EVENT_TYPES)}, or '*' for all of them",
        code="unknown_event_type",
        param="event_types",
    )


@contextmanager
def _sender(platform: Platform, tenant: str) -> Iterator[WebhookSender]:
    """Return the sender once this tenant may make another call."""
    if platform.webhooks is None:
        raise Unavailable("this platform sends no webhooks; ask its operator", code="webhooks_off")
    with _changed:
        if not _changed.wait_for(lambda: _outside[tenant] < AT_ONCE_OF_ONE_TENANT and _outside.total() < AT_ONCE, WAIT_S):
            is_own = _outside[tenant] >= AT_ONCE_OF_ONE_TENANT
            raise (RateLimited if is_own else Unavailable)(
                f"too many endpoints are being tried out at this moment, {AT_ONCE_OF_ONE_TENANT} of a tenant at most; send it again",
                code="webhooks_busy",
            )
        _outside[tenant] += 1
    try:
        yield platform.webhooks
    finally:
        with _changed:
            _outside.subtract([tenant])
            if not _outside[tenant]:
                del _outside[tenant]
            _changed.notify_all()
