"""``client.webhook_endpoints``: destinations of events, and their deliveries. Receivers use ``webhooks.verify``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Page, Pages
from ft_client.types import DeletedWebhookEndpoint, Replayed, WebhookDelivery, WebhookEndpoint, WebhookEndpointWithSecret, WebhookTestResult
from ft_client.wire import at, given


class WebhookEndpoints(Resource):
    """URLs that receive signed events."""

    def create(self, *, name: str, url: str, event_types: Sequence[str]) -> WebhookEndpointWithSecret:
        """Creates an endpoint; its signing secret is only in this response."""
        return self._api.call("POST", at("/v1/webhook_endpoints"), json={"name": name, "url": url, "event_types": event_types})

    def list(self, *, limit: int = 100, after: str | None = None) -> Pages[WebhookEndpoint]:
        """Lists endpoints, newest first, without their secrets."""
        return self._api.pages(at("/v1/webhook_endpoints"), given(limit=limit, after=after))

    def retrieve(self, webhook_endpoint_id: str) -> WebhookEndpoint:
        """Returns one endpoint."""
        return self._api.call("GET", at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id))

    def update(self, webhook_endpoint_id: str, **options: Any) -> WebhookEndpoint:
        """Changes name, URL or types, or disables and enables it.

        Options: `name`, `url`, `event_types`, `state`.
        """
        return self._api.call("POST", at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id), json=options, repeatable=True)

    def delete(self, webhook_endpoint_id: str) -> DeletedWebhookEndpoint:
        """Deletes an endpoint; it receives no further events."""
        return self._api.call("DELETE", at("/v1/webhook_endpoints/{webhook_endpoint_id}", webhook_endpoint_id))

    def rotate_secret(self, webhook_endpoint_id: str, **options: Any) -> WebhookEndpointWithSecret:
        """Replaces the signing secret; the old one ends now, or signs beside the new one for 24 hours.

        Options: `keep_old_secret_active_for_24_hours`.
        """
        return self._api.call("POST", at("/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret", webhook_endpoint_id), json=options)

    def test(self, webhook_endpoint_id: str, **options: Any) -> WebhookTestResult:
        """Sends a signed test event now and returns the receiver's response.

        Options: `event_type`.
        """
        return self._api.call("POST", at("/v1/webhook_endpoints/{webhook_endpoint_id}/test", webhook_endpoint_id), json=options)

    def event_types(self) -> Page[str]:
        """Lists the types of events that endpoints can subscribe to."""
        return self._api.call("GET", at("/v1/webhook_event_types"))

    def deliveries(
        self,
        webhook_endpoint_id: str,
        *,
        state: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Pages[WebhookDelivery]:
        """Lists sent and pending deliveries of an endpoint, newest first."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries", webhook_endpoint_id)
        return self._api.pages(path, given(state=state, limit=limit, after=after))

    def replay(self, webhook_endpoint_id: str, delivery_id: str) -> WebhookDelivery:
        """Sends one event again, under its original id."""
        path = at("/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries/{delivery_id}/replay", webhook_endpoint_id, delivery_id)
        return self._api.call("POST", path)

    def replay_all(self, webhook_endpoint_id: str, *, since: int) -> Replayed:
        """Sends again all events that were given up since a time."""
        return self._api.call("POST", at("/v1/webhook_endpoints/{webhook_endpoint_id}/replay", webhook_endpoint_id), json={"since": since})
