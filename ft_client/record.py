"""What the API answers: its JSON objects, with their fields also as attributes, and lists of them as pandas frames."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


class Record(dict[str, Any]):
    """A JSON object: ``job["status"]`` and ``job.status`` are the same.

    It holds the fields that the server sent; docs/api.md and ``GET /openapi.json`` describe them. A field named like a method of ``dict``
    (``items``) is read with brackets.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{self.get('object', 'the object')} has no field {name!r}; it has {', '.join(self)}") from None

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self]

    def frame(self, field: str = "data") -> pandas.DataFrame:
        """Returns a list of objects as a pandas frame, one row each; fields of nested objects become columns (``scores.base``).

        `field` names the list, with dots for a nested one: ``evaluation.frame("report.scores")``.
        """
        rows: Any = self
        for name in field.split("."):
            rows = rows[name]
        return frame(rows)


def frame(rows: Iterable[Any]) -> pandas.DataFrame:
    """Returns objects as a pandas frame, one row each; fields of nested objects become columns."""
    import pandas

    return pandas.json_normalize([dict(row) for row in rows])


def parse(text: str | bytes) -> Any:
    """Returns decoded JSON, its objects as records. Raises ``ValueError`` if `text` is not JSON."""
    return json.loads(text, object_hook=Record)
