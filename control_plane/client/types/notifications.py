# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: notifications."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class CreateWebhookEndpoint(TypedDict):
    """A webhook endpoint to create."""

    name: str
    """Name of the endpoint, 1 to 100 characters."""
    url: str
    """Where events are sent: an `https` URL at a public address. Redirects are not followed."""
    event_types: list[str]
    """Types of events to send, from `GET /v1/webhook_event_types`, or `*` for all of them."""


class DeletedWebhookEndpoint(TypedDict):
    """Confirmation that a webhook endpoint was deleted."""

    id: str
    """Id of the deleted endpoint."""
    object: NotRequired[Literal["webhook_endpoint.deleted"]]
    """Object type, always `webhook_endpoint.deleted`."""
    deleted: NotRequired[bool]
    """Always `true`, since a request that cannot delete the endpoint is refused."""


class ReplayDeliveries(TypedDict):
    """Which deliveries to send again."""

    since: int
    """Unix time in seconds: failed (`dead`) deliveries created since then are sent again."""


class Replayed(TypedDict):
    """Number of deliveries sent again."""

    object: NotRequired[Literal["webhook_endpoint.replay"]]
    """Object type, always `webhook_endpoint.replay`."""
    webhook_endpoint_id: str
    """Id of the endpoint the deliveries go to."""
    replayed: int
    """Number of deliveries that are sent again."""


class RotateSecret(TypedDict):
    """How to replace the signing secret."""

    keep_old_secret_active_for_24_hours: NotRequired[bool]
    """Whether the old secret signs along with the new one for 24 hours, so that receivers can be switched over. If false, it
    expires immediately."""


class SendTestEvent(TypedDict):
    """Which test event to send."""

    event_type: NotRequired[str | None]
    """Type of the event. Default: the first of the endpoint's types."""


class UpdateWebhookEndpoint(TypedDict):
    """Changes to a webhook endpoint. Fields that are absent or null stay as they are."""

    name: NotRequired[str | None]
    """New name, 1 to 100 characters."""
    url: NotRequired[str | None]
    """New URL: `https`, at a public address."""
    event_types: NotRequired[list[str] | None]
    """New types of events to send, from `GET /v1/webhook_event_types`, or `*` for all of them."""
    state: NotRequired[Literal["enabled", "disabled"] | None]
    """`disabled` stops deliveries and drops pending ones; `enabled` starts again."""


class WebhookDelivery(TypedDict):
    """The delivery of one event to one endpoint."""

    id: str
    """Id of the delivery."""
    object: NotRequired[Literal["webhook_delivery"]]
    """Object type, always `webhook_delivery`."""
    webhook_endpoint_id: str
    """Id of the endpoint it is sent to."""
    event_id: str
    """Id of the event, sent as header `webhook-id` and the same at every attempt."""
    event_type: str
    """Type of the event, such as `fine_tuning.job.succeeded`."""
    subject: str
    """Id of the object the event is about."""
    state: Literal["pending", "delivered", "dead"]
    """`pending` (to be sent, or sent again), `delivered` (2xx response received) or `dead` (given up)."""
    attempts: int
    """Attempts made so far."""
    last_status_code: int | None
    """HTTP status code of the last response; null if there was none."""
    last_error: str | None
    """What went wrong at the last attempt; null if nothing did."""
    created_at: int
    """When the delivery was created, as Unix time in seconds."""
    last_attempt_at: int | None
    """When it was last attempted, as Unix time in seconds; null if it never was."""
    next_attempt_at: int | None
    """When it is attempted next, as Unix time in seconds; null unless `state` is `pending`."""
    delivered_at: int | None
    """When it was delivered, as Unix time in seconds; null if it was not."""


class WebhookEndpoint(TypedDict):
    """A URL that events are sent to."""

    id: str
    """Id of the endpoint, starting with `we_`."""
    object: NotRequired[Literal["webhook_endpoint"]]
    """Object type, always `webhook_endpoint`."""
    name: str
    """Name of the endpoint."""
    url: str
    """Where events are sent."""
    event_types: list[str]
    """Types of events that are sent; `*` stands for all."""
    signing_secret_hint: str
    """Last characters of the signing secret, to tell secrets apart; empty if the platform has lost the key that decrypts it."""
    state: Literal["enabled", "disabled"]
    """`enabled` or `disabled`."""
    disabled_reason: str | None
    """Why it is disabled; null if it is enabled."""
    failing_since: int | None
    """Time since which no delivery has received a 2xx response, as Unix time in seconds; null if deliveries succeed. After five
    days the endpoint is disabled."""
    created_at: int
    """When it was created, as Unix time in seconds."""
    updated_at: int
    """When it was last changed, as Unix time in seconds."""


class WebhookEndpointWithSecret(TypedDict):
    """A webhook endpoint with its signing secret, which is returned only when the secret is created."""

    id: str
    """Id of the endpoint, starting with `we_`."""
    object: NotRequired[Literal["webhook_endpoint"]]
    """Object type, always `webhook_endpoint`."""
    name: str
    """Name of the endpoint."""
    url: str
    """Where events are sent."""
    event_types: list[str]
    """Types of events that are sent; `*` stands for all."""
    signing_secret_hint: str
    """Last characters of the signing secret, to tell secrets apart; empty if the platform has lost the key that decrypts it."""
    state: Literal["enabled", "disabled"]
    """`enabled` or `disabled`."""
    disabled_reason: str | None
    """Why it is disabled; null if it is enabled."""
    failing_since: int | None
    """Time since which no delivery has received a 2xx response, as Unix time in seconds; null if deliveries succeed. After five
    days the endpoint is disabled."""
    created_at: int
    """When it was created, as Unix time in seconds."""
    updated_at: int
    """When it was last changed, as Unix time in seconds."""
    signing_secret: str
    """Secret that signs the events, starting with `whsec_`. It cannot be retrieved again."""


class WebhookTestResult(TypedDict):
    """The receiver's response to a test event."""

    object: NotRequired[Literal["webhook_endpoint.test"]]
    """Object type, always `webhook_endpoint.test`."""
    webhook_endpoint_id: str
    """Id of the endpoint that was tested."""
    event_type: str
    """Type of the event that was sent."""
    success: NotRequired[Literal[True]]
    """Always `true`: the receiver responded. `status_code` shows whether it accepted the event."""
    status_code: int
    """HTTP status code of the response."""
    response: str
    """Beginning of the response body."""
