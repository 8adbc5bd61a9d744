"""Resolves the lock files, every package with the sha256 of its files: ``python -m tools.lock``.

Pinned versions that still fit pyproject.toml stay; to update a package, delete its line or the file. In ``requirements.lock`` torch has the
hashes of the index's builds and of the CPU wheel in find-links. ``requirements-cuda.lock`` holds what only the index's build needs.
``requirements-cpu.lock`` constrains torch to the CPU wheel, whose hash uv looks up by its whole version. No file names an index or a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK, CUDA, CPU = "requirements.lock", "requirements-cuda.lock", "requirements-cpu.lock"
LOCKED_EXTRAS = ("train", "data", "dev")
"""Without ``gguf``, which is compiled from source."""
OF_CUDA = re.compile(r"(nvidia|cuda)-|triton==")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def resolve(root: Path, find_links: str) -> None:
    """Rewrites the files of `root`; `find_links` is a directory of wheels, or empty."""
    packages = _compiled(root)
    torch = next(i for i, package in enumerate(packages) if package.startswith("torch=="))
    version = packages[torch].split()[0]
    cpu = _cpu_build(root, version, find_links)
    packages[torch] = _package(version, HASH.findall(packages[torch]) + HASH.findall(cpu))
    write(root / LOCK, (package for package in packages if not OF_CUDA.match(package)))
    write(root / CUDA, (package for package in packages if OF_CUDA.match(package)))
    write(root / CPU, [cpu])


def write(path: Path, packages: Iterable[str]) -> None:
    draft = path.with_name(f"{path.name}.new")
    draft.write_text("".join(packages))
    draft.replace(path)


def packages_of(text: str) -> list[str]:
    """Yields each package with the lines of its hashes."""
    return re.findall(r"^\S.*\n(?:[ \t]+.*\n)*", text, re.MULTILINE)


def _compiled(root: Path) -> list[str]:
    pinned = "".join((root / name).read_text() for name in (LOCK, CUDA) if (root / name).exists())
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / LOCK
        out.write_text(pinned)
        quiet = ("--quiet", "--no-emit-index-url", "--no-emit-find-links", "--no-annotate", "--no-header")
        command = [
            str(Path(sys.executable).with_name("uv")), "pip", "compile", *quiet, "--generate-hashes", "--python-version", "3.11",
            *(f"--extra={name}" for name in LOCKED_EXTRAS), "--output-file", str(out), str(root / "pyproject.toml"),
        ]  # fmt: skip
        env = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
        subprocess.run(command, check=True, cwd=root, env=env)
        return packages_of(out.read_text())


def _cpu_build(root: Path, version: str, find_links: str) -> str:
    """Returns the CPU build of `version` (``torch==...``) with its hash; if `find_links` has none, as it was in the file."""
    wheels = sorted(Path(find_links).glob(f"{version.replace('==', '-')}+cpu-*.whl")) if find_links else []
    if wheels:
        return _package(f"{version}+cpu", [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels])
    before = (root / CPU).read_text() if (root / CPU).exists() else ""
    return before if before.startswith(f"{version}+cpu ") else ""


def _package(version: str, hashes: Iterable[str]) -> str:
    return " \\\n    ".join([version, *(f"--hash=sha256:{digest}" for digest in sorted(set(hashes)))]) + "\n"


if __name__ == "__main__":
    resolve(ROOT, os.environ.get("UV_FIND_LINKS", ""))
