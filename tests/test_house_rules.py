"""Rules of the house that a reader relies on: layers, light entrances, documented codes, the shape of the asset graph."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core import errors
from core.telemetry.logs import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "deepspeed", "bitsandbytes", "mlflow")


def run_python(code: str, *args: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENTRANCES = (
    "ft_assets.definitions", "control_plane.api", "control_plane.api.app", "ft_client.cli", "ft_client.cli.command_tree",
    "ft_client", "sensors.run_coordinator", "resources.launcher.workload_watcher", "engine.data.ingest",
    "engine.data.packs.build",
)  # fmt: skip
IMPORTS = """
import importlib, json, sys
found = {}
for name in sys.argv[1].split():
    importlib.import_module(name)
    found[name] = [m for m in sys.argv[2].split() if m in sys.modules]
    if found[name]:
        break
    for loaded in [m for m in sys.modules if m.split(".")[0] in sys.argv[3].split()]:
        del sys.modules[loaded]
print(json.dumps(found))
"""


@pytest.mark.parametrize("module", ENTRANCES)
def test_an_entrance_imports_no_training_library(module: str, loaded: Loaded) -> None:
    assert loaded.heavy_imports[module] == []


DEFINED = """
import json
from control_plane.platform import settings
from ft_assets.definitions import defs
from sensors import recovery as failures

def node(n):
    checks = sorted(c.name for c in n.check_keys)
    parents = sorted(p.to_user_string() for p in n.parent_keys)
    known = {"group": n.group_name, "partitions": n.partitions_def.name, "code_version": n.code_version}
    return {**known, "parents": parents, "checks": checks}

repo = defs.get_repository_def()
assets = {n.key.to_user_string(): node(n) for n in repo.asset_graph.asset_nodes}
jobs = sorted(j.name for j in repo.get_all_jobs() if not j.name.startswith("__"))
graph = {"assets": assets, "jobs": jobs, "sensors": sorted(s.name for s in repo.sensor_defs)}
figures = [settings.load({}).partition_days, failures.STALE.seconds, failures.HUNG.seconds, failures.MAX_REPLACEMENTS,
           sorted(j.name for j in defs.resolve_all_job_defs() if j.name[0] != "_")]
