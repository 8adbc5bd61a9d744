"""The images: which packages are in them, whence they come, and what the Dockerfile promises."""

from __future__ import annotations

import re
import subprocess

import pytest

from core.telemetry import provenance
from tools.images import APP, EXTRAS, ROOT, locked, name, pins
from tools.lock import LOCK, packages_of

DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def packages() -> dict[str, list[str]]:
    return {image: locked(extras, cpu=True) for image, extras in EXTRAS.items()}


def test_the_control_plane_has_no_torch_and_neither_image_has_what_only_tests_use(packages: dict[str, list[str]]) -> None:
    names = {image: {name(package) for package in found} for image, found in packages.items()}
    assert {"fastapi", "dagster-k8s", "dagster-aws", "kubernetes", "tokenizers"} <= names["control-plane"]
    assert not {"torch", "transformers", "deepspeed"} & names["control-plane"]
    assert names["control-plane"] < names["trainer"]
    assert {"torch", "transformers", "deepspeed"} <= names["trainer"]
    assert not {"pytest", "moto", "helm-python-sdk", "kubernetes-validate", "uv"} & names["trainer"]


def test_each_package_is_the_locked_one_with_its_hashes(packages: dict[str, list[str]]) -> None:
    lock = set(packages_of((ROOT / LOCK).read_text()))
    assert set(packages["control-plane"]) <= lock
    assert [name(p) for p in packages["trainer"] if p not in lock] == ["torch"], "the CPU build, of its own lock file"
    assert all("--hash=sha256:" in package for package in packages["trainer"])
    (torch,) = (line for line in pins(packages["trainer"]).splitlines() if line.startswith("torch=="))
    assert torch.endswith("+cpu")
    assert "--hash" not in pins(packages["trainer"])


@pytest.mark.slow
def test_the_gpu_build_of_torch_brings_its_cuda_libraries() -> None:
    names = {name(package) for package in locked(["train"], cpu=False)}
    assert any(n.startswith("nvidia-") for n in names)


def test_everything_that_the_images_hold_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", *APP], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {path.split("/")[0] for path in listed} == set(APP)
    assert set(provenance.LOCKS) <= set(APP), "without one of them, no job can record its dependencies"


def test_the_dockerfile_fetches_no_python_package_and_ends_as_an_ordinary_user() -> None:
    simple = re.split(r"&&|\n", DOCKERFILE.replace("\\\n", " "))
    pip = [command for command in simple if "/opt/pip/bin/pip" in command]
    assert len(pip) == 3
    assert all(" install --no-index --no-deps " in command for command in pip)
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "RUN" not in final
    assert "wheels" not in final, "the build's files stay in its stage"
    assert re.search(r"^USER 10001:10001$", final, flags=re.MULTILINE)


def test_the_base_is_an_argument() -> None:
    assert re.search(r"^ARG BASE=\S+\nFROM \$\{BASE\} AS python$", DOCKERFILE, flags=re.MULTILINE)
    assert len(re.findall(r"^FROM python", DOCKERFILE, flags=re.MULTILINE)) == 2
