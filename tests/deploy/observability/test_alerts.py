"""Every alert fires when it should, is silent when it should, and has a section that says what to do."""

from __future__ import annotations

import re
import shutil

import pytest
import sqlalchemy as sa
import yaml

from control_plane.api.metrics import exposition
from control_plane.api.metrics.gauges import RecentGauges
from control_plane.api.metrics.request_metrics import RequestMeter
from control_plane.platform.context import Platform
from tests.deploy.observability.expressions import ALERTS, ALERTS_TESTS, ROOT, alerts, promtool, rules
from tests.docs.pages import OPERATIONS

PAGES = ROOT / "docs/operations/runbook"
LIST = ROOT / "docs/operations/alerts.md"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install --no-install-recommends prometheus"
)


@needs_promtool
def test_the_rules_are_ones_that_prometheus_loads() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", ALERTS)


@needs_promtool
def test_each_rule_fires_on_its_series_and_on_no_other() -> None:
    assert promtool("test", "rules", *ALERTS_TESTS).count("SUCCESS") == len(ALERTS_TESTS)


def test_each_rule_is_tried_with_series_that_fire_it_and_series_that_do_not() -> None:
    tried = [test for file in ALERTS_TESTS for test in yaml.safe_load(file.read_text())["tests"]]
    cases = [case for test in tried if test["input_series"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_each_alert_says_how_bad_it_is_and_leads_to_its_page() -> None:
    pages = {path.stem: path.read_text() for path in PAGES.glob("*.md")}
    assert sorted(pages) == sorted(alert["alert"] for alert in alerts()), "docs/operations/runbook has a page for each alert, and no other"
    for alert in alerts():
        name, severity = alert["alert"], alert["labels"]["severity"]
        assert severity in ("page", "ticket", "info")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook_url"] == f"docs/operations/runbook/{name}.md"
        title, shown, *sections = re.split(r"\n\n(?=## |Severity: )", pages[name])
        assert title == f"# {name}" and shown == f"Severity: **{severity}**"
        assert [section.partition("\n\n")[0] for section in sections] == ["## What it means", "## How to confirm", "## What to do"], name
        assert all(section.partition("\n\n")[2].strip() for section in sections), name
        assert f"| [{name}](runbook/{name}.md) | {severity} |" in LIST.read_text()


def test_the_queries_of_the_pages_run(fresh_platform: Platform) -> None:
    queries = [text.replace("\n", " ") for page in OPERATIONS for text in re.findall(r"`(SELECT [^`]+)`", page.read_text())]
    assert len(queries) > 7
    with fresh_platform.engine.connect() as conn:
        for query in queries:
            conn.execute(sa.text(query))


def test_a_queue_that_nobody_ever_looked_at_is_an_alert(fresh_platform: Platform) -> None:
    """Until the first round its age has no sample, and no comparison is true of no sample."""
    age = "ft_scheduler_last_round_age_seconds"
    (family,) = [f for f in exposition.registry(RecentGauges(platform=fresh_platform), RequestMeter()).collect() if f.name == age]
    assert family.samples == []
    (rule,) = [r for r in rules() if r["alert"] == "FtSchedulerStands"]
    assert f"absent({age})" in rule["expr"] and "up{" in rule["expr"], "but where the API is down, that is the alert"
    assert "$value" not in rule["annotations"]["summary"], "it is no duration where there is none"