print(json.dumps([graph, figures]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    heavy_imports: dict[str, list[str]]
    """Training libraries that each entrance imports, of our modules as the first."""
    graph: dict[str, object]
    figures: list[Any]
    """Those that documents state."""


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A process imports one entrance after the other, and then says what is defined.

    Once an entrance brings a library, another process goes on, so that what is found is always of the last import.
    """
    found: dict[str, list[str]] = {}
    while left := [name for name in ENTRANCES if name not in found]:
        *_, imports, defined = run_python(IMPORTS + DEFINED, " ".join(left), " ".join(HEAVY), " ".join(PACKAGES)).splitlines()
        found |= json.loads(imports)
    graph, figures = json.loads(defined)
    return Loaded(heavy_imports=found, graph=graph, figures=figures)


def test_the_asset_graph_is_the_documented_one(loaded: Loaded) -> None:
    def asset(group: str, *parents: str, checks: tuple[str, ...] = ()) -> dict[str, object]:
        return {"parents": sorted(parents), "group": group, "partitions": "jobs", "code_version": "1", "checks": list(checks)}

    assert loaded.graph == {
        "assets": {
            "adapter": asset("adapters", "eval_report", "checkpoint", checks=("lineage_complete", "servable")),
            "adapter_evaluation": asset("adapters", "adapter"),
            "checkpoint": asset("training", "tokenized_pack"),
            "dataset": asset("datasets", "validated_dataset", checks=("valid",)),
            "eval_report": asset("evals", "checkpoint", "dataset", checks=("gate",)) | {"code_version": "2"},
            "tokenized_pack": asset("datasets", "dataset", checks=("packing_exact",)),
            "validated_dataset": asset("datasets") | {"partitions": "datasets", "code_version": None},
        },
        "jobs": ["evaluate", "prepare", "reevaluate", "run_retention", "submit", "train"],
        "sensors": ["adapter_stages", "admission", "evaluations", "failures", "partitions", "scheduling", "validated_datasets"],
    }  # fmt: skip


def test_import_contracts_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(lint), "--no-cache"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_an_import_against_the_layers_is_caught(tmp_path: Path) -> None:
    """The contracts can fail: one planted breach for the rule that matters most is reported."""
    for package in PACKAGES:
        subprocess.run(["cp", "-r", str(ROOT / package), str(tmp_path / package)], check=True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    breach = tmp_path / "engine/training/runtime/train.py"
    breach.write_text(breach.read_text() + "\nimport control_plane.platform.settings\n")
    lint = Path(sys.executable).parent / "lint-imports"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([str(lint), "--no-cache"], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode != 0
    assert "the GPU process knows no platform BROKEN" in re.sub(r"\s+", " ", done.stdout)


LAYERS = {"rules", "tables", "service", "schemas", "responses", "routes", "assets", "step", "__init__", "__main__"}
"""Module names that mean the same in every package."""
MAX_MODULES = 15


def _modules() -> list[Path]:
    """Every module, relative to the repository; without what `make vllm` builds."""
    found = [
        path.relative_to(ROOT) for top in (*PACKAGES, "benchmarks", "tools", "examples", "tests") for path in (ROOT / top).rglob("*.py")
    ]
    return [path for path in found if "build" not in path.parts]


def test_no_folder_has_more_than_fifteen_modules() -> None:
    counted = Counter(path.parent for path in _modules() if path.name not in ("__init__.py", "conftest.py"))
    assert len(counted) > 100, "the search found too little to mean anything"
    assert {str(folder): number for folder, number in counted.items() if number > MAX_MODULES} == {}


def test_modules_are_named_once_and_by_nouns() -> None:
    """The client is left out: it names its modules as the API names its resources."""
    named: dict[str, list[str]] = {}
    for path in _modules():
        if path.parts[0] in PACKAGES and path.parts[0] != "agent" and (path.parts[0] != "ft_client" or path.parts[1] == "cli"):
            named.setdefault(path.stem, []).append(str(path))
    assert {name: paths for name, paths in named.items() if len(paths) > 1 and name not in LAYERS} == {}
    assert [name for name in named if name.endswith("ing")] == []


def test_every_error_class_and_code_is_documented() -> None:
    documented = (ROOT / "docs/errors.md").read_text()
    sources = [p for top in PACKAGES for p in (ROOT / top).rglob("*.py")]
    used = {code for p in sources for code in re.findall(r"""code="([a-z0-9_]+)\"""", p.read_text())}
    used |= {error.default_code for error in errors.family()}
    assert len(used) > 20, "the search found too little to mean anything"
    assert {"invalid_request", "integrity_error"} <= used, "the family was walked"
    assert sorted(c for c in used if f"`{c}`" not in documented) == []


def test_no_two_advisory_locks_have_the_same_key() -> None:
    sources = [path for top in ("control_plane", "resources", "sensors", "deploy") for path in (ROOT / top).rglob("*.py")]
    keys = [key for path in sources for key in re.findall(r"^[A-Z_]+ = (0x6674[0-9A-F]+)\b", path.read_text(), re.MULTILINE)]
    assert len(keys) > 5
    assert [key for key, number in Counter(keys).items() if number > 1] == []


def test_every_reason_to_wait_is_documented() -> None:
    from engine.scheduler import Reason

    documented = (ROOT / "docs/errors.md").read_text()
    assert [r for r in Reason if f"`{r}`" not in documented] == []


def test_decisions_state_the_figures_of_the_code(loaded: Loaded) -> None:
    days, stale_s, hung_s, runs, jobs = loaded.figures
    partitions, stages = (" ".join((ROOT / "docs" / "decisions" / name).read_text().split()) for name in PAGES)
    assert f"{days} days after its end (`FT_PARTITION_DAYS`)" in partitions
    assert f"no heartbeat for {stale_s} s ({hung_s} s while" in stages
    assert f"After {['no', 'one', 'two', 'three', 'four', 'five', 'six'][runs]} runs of one stage" in stages
    assert set(jobs) == {"prepare", "train", "evaluate", "reevaluate", "submit", "run_retention"}
    assert all(f"`{name}`" in stages for name in set(jobs) - {"submit", "run_retention"})


PAGES = ("0001-partitions.md", "0003-three-runs-per-job.md")


def test_documents_mention_a_chart_only_where_there_is_one() -> None:
    there = list((ROOT / "deploy").rglob("Chart.yaml"))
    text = "".join(path.read_text() for path in (ROOT / "dagster.yaml", *(ROOT / "docs").glob("*.md")))
    assert there or not re.search(r"\bthe (Helm )?chart\b", text)
