"""Queries of a Prometheus server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from core.errors import Unavailable

TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The newest value of one series."""

    labels: Mapping[str, str]
    value: float


def query(url: str, expression: str) -> list[Sample]:
    """Return what `expression` gives now, without values that are no numbers; ``Unavailable`` if the server does not answer it."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        found = [Sample(labels=each["metric"], value=float(each["value"][1])) for each in answer.json()["data"]["result"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        status = f"status {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        said = str(error) if isinstance(error, httpx.TransportError) else status
        raise Unavailable(f"Prometheus does not answer a query: {said}; check FT_PROMETHEUS_URL", code="prometheus_unavailable") from error
    return [each for each in found if math.isfinite(each.value)]
