# Written by `python -m tools.client` from asynchronous/resources/webhook_endpoints.py: change that, and run it again.
"""``client.webhook_endpoints``: webhook endpoints and their deliveries. Receivers use ``webhooks.verify``."""

from __future__ import annotations

from typing import Literal, Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.types import (
    CreateWebhookEndpoint,
    DeletedWebhookEndpoint,
    ListOf,
    ReplayDeliveries,
    Replayed,
    RotateSecret,
    SendTestEvent,
    UpdateWebhookEndpoint,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointWithSecret,
    WebhookTestResult,
)
from control_plane.client.wire import at, given


class WebhookEndpoints(Resource):
    """URLs that signed events are sent to."""

    def create(self, **body: Unpack[CreateWebhookEndpoint]) -> WebhookEndpointWithSecret:
        """Creates an endpoint; only this response contains its signing secret."""
        return self._api.call(WebhookEndpointWithSecret, "POST", at("/v1/webhook_endpoints"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[WebhookEndpoint]:
        """Lists endpoints, newest first, without their secrets."""
        return self._api.pages(WebhookEndpoint, at("/v1/webhook_endpoints"), given(limit=limit, after=after))

    def retrieve(self, webhook_endpoint_id: str) -> WebhookEndpoint:
        """Returns an endpoint."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpoint, "GET", path)

    def update(self, webhook_endpoint_id: str, **body: Unpack[UpdateWebhookEndpoint]) -> WebhookEndpoint:
        """Changes an endpoint's name, URL or event types, or disables or enables it."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpoint, "POST", path, json=body, repeatable=True)

    def delete(self, webhook_endpoint_id: str) -> DeletedWebhookEndpoint:
        """Deletes an endpoint; no further events are sent to it."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(DeletedWebhookEndpoint, "DELETE", path)

    def rotate_secret(self, webhook_endpoint_id: str, **body: Unpack[RotateSecret]) -> WebhookEndpointWithSecret:
        """Creates a new signing secret; the old one expires immediately, or signs alongside the new one for 24 hours."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpointWithSecret, "POST", path, json=body)

    def test(self, webhook_endpoint_id: str, **body: Unpack[SendTestEvent]) -> WebhookTestResult:
        """Sends a signed test event and returns the receiver's response."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/test", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookTestResult, "POST", path, json=body)

    def event_types(self) -> ListOf[str]:
        """Lists the event types that endpoints can subscribe to."""
        return self._api.call(ListOf[str], "GET", at("/v1/webhook_event_types"))

    def deliveries(
        self,
        webhook_endpoint_id: str,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[WebhookDelivery]:
        """Lists past and pending deliveries to an endpoint, newest first."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.pages(WebhookDelivery, path, given(state=state, limit=limit, after=after))

    def replay(self, webhook_endpoint_id: str, delivery_id: str) -> WebhookDelivery:
        """Sends an event again with its original id."""
        path = at(
            "/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/replay",
            webhook_endpoint_id=webhook_endpoint_id,
            delivery_id=delivery_id,
        )
        return self._api.call(WebhookDelivery, "POST", path)

    def replay_all(self, webhook_endpoint_id: str, **body: Unpack[ReplayDeliveries]) -> Replayed:
        """Sends all failed deliveries since a given time again."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/replay", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(Replayed, "POST", path, json=body)
