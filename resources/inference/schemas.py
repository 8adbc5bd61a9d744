"""Request bodies of OpenAI's and vLLM's clients, and the answer format that they demand: a JSON schema to enforce, or a refusal.

What this server cannot do is refused: an answer that ignores a field could be mistaken for one that follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from control_plane.serving.request_limits import MAX_N
from resources.inference.engine.sampler import Sampling
from resources.inference.request_errors import RequestError
from resources.inference.request_fields import Kind, checked

MAX_TOP_LOGPROBS = 20
"""As in OpenAI's chat completions."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Decoding(BaseModel):
    """Fields about the answer that both kinds of request share. Null means absent, in every field."""

    model_config = ConfigDict(extra="allow")
    KIND: ClassVar[Kind]
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    """The bounds are those of PyTorch's generators."""
    stop: Any = None
    """A text or a list of texts: :func:`check_limits` has seen to that, faster than pydantic reports each alternative."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_N)
    response_format: Mapping[str, Any] | None = None
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[int, float] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        return checked(given, cls.KIND) if isinstance(given, dict) else given

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def sampling(self, *, vocabulary: int, top_logprobs: int | None) -> Sampling:
        """Return how tokens are picked; ``RequestError`` for a bias on a token that is not in the vocabulary."""
        unknown = next((token for token in self.logit_bias if not 0 <= token < vocabulary), None)
        if unknown is not None:
            raise RequestError(
                f"logit_bias names token {unknown}, and the vocabulary of {self.model} ends at {vocabulary - 1}; remove it.",
                code="invalid_logit_bias",
                param="logit_bias",
            )
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, seed=self.seed, frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty, logit_bias=self.logit_bias, top_logprobs=top_logprobs,
        )  # fmt: skip


class ChatRequest(Decoding):
    KIND: ClassVar[Kind] = "chat"
    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens to report beside each token; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError('top_logprobs needs "logprobs": true.', code="invalid_request", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Decoding):
    KIND: ClassVar[Kind] = "completion"
    prompt: Any
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: a text, or tokens."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @model_validator(mode="after")
    def _repeats_or_answers(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 leaves nothing to answer with; send at least 1, or echo the prompt.", param="max_tokens")
        return self


class LoadRequest(BaseModel):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    lora_name: str = ""


Schema = Mapping[str, Any]
SUPPORTED = '{"type": "text"}, {"type": "json_object"} and {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'


def schema_of(body: ChatRequest | CompletionRequest) -> Schema | None:
    """Return the schema that the answer must follow; None if any text is allowed. Raises ``RequestError`` if it cannot be enforced."""
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
