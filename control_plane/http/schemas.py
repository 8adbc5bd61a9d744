"""Schemas shared by all nouns: the base class, times, lists and deletions.

A route declares `response_model` and returns records: the response's fields are read from attributes of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from core.epoch_time import epoch_seconds

T = TypeVar("T")
EpochSeconds = Annotated[int, BeforeValidator(lambda time: epoch_seconds(time) if isinstance(time, datetime) else time and int(time))]
"""Unix time in whole seconds, also read from a ``datetime`` or a ``float``."""


JsonObject = Mapping[str, object]
"""A JSON object with keys of its own (hyperparameters, scores, a report), passed on unchanged."""


class ApiModel(BaseModel):
    """An object of the API. The docstring under a field is its description in the OpenAPI document."""

    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)

    @classmethod
    def of(cls, *records: object, **more: Any) -> Self:
        """Build the object from the equally named attributes of `records`; `more` adds to them and replaces them."""
        wanted = [name for name in cls.model_fields if name not in more]
        same = {name: getattr(record, name) for record in records for name in wanted if hasattr(record, name)}
        return cls.model_validate(same | more)


class ApiBody(ApiModel):
    """The body of a request: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _described(schema: dict[str, Any]) -> None:
    """Adds the shared description of lists, because a list of a specific type has no docstring."""
    schema.setdefault("description", "One page of a list.")


class Deleted(ApiModel):
    """Confirmation that an object was deleted."""

    id: str
    """Id or name of the deleted object."""
    object: str
    """Type of the deleted object."""
    deleted: bool = True
    """Always `true`, since a request that cannot delete the object is refused."""


class ListOf(ApiModel, Generic[T]):
    """One page of a list, also built from a :class:`~control_plane.platform.pagination.Page`."""

    model_config = ConfigDict(json_schema_extra=_described)

    object: Literal["list"] = "list"
    """Object type, always `list`."""
    data: Sequence[T] = Field(validation_alias=AliasChoices("data", "items"))
    """Items of this page, in the order documented for the operation."""
    has_more: bool = False
    """Whether items follow this page. If so, pass the id of the last item as `after` to fetch the next one."""


ObjectList = ListOf[dict[str, Any]]
"""A list of JSON objects. Its name in the OpenAPI document contains the type's spelling."""
