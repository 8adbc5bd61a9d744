from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry

from control_plane.api.metrics import exposition
from control_plane.api.metrics.gauges import RecentGauges
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.platform.context import Platform


@pytest.fixture
def emitted(fresh_platform: Platform) -> Mapping[str, frozenset[str]]:
    """Every series that a scrape can hold, with its labels: read from what the API really exposes."""
    meter = RequestMeter()
    meter.began()
    meter.ended(method="GET", route="/x", status=401, seconds=0.1, code="rate_limit_exceeded")
    return dict(_series(exposition.registry(RecentGauges(platform=fresh_platform), meter)))


def _series(registry: CollectorRegistry) -> Iterator[tuple[str, frozenset[str]]]:
    for family in registry.collect():
        labels = frozenset(getattr(family, "_labelnames", ()) or {k for s in family.samples for k in s.labels if k != "le"})
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        yield from ((family.name + end, labels) for end in ends)
