"""docs/observability.md names the metrics, labels and fields that there are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from core.telemetry import logs
from tests.deploy.observability.expressions import OF_OTHERS, ROOT

PAGE = ROOT / "docs/observability.md"
Emitted = Mapping[str, frozenset[str]]


def test_no_label_can_take_any_value_but_those_of_tenants_and_live_jobs(emitted: Emitted) -> None:
    bounded = {
        "method",
        "route",
        "status",
        "code",
        "state",
        "tier",
        "pool",
        "quantile",
        "level",
        "audience",
        "channel",
        "reason",
        "kind",
        "outcome",
    }
    free = {name: labels - bounded for name, labels in emitted.items() if labels - bounded}
    assert set(free) == {name for name in emitted if name.startswith(("ft_job_", "ft_tenant_"))}
    assert {labels for name, labels in free.items() if name.startswith("ft_job_")} == {frozenset({"job", "tenant", "model"})}
    assert {labels for name, labels in free.items() if name.startswith("ft_tenant_")} == {frozenset({"tenant"})}


def test_the_table_of_metrics_is_what_is_emitted(emitted: Emitted) -> None:
    rows = re.findall(r"^\| `(ft_\w+)` \| (\w+) \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    documented = {name: frozenset(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows}
    of_families = {re.sub(r"_(bucket|sum|count)$", "", n) if "duration" in n else n: v for n, v in emitted.items() if n.startswith("ft_")}
    assert documented == of_families


def test_metrics_of_others_that_the_page_names_are_in_use() -> None:
    assert set(re.findall(r"`((?:DCGM|kueue|kube)_\w+)`", PAGE.read_text())) <= set(OF_OTHERS)


def test_the_fields_of_a_line_are_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text().split("## Metrics")[0], re.MULTILINE))
    assert set(logs.FIELDS) <= documented
