"""The one body of every refusal."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str = Field(description="With the value, the limit and the next step.")
    type: str = Field(
        description="invalid_request_error, authentication_error, permission_error, insufficient_quota, rate_limit_error or server_error."
    )
    param: str | None = Field(description="The field that the refusal is about.")
    code: str | None = Field(description="Stable; docs/errors.md lists them all.")


class Error(BaseModel):
    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
