"""The lock files: every file of every package by its sha256, nothing of the machine that wrote them, and versions that stay."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.lock import CPU, CUDA, LOCK, ROOT, packages_of, resolve

PROJECT = """
[project]
name = "p"
version = "0"
requires-python = ">=3.11,<3.12"
dependencies = ["six>=1.16"]
[project.optional-dependencies]
data = []
dev = []
train = ["torch==2.13.0"]
"""


@pytest.mark.parametrize("name", [LOCK, CUDA])
def test_every_package_of_the_lock_files_has_hashes_and_no_place(name: str) -> None:
    packages = packages_of((ROOT / name).read_text())
    assert len(packages) > 10
    assert [p.splitlines()[0] for p in packages if not re.search(r"--hash=sha256:[0-9a-f]{64}", p)] == []
    assert [p.splitlines()[0] for p in packages if not re.match(r"[A-Za-z0-9._-]+==[^\s+]+ \\\n", p) and " ; " not in p] == []
    assert "://" not in "".join(packages) and "file:" not in "".join(packages)


def test_make_setup_installs_with_hashes_required() -> None:
    """As the Makefile of this machine calls uv, but without changing anything."""
    (install,) = (line for line in setup_commands() if "--requirement requirements.lock" in line)
    assert "--require-hashes" in install
    env = {**os.environ, "UV_FIND_LINKS": find_links()}
    done = subprocess.run([*install.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


def test_make_setup_takes_nothing_without_a_hash_from_an_index(tmp_path: Path) -> None:
    commands = setup_commands()
    installs = [line for line in commands if "pip install" in line]
    assert len(installs) == 3
    for line in installs:
        assert "--require-hashes" in line or {"--no-deps", "--no-build-isolation", "--editable"} < set(line.split()), line
    (choose,) = (line for line in commands if line.startswith("sed "))
    subprocess.run(choose.replace(".venv/uv.lock", str(tmp_path / "uv.lock")), shell=True, cwd=ROOT, check=True)
    locked = packages_of((ROOT / LOCK).read_text())
    assert (tmp_path / "uv.lock").read_text() == next(package for package in locked if package.startswith("uv=="))
    assert any(package.startswith("setuptools==") for package in locked), "our own build needs it"


def setup_commands() -> list[str]:
    """What ``make setup`` runs on a machine without an environment."""
    command = ["make", "--dry-run", "--always-make", "setup"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def find_links() -> str:
    """Where pip finds further wheels on this machine."""
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False)
    return os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or asked.stdout.strip()


@pytest.mark.slow
def test_torch_has_the_hashes_of_both_builds_and_pinned_versions_stay(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"a build for CPUs")
    ours = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / LOCK).write_text("six==1.16.0\n")  # as somebody adds a package by hand
    resolve(tmp_path, str(wheels))
    lock, cuda = ((tmp_path / name).read_text() for name in (LOCK, CUDA))
    torch = next(p for p in packages_of(lock) if p.startswith("torch==2.13.0 "))
    assert ours in torch and torch.count("--hash") > 2, "the wheel here, and those of the index"
    assert (tmp_path / CPU).read_text() == f"torch==2.13.0+cpu \\\n    --hash=sha256:{ours}\n"
    assert any(p.startswith("six==1.16.0 \\\n    --hash") for p in packages_of(lock))
    assert "nvidia-" in cuda and "nvidia-" not in lock
    assert str(tmp_path) not in lock + cuda
    wheel.unlink()
    resolve(tmp_path, str(wheels))
    assert (tmp_path / LOCK).read_text() == lock, "where there is no such wheel, its hash stays"
    other = "0" * 64
    (tmp_path / CPU).write_text(f"torch==2.12.0+cpu \\\n    --hash=sha256:{other}\n")
    resolve(tmp_path, str(wheels))
    assert other not in (tmp_path / LOCK).read_text() + (tmp_path / CPU).read_text(), "the hash of another version does not"
