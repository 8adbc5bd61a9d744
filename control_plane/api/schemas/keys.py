"""API keys."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CreateKey(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=100)
    scopes: list[str] = Field(default=["read", "write"], description="read, write, admin; each includes the ones before it.")
    expires_in: int | None = Field(None, description="Seconds; never if absent.")


class ApiKey(BaseModel):
    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    hint: str
    scopes: list[str]
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class NewApiKey(ApiKey):
    secret: str = Field(description="Shown now and never again.")
