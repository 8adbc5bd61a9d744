"""The chart: valid manifests, values that are checked, and a configuration that the platform and Dagster accept."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from dagster._core.instance.ref import InstanceRef

from control_plane.api.main import GRACEFUL_SHUTDOWN_S
from control_plane.capacity import configured_pools
from control_plane.platform.settings import Settings, load, variable
from core.telemetry import provenance
from engine.adapters.cluster import ClusterSettings
from tests.deploy.helm.dagster_pods import launcher, run_job, step_job
from tests.deploy.helm.rendered_chart import (
    CHART,
    EVERYTHING,
    FILES,
    MINIMAL,
    OFF,
    ROOT,
    Manifest,
    configuration,
    environment,
    merged,
    objects,
    of_kind,
    values,
)

KUBERNETES = "1.34"
"""Whose schemas the other manifests of the platform are checked against."""
PROMETHEUS = "monitoring.coreos.com/v1"
WARNING = 2
"""Severity of a message of ``helm lint``; below it are hints."""
NO_SETTINGS = {"FT_CLUSTER", "FT_DAGSTER_URL", "FT_EXECUTOR", "FT_IMAGE"}
"""Variables of the platform that are read where they are used."""


def test_there_are_files_of_values_for_every_kind_of_installation() -> None:
    assert len(FILES) >= 4
    assert {made["kind"] for made in objects(EVERYTHING)} - {made["kind"] for made in objects(OFF)} >= {
        "CronJob", "Ingress", "NetworkPolicy", "ServiceMonitor",
    }  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_manifest_is_valid(name: str) -> None:
    checked = [made for made in objects(name) if made["apiVersion"] != PROMETHEUS]
    assert len(checked) > 20
    for made in checked:
        kubernetes_validate.validate(made, KUBERNETES, strict=True)
    broken = deepcopy(next(made for made in checked if made["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["a_field_of_nobody"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_the_jobs_that_dagster_makes_are_valid(name: str, tmp_path: Path) -> None:
    made_by = launcher(name, tmp_path)
    for job in (run_job(made_by), *(step_job(made_by, stage) for stage in ("prepare", "train", "evaluate"))):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", FILES)
def test_lint_finds_nothing(name: str) -> None:
    report = helm_python.lint(CHART, values(name), strict=True, namespace="ft-platform")
    assert report["total_charts_linted"] == 1
    assert [m for m in report["messages"] if m["severity"] >= WARNING] == []
    assert not report["errors"]


@pytest.mark.parametrize("name", FILES)
def test_no_two_objects_have_the_same_name(name: str) -> None:
    names = [(made["kind"], made["metadata"].get("namespace"), made["metadata"]["name"]) for made in objects(name)]
    assert len(set(names)) == len(names)
    assert all(len(n) <= 52 for kind, _, n in names if kind == "CronJob"), "a CronJob's name gets 11 characters more"


REFUSED: dict[str, dict[str, Any]] = {
    "an unknown value": {"apis": {"replicas": 2}},
    "an unknown value further down": {"api": {"replica": 2}},
    "a tag instead of a digest": {"images": {"trainer": {"digest": "latest"}}},
    "a tag beside the digest": {"images": {"trainer": {"repository": "registry.example/ft@latest"}}},
    "a directory as object store": {"objectStore": {"url": "file:///objects"}},
    "no network of the object store": {"objectStore": {"networks": []}},
    "a host as network of the object store": {"objectStore": {"networks": ["s3.example"]}},
    "a prefix that ends in a slash": {"objectStore": {"url": "s3://bucket/prefix/"}},
    "no replica": {"worker": {"replicas": 0}},
    "no limit of memory": {"worker": {"resources": {"limits": {"memory": None}}}},
    "a limit of the worker's memory in Mi": {"worker": {"resources": {"limits": {"memory": "14000Mi"}}}},
    "a number as variable": {"env": {"FT_PREPARE_RUNS": 8}},
    "no pools": {"pools": ""},
    "a name that is not one": {"database": {"secret": "Not A Name"}},
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_are_checked(case: str) -> None:
    chart = helm_python.Chart.load(CHART)
    chart.validate_schema(values(MINIMAL))
    with pytest.raises(helm_python.HelmError):
        chart.validate_schema(merged(values(MINIMAL), REFUSED[case]))


def test_images_object_store_and_pools_have_no_default() -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        helm_python.Chart.load(CHART).validate_schema({})
    assert all(
        f"'/{name}" in str(refused.value) for name in ("images/controlPlane/digest", "objectStore/url", "objectStore/networks", "pools")
    )


@pytest.mark.parametrize("name", FILES)
def test_the_platform_reads_its_environment(name: str, tmp_path: Path) -> None:
    """As a pod does, with the ConfigMap's variables and files."""
    env, given = environment(name), values(name)
    settings = load({**env, "FT_HOME": str(tmp_path)})
    assert settings.object_store == given["objectStore"]["url"]
    assert settings.object_store_networks == tuple(given["objectStore"]["networks"])
    assert settings.inference_urls == tuple(given.get("inference", {}).get("urls", ()))
    assert settings.api_host == "0.0.0.0"
    assert settings.internal_url == "http://ft-ft-platform-api.ft-platform.svc:8000", "tenants' network policies let no other address pass"
    assert settings.mlflow_uri == ("" if "mlflow" not in given else f"sqlite:///{tmp_path}/mlflow.db"), (
        "a Secret's variable replaces the file"
    )
    assert env["FT_DAGSTER_URL"].removeprefix("http://") in settings.dagster_hosts
    known = {variable(field) for field in Settings.__dataclass_fields__} | NO_SETTINGS
    assert {key for key in env if key.startswith("FT_")} <= known
    pools = tmp_path / "pools.yaml"
    pools.write_text(yaml.safe_dump(configuration(name, "pools.yaml")))
    assert [pool.num_gpus for pool in configured_pools.load(pools, gpu_types=("h100-80gb",))] == [16]


