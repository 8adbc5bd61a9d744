"""Webhook endpoints and what became of what was sent to them; OpenAI's objects where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from control_plane.platform.webhook_targets import MAX_URL_CHARS

Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_CHARS)]
EventTypes = Annotated[list[str], Field(min_length=1, max_length=100, description="Of `GET /v1/webhook_event_types`, or `*` for all.")]
State = Literal["enabled", "disabled"]


class CreateWebhookEndpoint(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    url: Url = Field(description="https, at a public address; redirects are not followed.")
    event_types: EventTypes


class UpdateWebhookEndpoint(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name | None = None
    url: Url | None = None
    event_types: EventTypes | None = None
    state: State | None = None


class RotateSecret(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keep_old_secret_active_for_24_hours: bool = False


class SendTestEvent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    event_type: str | None = Field(None, max_length=200, description="The first of the endpoint's types if absent.")


class ReplayDeliveries(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    since: int = Field(ge=0, le=253_402_300_799, description="Unix time: dead deliveries that came up since then are sent again.")


class WebhookEndpoint(BaseModel):
    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    state: State
    disabled_reason: str | None
    failing_since: int | None = Field(description="Since then nothing was answered with 2xx; after five days it is disabled.")
    created_at: int
    updated_at: int


class WebhookEndpointWithSecret(WebhookEndpoint):
    signing_secret: str = Field(description="Shown now and never again.")


class DeletedWebhookEndpoint(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: bool = True


class WebhookTestResult(BaseModel):
    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    success: Literal[True] = True
    """An answer came; `status_code` says whether it was a good one."""
    status_code: int
    response: str = Field(description="The beginning of what the receiver said.")


class WebhookDelivery(BaseModel):
    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    webhook_endpoint_id: str
    event_id: str = Field(description="The header `webhook-id`, the same at every attempt.")
    event_type: str
    subject: str = Field(description="Id of the object that the event is about.")
    state: Literal["pending", "delivered", "dead"]
    attempts: int
    last_status_code: int | None
    last_error: str | None
    created_at: int
    last_attempt_at: int | None
    next_attempt_at: int | None = Field(description="Of a pending one.")
    delivered_at: int | None


class Replayed(BaseModel):
    object: Literal["webhook_endpoint.replay"] = "webhook_endpoint.replay"
    webhook_endpoint_id: str
    replayed: int
