"""Alerts, dashboard and documentation speak of metrics, labels and fields that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from control_plane.api.metrics import exposition
from control_plane.api.metrics.gauges import RecentGauges
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.platform.context import Platform
from ft_assets.telemetry import logs

ROOT = Path(__file__).resolve().parents[2]
ALERTS, DASHBOARD = ROOT / "deploy/observability/alerts.yaml", ROOT / "deploy/observability/dashboard.json"
DOCUMENT = ROOT / "docs/observability.md"
SCRAPED = frozenset({"job", "instance", "le"})
"""Labels that Prometheus adds itself."""
WORDS = {"sum", "max", "min", "avg", "by", "on", "and", "or", "rate", "delta", "increase", "abs", "topk", "vector", "offset", "without"} | {
    "histogram_quantile", "clamp_min", "ignoring", "unless", "absent"
}  # fmt: skip


@pytest.fixture
def emitted(fresh_platform: Platform) -> dict[str, frozenset[str]]:
    """Every series that a scrape can hold, with its labels: read from what the API really exposes."""
    meter = RequestMeter()
    meter.began()
    meter.ended(method="GET", route="/x", status=401, seconds=0.1, code="rate_limit_exceeded")
    return dict(series(exposition.registry(RecentGauges(platform=fresh_platform), meter)))


def series(registry: CollectorRegistry) -> Iterator[tuple[str, frozenset[str]]]:
    for family in registry.collect():
        labels = frozenset(getattr(family, "_labelnames", ()) or {k for s in family.samples for k in s.labels if k != "le"})
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        yield from ((family.name + end, labels) for end in ends)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> list[str]:
    return [r["expr"] for r in rules()] + [t["expr"] for p in panels() for t in p.get("targets", ())]


def names_in(expression: str) -> set[str]:
    """Names of metrics: identifiers that are no function, no keyword and no label."""
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", "", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression))
    return {n for n in re.findall(r"[a-z_][a-z0-9_]*", bare) if n not in WORDS and not re.fullmatch(r"[smhd]", n)}


def labels_in(expression: str) -> set[str]:
    matched = {m for inside in re.findall(r"\{([^}]*)\}", expression) for m in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)}
    grouped = {g.strip() for inside in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for g in inside.split(",")}
    return matched | grouped


def test_rules_and_dashboard_ask_for_metrics_that_are_emitted(emitted: dict[str, frozenset[str]]) -> None:
    asked = {name for expression in expressions() for name in names_in(expression)}
    assert len(asked) > 25, "the expressions were read"
    assert asked - set(emitted) == {"up"}, "Prometheus makes that one itself"


def test_rules_and_dashboard_use_labels_that_their_metrics_have(emitted: dict[str, frozenset[str]]) -> None:
    for expression in expressions():
        known = SCRAPED | {label for name in names_in(expression) for label in emitted.get(name, ())}
        assert labels_in(expression) <= known, expression


def test_no_label_can_take_any_value_but_those_of_live_jobs(emitted: dict[str, frozenset[str]]) -> None:
    bounded = {"method", "route", "status", "code", "state", "tier", "pool", "quantile", "level", "audience", "channel", "reason", "kind"}
    free = {name: labels - bounded for name, labels in emitted.items() if labels - bounded}
    assert set(free) == {name for name in emitted if name.startswith("ft_job_")}
    assert set(free.values()) == {frozenset({"job", "tenant", "model"})}


def test_every_alert_says_how_bad_and_what_and_has_its_page(emitted: dict[str, frozenset[str]]) -> None:
    documented = DOCUMENT.read_text()
    names = [r["alert"] for r in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket", "info")
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in documented, f"docs/observability.md does not say what to do about {rule['alert']}"
    assert set(re.findall(r"`(Ft[A-Za-z]+)`", documented)) == set(names)


def test_a_queue_that_nobody_ever_looked_at_is_an_alert(fresh_platform: Platform) -> None:
    """Until the first round its age has no sample, and no comparison is true of no sample."""
    age = "ft_scheduler_last_round_age_seconds"
    (family,) = [f for f in exposition.registry(RecentGauges(platform=fresh_platform), RequestMeter()).collect() if f.name == age]
    assert family.samples == []
    (rule,) = [r for r in rules() if r["alert"] == "FtSchedulerStands"]
    assert f"absent({age})" in rule["expr"] and "up{" in rule["expr"], "but where the API is down, that is the alert"
    assert "$value" not in rule["annotations"]["summary"], "it is no duration where there is none"


def test_panels_lie_beside_each_other_and_have_what_they_show() -> None:
    shown = panels()
    assert len({p["id"] for p in shown}) == len(shown)
    cells: set[tuple[int, int]] = set()
    for panel in shown:
        assert panel["type"] == "row" or panel["targets"]
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not covered & cells
        cells |= covered


def test_the_table_of_metrics_is_what_is_emitted(emitted: dict[str, frozenset[str]]) -> None:
    rows = re.findall(r"^\| `(ft_\w+)` \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    documented = {name: frozenset(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows}
    of_families = {re.sub(r"_(bucket|sum|count)$", "", n) if "duration" in n else n: v for n, v in emitted.items() if n.startswith("ft_")}
    assert documented == of_families


def test_the_fields_of_a_line_are_documented() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text().split("## Metrics")[0], re.MULTILINE))
    assert set(logs.FIELDS) <= documented
