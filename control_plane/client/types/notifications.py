# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: notifications."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class CreateWebhookEndpoint(TypedDict):
    name: str
    url: str
    """https, at a public address; redirects are not followed."""
    event_types: list[str]
    """Of `GET /v1/webhook_event_types`, or `*` for all."""


class DeletedWebhookEndpoint(TypedDict):
    id: str
    object: NotRequired[Literal["webhook_endpoint.deleted"]]
    deleted: NotRequired[bool]


class ReplayDeliveries(TypedDict):
    since: int
    """Unix time: dead deliveries that came up since then are sent again."""


class Replayed(TypedDict):
    object: NotRequired[Literal["webhook_endpoint.replay"]]
    webhook_endpoint_id: str
    replayed: int


class RotateSecret(TypedDict):
    keep_old_secret_active_for_24_hours: NotRequired[bool]


class SendTestEvent(TypedDict):
    event_type: NotRequired[str | None]
    """The first of the endpoint's types if absent."""


class UpdateWebhookEndpoint(TypedDict):
    name: NotRequired[str | None]
    url: NotRequired[str | None]
    event_types: NotRequired[list[str] | None]
    state: NotRequired[Literal["enabled", "disabled"] | None]


class WebhookDelivery(TypedDict):
    id: str
    object: NotRequired[Literal["webhook_delivery"]]
    webhook_endpoint_id: str
    event_id: str
    """The header `webhook-id`, the same at every attempt."""
    event_type: str
    subject: str
    """Id of the object that the event is about."""
    state: Literal["pending", "delivered", "dead"]
    attempts: int
    last_status_code: int | None
    last_error: str | None
    created_at: int
    last_attempt_at: int | None
    next_attempt_at: int | None
    """Of a pending one."""
    delivered_at: int | None


class WebhookEndpoint(TypedDict):
    id: str
    object: NotRequired[Literal["webhook_endpoint"]]
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    state: Literal["enabled", "disabled"]
    disabled_reason: str | None
    failing_since: int | None
    """Since then nothing was answered with 2xx; after five days it is disabled."""
    created_at: int
    updated_at: int


class WebhookEndpointWithSecret(TypedDict):
    id: str
    object: NotRequired[Literal["webhook_endpoint"]]
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    state: Literal["enabled", "disabled"]
    disabled_reason: str | None
    failing_since: int | None
    """Since then nothing was answered with 2xx; after five days it is disabled."""
    created_at: int
    updated_at: int
    signing_secret: str
    """Shown now and never again."""


class WebhookTestResult(TypedDict):
    object: NotRequired[Literal["webhook_endpoint.test"]]
    webhook_endpoint_id: str
    event_type: str
    success: NotRequired[Literal[True]]
    status_code: int
    response: str
    """The beginning of what the receiver said."""
