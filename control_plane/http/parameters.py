"""Parameters that lists share. The document states their bounds; the refusal of a value outside is the service's, with its own code."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

After = Annotated[str | None, Query(description="Id of the last item of the page before.")]


def limit(most: int) -> Any:
    """Items of a page: 1 to `most`."""
    return Query(description="Items of a page.", json_schema_extra={"minimum": 1, "maximum": most})
