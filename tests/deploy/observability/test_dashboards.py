"""Rules and dashboards ask for metrics and labels that there are, and Grafana can show the dashboards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.observability.expressions import (
    DASHBOARDS,
    OF_OTHERS,
    RECORDED,
    SCRAPED,
    dashboard,
    expressions,
    filled,
    labels_in,
    names_in,
    promtool,
    targets,
)
from tests.deploy.observability.test_alerts import needs_promtool

Emitted = Mapping[str, frozenset[str]]
LEGEND = re.compile(r"\{\{(\w+)\}\}")


def test_rules_and_dashboards_ask_for_metrics_that_are_emitted(emitted: Emitted) -> None:
    asked = {name for expression in expressions() for name in names_in(expression)}
    assert len(asked & set(emitted)) > 60, "the expressions were read"
    assert asked - set(emitted) == {*OF_OTHERS, *RECORDED}


def test_rules_and_dashboards_use_labels_that_their_metrics_have(emitted: Emitted) -> None:
    def known(expression: str) -> set[str]:
        return SCRAPED | {label for name in names_in(expression) for label in {**emitted, **OF_OTHERS, **RECORDED}.get(name, ())}

    for expression in expressions():
        made = set(re.findall(r'label_replace\(.*?\), "(\w+)"', expression))
        assert labels_in(expression) <= known(expression) | made, expression
    for target in targets():
        assert set(LEGEND.findall(target["legendFormat"])) <= labels_in(target["expr"]) | SCRAPED, target["expr"]


@needs_promtool
def test_the_queries_of_the_dashboards_are_promql(tmp_path: Path) -> None:
    records = [{"record": f"query:{number}", "expr": target["expr"]} for number, target in enumerate(targets())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": records}]}))
    assert f"{len(records)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


@needs_promtool
def test_panels_show_what_their_titles_say(tmp_path: Path) -> None:
    """The queries that combine series, with 6 h as the selected range, at 7 h."""
    billed = 'ft_tenant_billed_micros{tenant="%s",instance="%s"}'
    series = {
        billed % ("old", "a"): "2000000x60 5000000x600",
        billed % ("old", "b"): "2000000x60 5000000x600",
        billed % ("new", "a"): "_x300 4000000x300",
        'kueue_cluster_queue_nominal_quota{cohort="small",cluster_queue="premium-small",resource="nvidia.com/gpu"}': "8x600",
        'kueue_cluster_queue_nominal_quota{cohort="small",cluster_queue="standard-small",resource="nvidia.com/gpu"}': "20x600",
        'ft_pool_gpus{pool="small"}': "16x600",
        'ft_pool_gpus_draining{pool="small"}': "8x600",
        'kube_node_spec_unschedulable{node="gpu-1"}': "1x600",
        'kube_node_spec_unschedulable{node="cpu-1"}': "1x600",
        'kube_node_status_capacity{node="gpu-1",resource="nvidia_com_gpu"}': "8x600",
        'DCGM_FI_DEV_GPU_UTIL{Hostname="gpu-1",gpu="0"}': "50x600",
        'DCGM_FI_DEV_GPU_UTIL_RATIO{hostname="gpu-2",gpu="0"}': "0.25x600",
    }
    shown = {
        ("Spend", 0): {"{}": 7.0},
        ("Spend by tenant", 0): {'{tenant="old"}': 3.0, '{tenant="new"}': 4.0},
        ("Kueue's quota and the GPUs that it is for", 2): {'{pool="small"}': 4.0},
        ("Cordoned GPU nodes", 0): {'{node="gpu-1"}': 1.0},
        ("Utilization by node", 0): {'{Hostname="gpu-1"}': 0.5, '{hostname="gpu-2"}': 0.25},
    }
    queries = {
        (p["title"], i): t["expr"] for name in DASHBOARDS for p in dashboard(name)["panels"] for i, t in enumerate(p.get("targets", ()))
    }
    tests = [
        {"expr": filled(queries[panel]), "eval_time": "7h", "exp_samples": [{"labels": k, "value": v} for k, v in samples.items()]}
        for panel, samples in shown.items()
    ]
    made = {"interval": "1m", "input_series": [{"series": k, "values": v} for k, v in series.items()], "promql_expr_test": tests}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"tests": [made]}))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "panels.yaml")


def test_dashboards_have_names_of_their_own() -> None:
    assert set(DASHBOARDS) == {"platform", "tenants", "gpus", "slos"}
    assert len({dashboard(name)["uid"] for name in DASHBOARDS}) == len({dashboard(name)["title"] for name in DASHBOARDS}) == 4


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_beside_each_other_and_have_what_they_show(name: str) -> None:
    shown = dashboard(name)["panels"]
    assert len({p["id"] for p in shown}) == len(shown)
    cells: set[tuple[int, int]] = set()
    for panel in shown:
        assert panel["type"] == "row" or panel["targets"]
        assert panel["type"] in ("row", "stat", "timeseries", "bargauge")
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not covered & cells
        cells |= covered


def test_a_dashboard_of_tenants_shows_the_selected_ones_alone() -> None:
    (tenant,) = [v for v in dashboard("tenants")["templating"]["list"] if v["name"] == "tenant"]
    assert tenant["query"] == "label_values(ft_tenant_jobs_ended, tenant)"
    for panel in dashboard("tenants")["panels"]:
        for target in panel.get("targets", ()):
            selectors = re.findall(r"ft_\w+(\{[^}]*\})?", target["expr"])
            assert selectors and all('tenant=~"$tenant"' in s for s in selectors), target["expr"]
