"""Pods of the chart and of Dagster's runs: restricted security, tokens and secrets only where needed, limits, probes, all services."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from pathlib import Path

import pytest

from control_plane.platform.settings import load
from deploy.local import stack_services
from tests.deploy.helm.dagster_pods import launcher, pod_of, run_job, step_job
from tests.deploy.helm.rendered_chart import EVERYTHING, EXTERNAL, FILES, MINIMAL, OFF, Pod, environment, of_kind, pods, values

WITH_TOKEN = {"worker", "code-location", "dagster", "daemon", "runs", "kueue-queues", "test"}
"""Components that call the Kubernetes API."""
PACKAGES = frozenset({"control_plane", "core", "dagster", "deploy", "engine", "ft_assets", "ft_client", "sensors"})


@pytest.fixture(params=FILES)
def every_pod(request: pytest.FixtureRequest, tmp_path: Path) -> list[Pod]:
    """With each file of values, the pods of the chart, of a run, and of a step of each stage."""
    made_by = launcher(request.param, tmp_path)
    of_dagster = [run_job(made_by), *(step_job(made_by, stage) for stage in ("prepare", "train", "evaluate"))]
    found = [*pods(request.param), *map(pod_of, of_dagster)]
    assert {pod.component for pod in found} >= {"api", "worker", "dagster", "daemon", "code-location", "migrations", "test", "runs"}
    return found


def test_every_pod_keeps_the_restricted_profile(every_pod: list[Pod]) -> None:
    for pod in every_pod:
        whole = pod.spec["securityContext"]
        assert whole["runAsNonRoot"] is True
        assert whole["runAsUser"] >= 10_000
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip


def test_pods_write_to_volumes_of_their_own_and_to_claims_only(every_pod: list[Pod]) -> None:
    for pod in every_pod:
        kinds = {volume["name"]: set(volume) - {"name"} for volume in pod.spec["volumes"]}
        assert set().union(*kinds.values()) <= {"emptyDir", "configMap", "secret", "persistentVolumeClaim"}
        for container in pod.containers:
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly") or kinds[mount["name"]] & {"emptyDir", "persistentVolumeClaim"}, (pod, mount)


def test_a_mount_inside_a_writable_volume_lies_at_the_root_of_another_writable_one(every_pod: list[Pod]) -> None:
    """The container runtime creates the directories of mount points as root: the platform could not write beside a deeper one."""
    seen = 0
    for pod in every_pod:
        for container in pod.containers:
            paths = {Path(mount["mountPath"]) for mount in container["volumeMounts"]}
            for path in paths:
                if any(other in path.parents for other in paths):
                    seen += 1
                    assert path.parent in paths, f"{path} is below a directory that is not a volume"
    assert seen


def test_only_pods_that_call_the_kubernetes_api_have_a_token(every_pod: list[Pod]) -> None:
    assert {pod.component for pod in every_pod if pod.spec["automountServiceAccountToken"]} <= WITH_TOKEN
    assert {"api", "migrations"} <= {pod.component for pod in every_pod if not pod.spec["automountServiceAccountToken"]}


def test_every_container_states_its_resources_and_a_limit_of_memory(every_pod: list[Pod]) -> None:
    for pod in every_pod:
        for container in pod.containers:
            resources = container["resources"]
            assert resources["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in resources["limits"]
            assert "nvidia.com/gpu" not in resources["limits"]


def test_every_image_is_named_by_its_digest(every_pod: list[Pod]) -> None:
    for pod in every_pod:
        trainer = pod.component == "runs"
        for container in pod.containers:
            name, _, digest = container["image"].partition("@sha256:")
            assert name == f"registry.example/ft-{'trainer' if trainer else 'control-plane'}"
            assert len(digest) == 64


def test_no_pod_takes_cores_of_the_pools(every_pod: list[Pod]) -> None:
    for pod in every_pod:
        terms = pod.spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms
        assert all({"key": "ft-platform/pool", "operator": "DoesNotExist"} in term["matchExpressions"] for term in terms)


def test_the_step_of_a_training_is_small(tmp_path: Path) -> None:
    resources = pod_of(step_job(launcher(MINIMAL, tmp_path), "train")).main["resources"]
    assert resources["requests"] == {"cpu": "250m", "memory": "1Gi"}
    assert resources["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize("name", FILES)
def test_every_service_has_probes(name: str) -> None:
    services = [pod for pod in pods(name) if pod.kind == "Deployment"]
    assert len(services) == 5
    for pod in services:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            (kind,) = pod.main[probe].keys() & {"httpGet", "grpc", "exec"}
            if kind == "httpGet":
                assert pod.main[probe]["httpGet"]["port"] == pod.main["ports"][0]["name"]


def test_the_probe_of_a_beat_file_passes_while_it_is_touched_and_fails_afterwards(tmp_path: Path) -> None:
    (worker,) = (pod for pod in pods(MINIMAL) if pod.component == "worker")
    shell = [part.replace("/var/lib/ft", str(tmp_path)) for part in worker.main["livenessProbe"]["exec"]["command"]]
    beat = tmp_path / "worker.alive"
    assert subprocess.run(shell, capture_output=True).returncode != 0
    beat.touch()
    assert subprocess.run(shell, capture_output=True).returncode == 0
    os.utime(beat, (time.time() - 30, time.time() - 30))
    assert subprocess.run(shell, capture_output=True).returncode != 0


def test_the_services_are_those_of_one_machine(tmp_path: Path) -> None:
    """But its database, its run server and its model server, for which a cluster has others; migrations are a hook."""
    env = {"FT_HOME": str(tmp_path), "FT_INFERENCE_URLS": ","}
    local = {s.name: set(s.argv) & set(_modules()) for s in stack_services.services(load(env)) if s.name not in ("postgres", "runs")}
    mine = {pod.component: set(pod.main["command"]) for pod in pods(MINIMAL) if pod.kind == "Deployment"}
    mine["migrate"] = set(next(pod for pod in pods(MINIMAL) if pod.component == "migrations").main["command"])
    assert local.keys() == mine.keys()
    assert all(modules <= mine[name] for name, modules in local.items())


def test_every_module_that_a_pod_starts_exists() -> None:
    modules = _modules()
    assert len(modules) >= 7
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def _modules() -> list[str]:
    parts = (part for pod in pods(MINIMAL) for part in pod.main["command"])
    return sorted({part for part in parts if "." in part and part.partition(".")[0] in PACKAGES})


@pytest.mark.parametrize("name", FILES)
def test_the_key_file_reaches_the_platform_with_the_mode_that_it_requires(name: str) -> None:
    """A Secret's file is readable by the pod's group, which the platform refuses; it reads a copy of mode 0600."""
    for pod in pods(name):
        volume = [v for v in pod.spec["volumes"] if "secret" in v]
        copies = "install -m 600 /run/secrets/ft/secrets.key /run/ft/secrets.key" in str(pod.spec.get("initContainers"))
        assert bool(volume) == copies == (pod.component in ("api", "worker", "dagster"))
        assert not any(mount["name"] == "keys" for mount in pod.main["volumeMounts"])
        if copies:
            (in_memory,) = (v["emptyDir"] for v in pod.spec["volumes"] if v["name"] == "key")
            assert in_memory["medium"] == "Memory"
            assert {"name": "FT_SECRETS_KEY_FILE", "value": "/run/ft/secrets.key"} in pod.main["env"]
            assert {"name": "key", "mountPath": "/run/ft", "readOnly": True} in pod.main["volumeMounts"]
        signs = "install -m 600 /run/secrets/ft-signing/signing.key /run/ft/signing.key" in str(pod.spec.get("initContainers"))
        reads = {"name": "FT_SIGNING_KEY_FILE", "value": "/run/ft/signing.key"} in pod.main.get("env", [])
        assert signs == reads == (pod.component == "worker"), "no other process can sign"


def secret_names(name: str) -> dict[str, set[str]]:
    return {pod.component: pod.secrets() for pod in pods(name)}


def test_a_pod_reads_only_the_secrets_that_it_needs() -> None:
    found = secret_names(MINIMAL)
    database = {"ft-database/FT_DATABASE_URL", "ft-database/FT_DAGSTER_DATABASE_URL"}
    assert found == {
        "api": database | {"ft-keys", "ft-keys/FT_METRICS_TOKEN"},
        "worker": database | {"ft-keys"},
        "code-location": database,
        "dagster": database | {"ft-keys", "ft-keys/FT_DAGSTER_TOKEN"},
        "daemon": database | {"ft-keys/FT_DAGSTER_TOKEN"},
        "migrations": {"ft-database/FT_DATABASE_URL", "ft-database-owner/FT_OWNER_DATABASE_URL"},
        "kueue-queues": {"ft-database/FT_DATABASE_URL"},
        "test": {"ft-database/FT_DATABASE_URL", "ft-keys/FT_DAGSTER_TOKEN"},
    }


def test_secrets_under_other_names_replace_all_of_the_default_ones() -> None:
    found = secret_names(EXTERNAL)
    named = {name.partition("/")[0] for names in found.values() for name in names}
    assert named == {
        "vault-ft-db",
        "vault-ft-db-owner",
        "vault-ft-s3",
        "vault-ft-keys",
        "vault-ft-inference",
        "vault-ft-mlflow",
        "vault-ft-mail",
    }
    assert {c for c, names in found.items() if "vault-ft-mail" in names} == {"api", "worker"}
    assert {c for c, names in found.items() if any("owner" in name for name in names)} == {"migrations"}
    assert "vault-ft-db/FT_DAGSTER_DATABASE_URL" in found["migrations"], "it must not prepare a database that somebody else prepares"


def test_a_run_reads_what_the_services_read_but_no_keys(tmp_path: Path) -> None:
    found = pod_of(run_job(launcher(EXTERNAL, tmp_path))).secrets()
    assert {name.partition("/")[0] for name in found} == {
        "vault-ft-db",
        "vault-ft-s3",
        "vault-ft-inference",
        "vault-ft-mlflow",
        "vault-ft-mail",
    }


def test_claims_are_mounted_where_the_platform_looks_for_them() -> None:
    settings = load(environment(EVERYTHING) | {"FT_HOME": "/var/lib/ft"})
    (worker,) = (pod for pod in pods(EVERYTHING) if pod.component == "worker")
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in worker.spec["volumes"] if "persistentVolumeClaim" in v}
    mounted = {m["mountPath"]: claims[m["name"]] for m in worker.main["volumeMounts"] if m["name"] in claims}
    assert mounted == {str(settings.models_dir): "ft-base-models", str(settings.adapters_dir): "ft-adapters"}


def test_replicas_are_spread_and_a_drain_takes_one_at_a_time() -> None:
    budgets = {tuple(sorted(b["spec"]["selector"]["matchLabels"].items())) for b in of_kind(EVERYTHING, "PodDisruptionBudget").values()}
    for made in of_kind(EVERYTHING, "Deployment").values():
        assert tuple(sorted(made["spec"]["selector"]["matchLabels"].items())) in budgets
        spread = made["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        assert bool(spread) == (made["spec"]["replicas"] > 1)
        assert (made["spec"]["strategy"]["type"] == "Recreate") == (made["metadata"]["name"].endswith("-daemon"))
    assert of_kind(EVERYTHING, "Deployment")["ft-ft-platform-api"]["spec"]["replicas"] == values(EVERYTHING)["api"]["replicas"]


def test_pods_start_anew_when_their_configuration_changes() -> None:
    def checksums(name: str) -> set[str]:
        return {
            made["spec"]["template"]["metadata"]["annotations"]["checksum/configuration"] for made in of_kind(name, "Deployment").values()
        }

    assert len(checksums(MINIMAL)) == 1
    assert checksums(MINIMAL).isdisjoint(checksums(OFF))
