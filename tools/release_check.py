"""Runs the checklist of a release and prints each item with pass or fail: ``python -m tools.release_check``; exits with 1 if one fails.

Run it on the tagged commit. The version is that of ``pyproject.toml``: an image build, which has no .git, can read it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from tools import licences, lock, sbom
from tools.images import locked
from tools.lock import CPU, CUDA, HASH, LOCK, ROOT, packages_of

CHART = "deploy/helm/ft-platform/Chart.yaml"


class Failed(Exception):
    """Why an item of the checklist fails."""


def version_of(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def tree_is_clean(root: Path) -> str:
    changed = _run("git", "status", "--porcelain", cwd=root).splitlines()
    if changed:
        raise Failed(f"{len(changed)} uncommitted files, first {changed[0].strip()}; commit or remove them")
    return _run("git", "rev-parse", "--short", "HEAD", cwd=root)


def tag_is_the_version(root: Path) -> str:
    wanted, tags = f"v{version_of(root)}", _run("git", "tag", "--points-at", "HEAD", cwd=root).split()
    if wanted not in tags:
        raise Failed(f"HEAD has the tags {', '.join(tags) or '(none)'}, pyproject.toml wants {wanted}; git tag --sign {wanted}")
    return wanted


def changelog_has_the_version(root: Path) -> str:
    version, lines = version_of(root), (root / "CHANGELOG.md").read_text().splitlines()
    heading = next((line for line in lines if line.startswith(f"## {version} - ") or line == f"## {version}"), None)
    if heading is None:
        raise Failed(f'CHANGELOG.md has no heading "## {version} - DATE"; rename "## Unreleased"')
    return heading.removeprefix("## ")


def chart_has_the_version(root: Path) -> str:
    version, chart = version_of(root), yaml.safe_load((root / CHART).read_text())
    found = {field: str(chart[field]) for field in ("version", "appVersion")}
    if set(found.values()) != {version}:
        raise Failed(f"{CHART} has {found}, pyproject.toml {version}; set both fields")
    return version


def lock_has_hashes(root: Path) -> str:
    packages = [package for file in (LOCK, CUDA, CPU) for package in packages_of((root / file).read_text())]
    bare = [package.split()[0] for package in packages if not HASH.search(package)]
    if bare or not packages:
        raise Failed(f"{len(bare)} packages without a hash: {', '.join(bare[:5])}; run make lock")
    return f"{len(packages)} packages"


def lock_is_current(root: Path) -> str:
    """Resolve in a copy: what is pinned and still fits stays, so that equal files mean that nothing is missing."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in ("pyproject.toml", "README.md", "LICENSE", LOCK, CUDA, CPU):
            (copy / name).write_bytes((root / name).read_bytes())
        lock.resolve(copy, "")
        stale = [name for name in (LOCK, CUDA) if _names(copy / name) != _names(root / name)]
    if stale:
        raise Failed(f"{', '.join(stale)} do not follow from pyproject.toml; run make lock")
    return "follows from pyproject.toml"


def _names(file: Path) -> list[str]:
    """Return packages with versions: the hashes of torch depend on the wheels at hand."""
    return [package.split()[0] for package in packages_of(file.read_text())]


def licences_are_known(root: Path) -> str:
    if not licences.is_current(root):
        raise Failed(f"{licences.FILE} is not that of the lock; run python -m tools.licences")
    return licences.FILE


def bills_of_materials_build(_root: Path) -> str:
    with tempfile.TemporaryDirectory() as directory:
        return ", ".join(file.name for file in sbom.write(Path(directory)))


def docs_build(root: Path) -> str:
    with tempfile.TemporaryDirectory() as directory:
        _run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", directory, cwd=root)
        return f"{len(list(Path(directory).rglob('*.html')))} pages"


def wheel_works(root: Path) -> str:
    """Install the wheel with the control plane's locked packages into a new environment, and call it from elsewhere."""
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        _run(
            sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, root, cwd=scratch
        )
        (wheel,) = scratch.glob("*.whl")
        (scratch / "packages.txt").write_text("".join(locked((), cpu=False, root=root)))
        _run(uv, "venv", "--quiet", "--python", sys.executable, scratch / "venv", cwd=scratch)
        install = (uv, "pip", "install", "--quiet", "--python", scratch / "venv" / "bin" / "python")
        _run(*install, "--require-hashes", "--requirement", scratch / "packages.txt", cwd=scratch)
        _run(*install, "--no-deps", wheel, cwd=scratch)
        said, wanted = _run(scratch / "venv" / "bin" / "ft", "--version", cwd=scratch), f"ft {version_of(root)}"
        if said != wanted:
            raise Failed(f"ft --version prints {said!r}, not {wanted!r}")
        _run(scratch / "venv" / "bin" / "python", "-c", "import control_plane.api.app, ft_assets.definitions", cwd=scratch)
        return wheel.name


CHECKLIST: Mapping[str, Callable[[Path], str]] = {
    "tree is clean": tree_is_clean,
    "tag is the version": tag_is_the_version,
    "changelog has the version": changelog_has_the_version,
    "chart has the version": chart_has_the_version,
    "lock has hashes": lock_has_hashes,
    "lock is current": lock_is_current,
    "licences are known": licences_are_known,
    "bills of materials build": bills_of_materials_build,
    "docs build": docs_build,
    "wheel installs and runs": wheel_works,
}


def check(root: Path, items: Mapping[str, Callable[[Path], str]] = CHECKLIST) -> bool:
    """Print each item as it ends and return whether all passed. An item that breaks fails."""
    passed = True
    for name, item in items.items():
        try:
            outcome, detail = "pass", item(root)
        except (Failed, SystemExit, OSError, ValueError, KeyError) as error:
            outcome, detail, passed = "FAIL", str(error), False
        print(f"{outcome}  {name}: {detail}", flush=True)
    return passed


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode:
        raise Failed(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(0 if check(ROOT) else 1)
