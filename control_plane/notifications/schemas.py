"""Webhook endpoints and their deliveries, in OpenAI's format where it exists."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from control_plane.http.schemas import ApiModel, EpochSeconds
from core.public_addresses import MAX_URL_CHARS

Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_CHARS)]
EventTypes = Annotated[list[str], Field(min_length=1, max_length=100)]
State = Literal["enabled", "disabled"]


class CreateWebhookEndpoint(ApiModel):
    """A webhook endpoint to create."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    """Name of the endpoint, 1 to 100 characters."""
    url: Url
    """Where events are sent: an `https` URL at a public address. Redirects are not followed."""
    event_types: EventTypes
    """Types of events to send, from `GET /v1/webhook_event_types`, or `*` for all of them."""


class UpdateWebhookEndpoint(ApiModel):
    """Changes to a webhook endpoint. Fields that are absent or null stay as they are."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name | None = None
    """New name, 1 to 100 characters."""
    url: Url | None = None
    """New URL: `https`, at a public address."""
    event_types: EventTypes | None = None
    """New types of events to send, from `GET /v1/webhook_event_types`, or `*` for all of them."""
    state: State | None = None
    """`disabled` stops deliveries and drops pending ones; `enabled` starts again."""


class RotateSecret(ApiModel):
    """How to replace the signing secret."""

    model_config = ConfigDict(extra="forbid", strict=True)

    keep_old_secret_active_for_24_hours: bool = False
    """Whether the old secret signs along with the new one for 24 hours, so that receivers can be switched over. If false, it expires
    immediately."""


class SendTestEvent(ApiModel):
    """Which test event to send."""

    model_config = ConfigDict(extra="forbid", strict=True)

    event_type: str | None = Field(None, max_length=200)
    """Type of the event. Default: the first of the endpoint's types."""


class ReplayDeliveries(ApiModel):
    """Which deliveries to send again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    since: int = Field(ge=0, le=253_402_300_799)
    """Unix time in seconds: failed (`dead`) deliveries created since then are sent again."""


class WebhookEndpoint(ApiModel):
    """A URL that events are sent to."""

    id: str
    """Id of the endpoint, starting with `we_`."""
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    """Object type, always `webhook_endpoint`."""
    name: str
    """Name of the endpoint."""
    url: str
    """Where events are sent."""
    event_types: list[str]
    """Types of events that are sent; `*` means all."""
    signing_secret_hint: str
    """Last characters of the signing secret, to tell secrets apart; empty if the platform has lost the key that decrypts it."""
    state: State
    """`enabled` or `disabled`."""
    disabled_reason: str | None
    """Why it is disabled; null if it is enabled."""
    failing_since: EpochSeconds | None
    """Time since which no delivery has received a 2xx response, as Unix time in seconds; null if deliveries succeed. After five days the
    endpoint is disabled."""
    created_at: EpochSeconds
    """When it was created, as Unix time in seconds."""
    updated_at: EpochSeconds
    """When it was last changed, as Unix time in seconds."""


class WebhookEndpointWithSecret(WebhookEndpoint):
    """A webhook endpoint with its signing secret, which is returned only when the secret is created."""

    signing_secret: str
    """Secret that signs the events, starting with `whsec_`. It cannot be retrieved again."""


class DeletedWebhookEndpoint(ApiModel):
    """Confirmation that a webhook endpoint was deleted."""

    id: str
    """Id of the deleted endpoint."""
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    """Object type, always `webhook_endpoint.deleted`."""
    deleted: bool = True
    """Always `true`, since a request that cannot delete the endpoint is refused."""


class WebhookTestResult(ApiModel):
    """The receiver's response to a test event."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    """Object type, always `webhook_endpoint.test`."""
    webhook_endpoint_id: str
    """Id of the endpoint that was tested."""
    event_type: str
    """Type of the event that was sent."""
    success: Literal[True] = True
    """Always `true`: the receiver responded. `status_code` shows whether it accepted the event."""
    status_code: int
    """HTTP status code of the response."""
    response: str
    """Beginning of the response body."""


class WebhookDelivery(ApiModel):
    """The delivery of one event to one endpoint."""

    id: str
    """Id of the delivery."""
    object: Literal["webhook_delivery"] = "webhook_delivery"
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
    """`pending` (waiting for its first attempt or a retry), `delivered` (2xx response received) or `dead` (given up)."""
    attempts: int
    """Attempts made so far."""
    last_status_code: int | None
    """HTTP status code of the last response; null if there was none."""
    last_error: str | None
    """What went wrong at the last attempt; null if nothing did."""
    created_at: EpochSeconds
    """When the delivery was created, as Unix time in seconds."""
    last_attempt_at: EpochSeconds | None
    """When it was last attempted, as Unix time in seconds; null if it never was."""
    next_attempt_at: EpochSeconds | None
    """When it is attempted next, as Unix time in seconds; null unless `state` is `pending`."""
    delivered_at: EpochSeconds | None
    """When it was delivered, as Unix time in seconds; null if it was not."""


class Replayed(ApiModel):
    """Number of deliveries sent again."""

    object: Literal["webhook_endpoint.replay"] = "webhook_endpoint.replay"
    """Object type, always `webhook_endpoint.replay`."""
    webhook_endpoint_id: str
    """Id of the endpoint the deliveries go to."""
    replayed: int
    """Number of deliveries that are sent again."""
