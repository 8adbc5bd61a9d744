"""The chart as Helm renders it with each file of values in ``ci/``, and the pods that it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

Manifest = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "ft-platform"
FILES = {file.stem.removesuffix("-values"): file for file in sorted((CHART / "ci").glob("*-values.yaml"))}
NAMESPACE = "ft-platform"
MINIMAL, EVERYTHING, EXTERNAL, OFF = "minimal", "everything", "external-secrets", "embedded-off"


def values(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILES[name].read_text())
    return found


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, as Helm merges values."""
    return base | {k: merged(base.get(k, {}), v) if isinstance(v, dict) else v for k, v in changes.items()}


def render(given: dict[str, Any]) -> list[Manifest]:
    """Render as ``helm install ft`` would."""
    files = helm_python.Chart.load(CHART).render(given, name="ft", namespace=NAMESPACE)
    return [made for file, text in files.items() if file.endswith(".yaml") for made in yaml.safe_load_all(text) if made]


@cache
def objects(name: str) -> tuple[Manifest, ...]:
    return tuple(render(values(name)))


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    """Return the objects of one kind by name."""
    return {made["metadata"]["name"]: made for made in objects(name) if made["kind"] == kind}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    kind: str
    """Of the object that starts it."""
    component: str
    labels: dict[str, str]
    spec: dict[str, Any] = field(repr=False)

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return dict(container)

    def secrets(self) -> set[str]:
        """Return the names of the Secrets that it reads, with the key where it reads one."""
        found = {volume["secret"]["secretName"] for volume in self.spec["volumes"] if "secret" in volume}
        for container in self.containers:
            found |= {source["secretRef"]["name"] for source in container.get("envFrom", []) if "secretRef" in source}
            sources = (variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", []))
            found |= {f"{source['name']}/{source['key']}" for source in sources if source}
        return found


def pods(name: str) -> list[Pod]:
    """Return the pods of all objects of the chart; those of Dagster's runs are made from its configuration (`dagster_pods`)."""
    return [pod for made in objects(name) for pod in _pods_of(made)]


def _pods_of(made: Manifest) -> Iterator[Pod]:
    spec = made.get("spec", {})
    if made["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    if made["kind"] == "Pod":
        template = made
    elif made["kind"] in ("Deployment", "Job", "CronJob"):
        template = spec["template"]
    else:
        return
    labels = template["metadata"]["labels"]
    yield Pod(kind=made["kind"], component=labels["app.kubernetes.io/component"], labels=labels, spec=template["spec"])


def configuration(name: str, file: str) -> Any:
    """Return a file of the platform's ConfigMap, parsed."""
    return yaml.safe_load(of_kind(name, "ConfigMap")["ft-ft-platform-files"]["data"][file])


def environment(name: str) -> dict[str, str]:
    found: dict[str, str] = of_kind(name, "ConfigMap")["ft-ft-platform-env"]["data"]
    return found
