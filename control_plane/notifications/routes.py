"""``/v1/webhook_endpoints`` and ``/v1/webhook_event_types``, as in OpenAI's API, and the deliveries."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request

from control_plane.http import parameters
from control_plane.http import schemas as http_schemas
from control_plane.http.authentication import Admin, PlatformDep, Reader
from control_plane.http.turns import run_waiting
from control_plane.notifications import deliveries, schemas, signatures, webhook_endpoints
from control_plane.notifications.tables import Delivery, Endpoint
from core.event_types import EVENT_TYPES
from core.storable_text import check_storable

router = APIRouter(prefix="/v1", tags=["webhooks"])


@router.get("/webhook_event_types", summary="List webhook event types")
def list_event_types(_: Reader) -> http_schemas.ListOf[str]:
    """List the types of events that webhook endpoints can receive. docs/webhooks.md explains each."""
    return http_schemas.ListOf(data=list(EVENT_TYPES))


@router.post("/webhook_endpoints", summary="Create a webhook endpoint")
def create(platform: PlatformDep, tenant: Admin, body: schemas.CreateWebhookEndpoint) -> schemas.WebhookEndpointWithSecret:
    """Create an endpoint that events are sent to. The secret that signs them is returned only here."""
    check_storable(body.name, "name")
    made = webhook_endpoints.create(platform, tenant, name=body.name, url=body.url, event_types=body.event_types)
    return _with_secret(made)


@router.get("/webhook_endpoints", summary="List webhook endpoints")
def list_endpoints(
    platform: PlatformDep, tenant: Reader, after: parameters.After = None, limit: parameters.Limit = 20
) -> http_schemas.ListOf[schemas.WebhookEndpoint]:
    """List your webhook endpoints without their secrets, newest first."""
    found = webhook_endpoints.list_endpoints(platform, tenant, after=after, limit=limit)
    return http_schemas.ListOf(data=[_endpoint(each) for each in found.items], has_more=found.has_more)


@router.get("/webhook_endpoints/{webhook_endpoint_id}", summary="Retrieve a webhook endpoint")
def retrieve(platform: PlatformDep, tenant: Reader, webhook_endpoint_id: parameters.WebhookEndpointId) -> schemas.WebhookEndpoint:
    """Return a webhook endpoint without its secret."""
    return _endpoint(webhook_endpoints.get(platform, tenant, webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}", summary="Update a webhook endpoint")
def update(
    platform: PlatformDep, tenant: Admin, webhook_endpoint_id: parameters.WebhookEndpointId, body: schemas.UpdateWebhookEndpoint
) -> schemas.WebhookEndpoint:
    """Change the name, URL or event types of an endpoint, or disable or enable it."""
    check_storable(body.name, "name")
    return _endpoint(webhook_endpoints.update(platform, tenant, webhook_endpoint_id, body.model_dump()))


@router.delete("/webhook_endpoints/{webhook_endpoint_id}", summary="Delete a webhook endpoint")
def delete(platform: PlatformDep, tenant: Admin, webhook_endpoint_id: parameters.WebhookEndpointId) -> schemas.DeletedWebhookEndpoint:
    """Delete an endpoint. No further events are sent to it."""
    webhook_endpoints.delete(platform, tenant, webhook_endpoint_id)
    return schemas.DeletedWebhookEndpoint(id=webhook_endpoint_id)


@router.post("/webhook_endpoints/{webhook_endpoint_id}/rotate_secret", summary="Rotate a signing secret")
def rotate_secret(
    platform: PlatformDep, tenant: Admin, webhook_endpoint_id: parameters.WebhookEndpointId, body: schemas.RotateSecret | None = None
) -> schemas.WebhookEndpointWithSecret:
    """Replace the signing secret of an endpoint. The old one expires immediately, or signs along with the new one for 24 hours."""
    keep_old = body is not None and body.keep_old_secret_active_for_24_hours
    return _with_secret(webhook_endpoints.rotate_secret(platform, tenant, webhook_endpoint_id, keep_old=keep_old))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test", summary="Send a test event")
async def send_test(
    request: Request,
    platform: PlatformDep,
    tenant: Admin,
    webhook_endpoint_id: parameters.WebhookEndpointId,
    body: schemas.SendTestEvent | None = None,
) -> schemas.WebhookTestResult:
    """Send a signed test event and return the receiver's response. If there is none, the request fails with status 400."""
    event_type = body.event_type if body else None
    send = partial(webhook_endpoints.send_test, platform, tenant, webhook_endpoint_id, event_type=event_type)
    tried = await run_waiting(request, send)
    return schemas.WebhookTestResult(
        webhook_endpoint_id=tried.endpoint_id, event_type=tried.event_type, status_code=tried.status, response=tried.text
    )


@router.get("/webhook_endpoints/{webhook_endpoint_id}/deliveries", summary="List deliveries")
def list_deliveries(
    platform: PlatformDep,
    tenant: Reader,
    webhook_endpoint_id: parameters.WebhookEndpointId,
    state: Annotated[Literal["pending", "delivered", "dead"] | None, Query(description="Return only deliveries in this state.")] = None,
    after: parameters.After = None,
    limit: parameters.Limit = 20,
) -> http_schemas.ListOf[schemas.WebhookDelivery]:
    """List the deliveries of the last 30 days to an endpoint, pending ones included, newest first."""
    found = deliveries.list_deliveries(platform, tenant, webhook_endpoint_id, state=state, after=after, limit=limit)
    return http_schemas.ListOf(data=[_delivery(each) for each in found.items], has_more=found.has_more)


@router.post("/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/replay", summary="Replay a delivery")
def replay(
    platform: PlatformDep,
    tenant: Admin,
    webhook_endpoint_id: parameters.WebhookEndpointId,
    delivery_id: Annotated[str, Path(description="Id of the delivery (`dlv_...`).")],
) -> schemas.WebhookDelivery:
    """Send one event again, with the same event id."""
    return _delivery(deliveries.replay(platform, tenant, webhook_endpoint_id, delivery_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}/replay", summary="Replay failed deliveries")
def replay_dead(
    platform: PlatformDep, tenant: Admin, webhook_endpoint_id: parameters.WebhookEndpointId, body: schemas.ReplayDeliveries
) -> schemas.Replayed:
    """Send all failed deliveries since a given time again, oldest first, up to 10,000."""
    since = datetime.fromtimestamp(body.since, UTC)
    count = deliveries.replay_dead(platform, tenant, webhook_endpoint_id, since=since)
    return schemas.Replayed(webhook_endpoint_id=webhook_endpoint_id, replayed=count)


def _endpoint(of: Endpoint) -> schemas.WebhookEndpoint:
    return schemas.WebhookEndpoint.of(of, signing_secret_hint=signatures.hint(of.secrets[0].secret) if of.secrets else "")


def _with_secret(made: webhook_endpoints.WithSecret) -> schemas.WebhookEndpointWithSecret:
    return schemas.WebhookEndpointWithSecret.of(_endpoint(made.endpoint), signing_secret=made.secret)


def _delivery(of: Delivery) -> schemas.WebhookDelivery:
    return schemas.WebhookDelivery.of(
        of,
        webhook_endpoint_id=of.target,
        last_status_code=of.last_status,
        last_error=of.last_error or None,
        next_attempt_at=of.next_attempt_at if of.state == "pending" else None,
    )
