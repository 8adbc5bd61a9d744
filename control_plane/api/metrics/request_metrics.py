"""Request metrics of one API process. Labels are bounded: routes are templates, methods and codes are known words.

The values belong to this process only. Scrape each process separately, like each replica; behind a port shared by several processes, a
scrape reaches a random one.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Histogram buckets: most calls take 5 to 100 ms; an upload waits for its validation for up to 45 s."""
RATE_LIMITED = "rate_limit_exceeded"


class RequestMeter:
    """Counters and a histogram in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        of: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("ft_api_requests", "Requests by route and class of status", ("method", "route", "status"), **of)
        self._seconds = Histogram(
            "ft_api_request_duration_seconds", "Time to the first byte of the response", ("method", "route"), buckets=SECONDS, **of
        )
        self._in_flight = Gauge("ft_api_requests_in_flight", "Requests in flight, including streams", **of)
        self._errors = Counter("ft_api_errors", "Error responses by code", ("code",), **of)
        self._unauthenticated = Counter("ft_api_authentication_failures", "Requests without a valid key", ("code",), **of)
        self._limited = Counter("ft_api_rate_limited", "Requests refused by a rate limit", **of)
        ProcessCollector(registry=self.registry)

    def began(self) -> None:
        self._in_flight.inc()

    def ended(self, *, method: str, route: str, status: int, seconds: float, code: str | None) -> None:
        """Count a response: `seconds` to its first byte; `code` of the error, if it was one."""
        self._in_flight.dec()
        known = method if method in METHODS else "other"
        self._requests.labels(known, route, f"{status // 100}xx").inc()
        self._seconds.labels(known, route).observe(seconds)
        if code is not None:
            self._errors.labels(code).inc()
        if status == 401:
            self._unauthenticated.labels(code or "unknown").inc()
        if code == RATE_LIMITED:
            self._limited.inc()
