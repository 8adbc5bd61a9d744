"""Expressions of the alerting rules and of the dashboards, and the names of metrics and labels in them."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
ALERTS = ROOT / "deploy/observability/alerts.yaml"
ALERTS_TESTS = tuple(Path(__file__).with_name(name) for name in ("alerts_test.yaml", "alerts_of_days_test.yaml"))
SLO_RULES = ROOT / "deploy/observability/slo-rules.yaml"
DASHBOARDS = {path.stem: path for path in sorted((ROOT / "deploy/observability/dashboards").glob("*.json"))}
SCRAPED = frozenset({"job", "instance", "le"})
"""Labels that Prometheus adds itself."""
OF_A_DEVICE = frozenset({"Hostname", "hostname", "gpu"})
OF_OTHERS = {
    "up": frozenset[str](),
    # dcgm-exporter: its default counters and the rows that docs/observability.md names; the host's label was renamed in 4.8.3
    "DCGM_FI_DEV_GPU_UTIL": OF_A_DEVICE,
    "DCGM_FI_DEV_GPU_UTIL_RATIO": OF_A_DEVICE,
    "DCGM_FI_DEV_GPU_TEMP": OF_A_DEVICE,
    "DCGM_FI_DEV_XID_ERRORS": OF_A_DEVICE,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": OF_A_DEVICE,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": OF_A_DEVICE,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": OF_A_DEVICE,
    "kueue_cluster_queue_nominal_quota": frozenset({"cohort", "cluster_queue", "flavor", "resource"}),
    "kueue_pending_workloads": frozenset({"cluster_queue", "status"}),
    "kube_node_status_allocatable": frozenset({"node", "resource"}),
    "kube_node_status_capacity": frozenset({"node", "resource"}),
    "kube_node_status_condition": frozenset({"node", "condition", "status"}),
    "kube_node_spec_unschedulable": frozenset({"node"}),
}
"""Metrics that the platform does not export, with the labels in use."""
RECORDED = {"slo:events": frozenset({"slo", "window"}), "slo:burn_rate": frozenset({"slo", "window"})}
"""Series that the rules of objectives record."""
WORDS = {"sum", "max", "min", "avg", "by", "on", "and", "or", "rate", "delta", "increase", "abs", "topk", "vector", "offset", "without"} | {
    "histogram_quantile", "clamp_min", "ignoring", "unless", "absent", "label_replace",
}  # fmt: skip


def rules(file: Path = ALERTS) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Return the alerts of both files."""
    return [rule for file in (ALERTS, SLO_RULES) for rule in rules(file) if "alert" in rule]


@cache
def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARDS[name].read_text())
    return found


def filled(query: str) -> str:
    """Return a query with Grafana's variables filled in: every tenant, within six hours."""
    return query.replace("$__range", "6h").replace("$tenant", ".*")


def targets() -> list[dict[str, Any]]:
    """Return the queries of all panels, filled in."""
    found = [target for name in DASHBOARDS for panel in dashboard(name)["panels"] for target in panel.get("targets", ())]
    return [target | {"expr": filled(target["expr"])} for target in found]


def expressions() -> list[str]:
    return [rule["expr"] for file in (ALERTS, SLO_RULES) for rule in rules(file)] + [target["expr"] for target in targets()]


def names_in(expression: str) -> set[str]:
    """Names of metrics: identifiers that are no function, no keyword and no label."""
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", "", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression))
    return {n for n in re.findall(r"[A-Za-z_][A-Za-z0-9_:]*", bare) if n not in WORDS and not re.fullmatch(r"[smhd]", n)}


def labels_in(expression: str) -> set[str]:
    matched = {m for inside in re.findall(r"\{([^}]*)\}", expression) for m in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)}
    grouped = {g.strip() for inside in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for g in inside.split(",")}
    return matched | grouped


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
