"""Request bodies of OpenAI's and vLLM's clients, and the answer format that they demand: a JSON schema to enforce, or a refusal.

Formats that this server cannot enforce are refused: an answer that ignores the format could be mistaken for one that follows it. Other
unlisted fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from resources.inference.answers import RequestError


class StreamOptions(BaseModel):
    include_usage: bool = False


class Decoding(BaseModel):
    """Fields about the answer that both kinds of request share."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    """The bounds are those of PyTorch's generators."""
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = 1
    response_format: Mapping[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class ChatRequest(Decoding):
    messages: list[Mapping[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None


class CompletionRequest(Decoding):
    prompt: str


class LoadRequest(BaseModel):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    lora_name: str = ""


Schema = Mapping[str, Any]
SUPPORTED = '{"type": "text"}, {"type": "json_object"} and {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
OF_VLLM = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's own fields that constrain an answer."""


def schema_of(body: ChatRequest | CompletionRequest) -> Schema | None:
    """Return the schema that the answer must follow; None if any text is allowed. Raises ``RequestError`` if it cannot be enforced."""
    for field in OF_VLLM:
        if (body.model_extra or {}).get(field) is not None:
            raise RequestError(f"{field} is not enforced by this server; use response_format.", code="unsupported_parameter", param=field)
    requested = body.response_format
    kind = "text" if requested is None else requested.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and requested is not None:
        return _named_schema(requested.get("json_schema"))
    raise invalid(f"type {_shown(kind)} is not supported; send one of {SUPPORTED}")


def invalid(what: str) -> RequestError:
    return RequestError(f"response_format: {what}", code="invalid_response_format", param="response_format")


def _named_schema(given: Any) -> Schema:
    if not isinstance(given, dict):
        raise invalid(f"json_schema must be an object with name and schema, not {_shown(given)}")
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise invalid(f"json_schema.name must be a string, not {_shown(given.get('name'))}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise invalid(f"json_schema.schema must be a JSON schema, an object, not {_shown(schema)}")
    return schema


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
