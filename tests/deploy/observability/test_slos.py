"""Burn-rate alerts fire when a budget is spent too fast, stay silent otherwise, and are those of slos.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.observability.expressions import ROOT, SLO_RULES, promtool, rules
from tests.deploy.observability.test_alerts import needs_promtool
from tools import slos

FILE = ROOT / "deploy/observability/slos.yaml"
API = ('ft_api_requests_total{status="5xx",instance="a"}', 'ft_api_requests_total{status="2xx",instance="a"}')
JOBS = ('ft_jobs_ended_total{tier="free",outcome="failed_by_platform"}', 'ft_jobs_ended_total{tier="free",outcome="succeeded"}')
PREMIUM, STANDARD = ((f'ft_sla_missed_total{{tier="{tier}"}}', f'ft_sla_starts_total{{tier="{tier}"}}') for tier in ("premium", "standard"))
FAST, SLOW, BOTH, NONE = {"Fast"}, {"Slow"}, {"Fast", "Slow"}, set[str]()
Case = tuple[str, tuple[str, str], str, str, str, set[str]]
CASES: dict[str, Case] = {
    # series; counts of bad and other (for tiers: all) events by step, of 5 minutes, or of 30 from 8 hours on; when; alerts that fire
    "2 % of requests fail for two hours": ("FtApiBudget", API, "0+6x24", "0+294x24", "2h", BOTH),
    "0.7 % fail for seven hours": ("FtApiBudget", API, "0+7x84", "0+993x84", "7h", BOTH),
    "0.2 % fail for days: above 1, below 3": ("FtApiBudget", API, "0+2x192", "0+998x192", "95h", SLOW),
    "0.05 % fail: half of what is allowed": ("FtApiBudget", API, "0+1x192", "0+1999x192", "95h", NONE),
    "all fail, of 10 requests an hour": ("FtApiBudget", API, "0x11 0+1x1", "0+1x12", "1h", NONE),
    "an hour of failures that has ended two hours ago": ("FtApiBudget", API, "0+6x12 72x24", "0+294x36", "3h", SLOW),
    "one in five premium jobs is late": ("FtPremiumStartBudget", PREMIUM, "0+1x96", "0+5x96", "8h", BOTH),
    "one in fifty premium jobs is late for days": ("FtPremiumStartBudget", PREMIUM, "0+1x192", "0+50x192", "95h", SLOW),
    "one in two hundred premium jobs is late": ("FtPremiumStartBudget", PREMIUM, "0+1x192", "0+200x192", "95h", NONE),
    "half of eight premium jobs are late": ("FtPremiumStartBudget", PREMIUM, "0x4 4x56", "0x4 8x56", "8h", NONE),
    "half of the standard jobs are late": ("FtStandardStartBudget", STANDARD, "0+1x96", "0+2x96", "8h", BOTH),
    "one in twelve standard jobs is late for days": ("FtStandardStartBudget", STANDARD, "0+1x192", "0+12x192", "95h", SLOW),
    "one in forty standard jobs is late": ("FtStandardStartBudget", STANDARD, "0+1x192", "0+40x192", "95h", NONE),
    "the platform fails one in ten jobs": ("FtJobBudget", JOBS, "0+1x96", "0+9x96", "8h", BOTH),
    "the platform fails one in fifty jobs for days": ("FtJobBudget", JOBS, "0+1x192", "0+49x192", "95h", SLOW),
    "the platform fails one in two hundred jobs": ("FtJobBudget", JOBS, "0+1x192", "0+199x192", "95h", NONE),
}  # fmt: skip


@needs_promtool
def test_the_rules_are_ones_that_prometheus_loads() -> None:
    assert f"{len(rules(SLO_RULES))} rules found" in promtool("check", "rules", SLO_RULES)


def test_the_rules_and_the_dashboard_are_those_of_the_objectives(tmp_path: Path) -> None:
    slos.write(tmp_path)
    for name in (slos.RULES, slos.DASHBOARD):
        assert (tmp_path / name).read_text() == (FILE.parent / name).read_text(), "run `make slos`"


@needs_promtool
@pytest.mark.parametrize("step", ["5m", pytest.param("30m", marks=pytest.mark.slow)])
def test_an_alert_fires_when_its_budget_is_spent_too_fast(tmp_path: Path, step: str) -> None:
    plain = yaml.safe_load(SLO_RULES.read_text())
    for group in plain["groups"]:
        group.pop("interval", None)
        group["rules"] = [rule for rule in group["rules"] if rule["labels"].get("window") != "30d"]  # no alert reads it
    for rule in plain["groups"][-1]["rules"]:
        rule["annotations"]["summary"] = "spent"  # thresholds are tested here, not the digits of a rate
    tests = [
        _test(name, case, plain["groups"][-1]["rules"], step)
        for name, case in CASES.items()
        if (case[4] in ("8h", "95h")) == (step == "30m")
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(plain))
    order = [group["name"] for group in plain["groups"]]  # or alerts may read what was recorded a step before
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": step, "group_eval_order": order, "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(suite))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yaml")


def _test(name: str, case: Case, alerts: list[dict[str, Any]], step: str) -> dict[str, Any]:
    alert, series, bad, others, at, firing = case
    slo = next(slo.name for slo in slos.read(FILE)[1] if slo.alert == alert)
    expected = {
        rule["alert"]: [{"exp_labels": {**rule["labels"], "slo": slo}, "exp_annotations": rule["annotations"]}]
        for rule in alerts
        if rule["alert"].removeprefix(alert) in firing
    }
    shown = [{"alertname": f"{alert}{speed}", "eval_time": at, "exp_alerts": expected.get(f"{alert}{speed}", [])} for speed in BOTH]
    inputs = [{"series": one, "values": values} for one, values in zip(series, (bad, others), strict=True)]
    return {"name": name, "interval": step, "input_series": inputs, "alert_rule_test": shown}


def test_each_alert_is_seen_firing() -> None:
    fired = {(alert, speed) for alert, *_, firing in CASES.values() for speed in firing}
    assert len(fired) == 2 * len(slos.read(FILE)[1])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"objective": 99.9}, "not between 0 and 1"),
        ({"objective": 0.9, "fast": [slos.Pair(burn=14.4, long="1h", short="5m")]}, "lower it"),
        ({"slow": [slos.Pair(burn=1, long="1h", short="6h")]}, "is not shorter"),
    ],
)
def test_an_objective_whose_alerts_could_not_work_is_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(slos.read(FILE)[1][0], **changes)  # type: ignore[arg-type]