@pytest.mark.slow
def test_the_code_location_loads_in_the_charts_environment_with_steps_in_pods(tmp_path: Path) -> None:
    """In a process of its own: the executor is chosen when the module is imported."""
    names = "{defs.get_job_def(name).executor_def.name for name in ('prepare', 'train', 'evaluate', 'reevaluate')}"
    program = f"from ft_assets.definitions import defs; print(*{names})"
    env = {**os.environ, **environment(MINIMAL), "AWS_REGION": "eu-central-1", "FT_HOME": str(tmp_path), "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "k8s", done.stderr


def test_results_name_the_trainer_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_IMAGE", environment(MINIMAL)["FT_IMAGE"])
    assert provenance.image() == f"registry.example/ft-trainer@sha256:{'1' * 64}"


def test_tenants_get_the_address_of_the_ingress() -> None:
    assert environment(EVERYTHING)["FT_PUBLIC_URL"] == "https://ft.example.com"
    assert environment(MINIMAL)["FT_PUBLIC_URL"] == "http://ft-ft-platform-api.ft-platform.svc:8000"
    (ingress,) = of_kind(EVERYTHING, "Ingress").values()
    backends = {rule["host"]: rule["http"]["paths"][0]["backend"]["service"] for rule in ingress["spec"]["rules"]}
    assert backends.keys() == {"ft.example.com", "dagster.ft.example.com"} == set(ingress["spec"]["tls"][0]["hosts"])
    for service in backends.values():
        (port,) = of_kind(EVERYTHING, "Service")[service["name"]]["spec"]["ports"]
        assert port["port"] == service["port"]["number"]


def test_manifests_of_model_servers_name_this_installation() -> None:
    found = ClusterSettings(**configuration(EVERYTHING, "cluster.yaml"))
    assert found.platform_image == f"registry.example/ft-control-plane@sha256:{'0' * 64}"
    assert (found.namespace, found.object_store) == ("ft-platform", "s3://ft-objects/production")
    assert "FT_CLUSTER" not in {k for k, v in environment(MINIMAL).items() if v}


@pytest.mark.parametrize("name", FILES)
def test_dagster_accepts_its_instance(name: str, tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(configuration(name, "dagster.yaml")))
    ref = InstanceRef.from_dir(str(tmp_path))
    assert ref.run_launcher_data is not None
    assert ref.run_launcher_data.class_name == "K8sRunLauncher"
    assert ref.run_coordinator_data is not None
    assert ref.run_coordinator_data.class_name == "AdmissionRunCoordinator"


@pytest.mark.parametrize("name", FILES)
def test_dagsters_instance_differs_from_one_machines_only_in_runs(name: str) -> None:
    mine, local = configuration(name, "dagster.yaml"), yaml.safe_load((ROOT / "dagster.yaml").read_text())
    assert {key for key in mine.keys() | local.keys() if mine.get(key) != local.get(key)} == {"run_launcher"}


def test_the_webserver_and_the_daemon_find_the_code_location() -> None:
    ((server,),) = (configuration(MINIMAL, "workspace.yaml")["load_from"],)
    host, port = server["grpc_server"]["host"], server["grpc_server"]["port"]
    service = of_kind(MINIMAL, "Service")[host]
    assert service["spec"]["ports"][0]["port"] == port
    local = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"][0]["python_module"]
    command = of_kind(MINIMAL, "Deployment")[host]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert server["grpc_server"]["location_name"] == local["location_name"] == command[command.index("--location-name") + 1]
    assert command[command.index("--module-name") + 1] == local["module_name"]


def test_services_select_the_pods_of_one_component() -> None:
    templates = [made["spec"]["template"]["metadata"]["labels"] for made in of_kind(EVERYTHING, "Deployment").values()]
    services = of_kind(EVERYTHING, "Service").values()
    assert len(services) == 3
    for service in services:
        assert sum(service["spec"]["selector"].items() <= labels.items() for labels in templates) == 1


def test_a_replica_of_the_api_has_time_to_answer_what_it_began() -> None:
    (pod,) = [d["spec"]["template"]["spec"] for name, d in of_kind(MINIMAL, "Deployment").items() if name.endswith("-api")]
    before_sigterm_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before_sigterm_s + GRACEFUL_SHUTDOWN_S < pod["terminationGracePeriodSeconds"]


def test_prometheus_scrapes_the_api_under_the_name_that_alerts_select() -> None:
    (monitor,) = of_kind(EVERYTHING, "ServiceMonitor").values()
    (rule,) = of_kind(EVERYTHING, "PrometheusRule").values()
    groups = [
        g for name in ("alerts", "slo-rules") for g in yaml.safe_load((ROOT / f"deploy/observability/{name}.yaml").read_text())["groups"]
    ]
    urls = [
        r["annotations"].pop("runbook_url") for spec in (groups, rule["spec"]["groups"]) for g in spec for r in g["rules"] if "alert" in r
    ]
    assert rule["spec"]["groups"] == groups
    path, shown = urls[0], urls[len(urls) // 2]
    assert path.startswith("docs/operations/runbook/") and shown == f"https://docs.example/ft/{path[len('docs/') : -len('.md')]}/"
    selected = [
        s
        for s in of_kind(EVERYTHING, "Service").values()
        if monitor["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
    ]
    assert [s["metadata"]["labels"][monitor["spec"]["jobLabel"]] for s in selected] == ["ft-api"]
    assert 'up{job="ft-api"}' in str(rule["spec"])
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "ft-keys", "key": "FT_METRICS_TOKEN"}
    assert monitor["metadata"]["labels"]["release"] == rule["metadata"]["labels"]["release"] == "prometheus"


def test_grafana_gets_the_dashboards_as_they_are() -> None:
    found = {n: made for n, made in of_kind(EVERYTHING, "ConfigMap").items() if "grafana_dashboard" in made["metadata"]["labels"]}
    files = {path.stem: path for path in (ROOT / "deploy/observability/dashboards").glob("*.json")}
    assert set(found) == {f"ft-ft-platform-dashboard-{name}" for name in files}
    for name, path in files.items():
        assert found[f"ft-ft-platform-dashboard-{name}"]["data"] == {path.name: path.read_text()}


def hooks(name: str) -> dict[str, Manifest]:
    return {
        made["metadata"]["annotations"]["helm.sh/hook"]: made
        for made in objects(name)
        if "helm.sh/hook" in made["metadata"].get("annotations", {})
    }


def test_migrations_run_before_the_services_and_queues_are_applied_after_them() -> None:
    found = {hook: made["metadata"]["name"] for hook, made in hooks(MINIMAL).items()}
    assert found == {
        "pre-install,pre-upgrade": "ft-ft-platform-migrations", "post-install,post-upgrade": "ft-ft-platform-kueue-queues",
        "test": "ft-ft-platform-test",
    }  # fmt: skip
    assert "post-install,post-upgrade" not in hooks(OFF)


def test_migrations_need_nothing_of_the_release() -> None:
    """They run before its first object exists."""
    spec = hooks(EVERYTHING)["pre-install,pre-upgrade"]["spec"]["template"]["spec"]
    named = {made["metadata"]["name"] for made in objects(EVERYTHING) if made["kind"] in ("ConfigMap", "ServiceAccount")}
    assert named
    assert spec["serviceAccountName"] == "default"
    assert not [n for n in named if n in str(spec)]
