# Written by `python -m tools.client` from asynchronous/resources/webhook_endpoints.py: change that, and run it again.
"""``client.webhook_endpoints``: where events are sent, and what became of them. ``webhooks.verify`` is for the receiver."""

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
    """URLs that events are sent to, signed."""

    def create(self, **body: Unpack[CreateWebhookEndpoint]) -> WebhookEndpointWithSecret:
        """Have events sent to a URL; the secret that signs them is in this answer and nowhere else."""
        return self._api.call(WebhookEndpointWithSecret, "POST", at("/v1/webhook_endpoints"), json=body)

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[WebhookEndpoint]:
        """Endpoints, newest first; never their secrets."""
        return self._api.pages(WebhookEndpoint, at("/v1/webhook_endpoints"), given(limit=limit, after=after))

    def retrieve(self, webhook_endpoint_id: str) -> WebhookEndpoint:
        """One endpoint."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpoint, "GET", path)

    def update(self, webhook_endpoint_id: str, **body: Unpack[UpdateWebhookEndpoint]) -> WebhookEndpoint:
        """Change name, URL or types, or disable and enable it."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpoint, "POST", path, json=body, repeatable=True)

    def delete(self, webhook_endpoint_id: str) -> DeletedWebhookEndpoint:
        """Send nothing more to an endpoint, and forget it."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(DeletedWebhookEndpoint, "DELETE", path)

    def rotate_secret(self, webhook_endpoint_id: str, **body: Unpack[RotateSecret]) -> WebhookEndpointWithSecret:
        """Have another secret sign; the old one ends now, or signs beside the new one for 24 hours."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookEndpointWithSecret, "POST", path, json=body)

    def test(self, webhook_endpoint_id: str, **body: Unpack[SendTestEvent]) -> WebhookTestResult:
        """Send a signed test event now and tell what the receiver answered."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/test", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(WebhookTestResult, "POST", path, json=body)

    def event_types(self) -> ListOf[str]:
        """The types of events that endpoints can ask for."""
        return self._api.call(ListOf[str], "GET", at("/v1/webhook_event_types"))

    def deliveries(
        self,
        webhook_endpoint_id: str,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[WebhookDelivery]:
        """What was sent to an endpoint, or is to be, newest first."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.pages(WebhookDelivery, path, given(state=state, limit=limit, after=after))

    def replay(self, webhook_endpoint_id: str, delivery_id: str) -> WebhookDelivery:
        """Send one event again, under the id that it always had."""
        path = at(
            "/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/replay",
            webhook_endpoint_id=webhook_endpoint_id,
            delivery_id=delivery_id,
        )
        return self._api.call(WebhookDelivery, "POST", path)

    def replay_all(self, webhook_endpoint_id: str, **body: Unpack[ReplayDeliveries]) -> Replayed:
        """Send again all that was given up since a time."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/replay", webhook_endpoint_id=webhook_endpoint_id)
        return self._api.call(Replayed, "POST", path, json=body)
