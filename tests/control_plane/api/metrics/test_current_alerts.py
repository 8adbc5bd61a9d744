"""Alerting rules without a Prometheus: which can be read, and when they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge

from control_plane.api.metrics.current_alerts import RULES, CurrentAlerts, Vector, holds

NEED_PROMETHEUS = {
    "FtApiDown", "FtApiErrors", "FtApiSlow", "FtApiAuthenticationFailures", "FtApiRateLimited", "FtApiFileDescriptors", "FtDeliveriesDead",
    "FtSlaMissed", "FtReservationsSlip", "FtWorkLost", "FtJobsFailing",
}  # fmt: skip
"""Rules about rates, the past, or other processes."""
POOLS: Mapping[str, Vector] = {
    "ft_free": {(("pool", "a"),): 0.0, (("pool", "b"), ("zone", "x")): 2.0, (("pool", "b"), ("zone", "y")): 3.0},
    "ft_wait_seconds": {(("tier", "free"),): 4000.0, (("tier", "premium"),): 10.0},
    "ft_debt": {(): -5.0},
}


def test_the_shipped_rules_are_all_read_but_those_that_need_prometheus() -> None:
    assert set(CurrentAlerts(registry=CollectorRegistry()).read().unreadable) == NEED_PROMETHEUS
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} > NEED_PROMETHEUS


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("max(ft_wait_seconds) > 3600", {(): 4000.0}),
        ("max(ft_wait_seconds) > 2 * 3600", {}),
        ("min(ft_wait_seconds) < 60", {(): 10.0}),
        ('max(ft_wait_seconds{tier="premium"}) > 60', {}),
        ("max by (pool) (ft_free) > 0", {(("pool", "b"),): 3.0}),
        ("sum(max by (pool) (ft_free)) == 3", {(): 3.0}),
        ("max(abs(ft_debt)) > 0", {(): 5.0}),
        ("max(ft_wait_seconds) > 3600 and sum(max by (pool) (ft_free)) > 0", {(): 4000.0}),
        ("max(ft_wait_seconds) > 3600 and sum(ft_free) > 9", {}),
        ("max(ft_none) > 0", {}),
        ("max(ft_wait_seconds) > 9999\nor (absent(ft_free) and max(up) == 1)", {}),
        ("max(ft_wait_seconds) > 60 or (absent(ft_free) and max(up) == 1)", {(): 4000.0}),
        ("max(ft_wait_seconds) > 60 and rate(ft_free[5m]) > 0", None),
        ("max(ft_debt) - max(ft_debt offset 1h) > 10", None),
        ("up == 0", None),
    ],
)
def test_a_rule_holds_for_the_labels_whose_value_passes_the_limit(expression: str, expected: Vector | None) -> None:
    assert holds(expression, POOLS) == expected


def test_an_alert_has_its_severity_and_its_words_the_most_urgent_first(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Gauge("ft_ages_seconds", "d", ("pool",), registry=registry).labels("a").set(7200)
    Counter("ft_missed", "d", registry=registry).inc(3)
    rule = {"annotations": {"summary": "{{ $labels.pool }} waits for {{ $value | humanizeDuration }}", "runbook_url": "docs/a.md#a"}}
    rules = [
        {**rule, "alert": "Old", "expr": "max by (pool) (ft_ages_seconds) > 60", "for": "5m", "labels": {"severity": "ticket"}},
        {**rule, "alert": "Missed", "expr": "max(ft_missed_total) > 2", "labels": {"severity": "page"}},
    ]
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    first, second = CurrentAlerts(registry=registry, rules_file=file).read().holding
    assert (first.name, first.severity, first.pending) == ("Missed", "page", "")
    assert (second.name, second.summary, second.pending, second.runbook) == ("Old", "a waits for 2 h", "5m", "docs/a.md#a")


def test_without_the_rules_nothing_says_that_no_alert_holds(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CurrentAlerts(registry=CollectorRegistry(), rules_file=tmp_path / "none.yaml").read()
