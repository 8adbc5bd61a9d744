"""Builds the images of the control plane and of the trainer without a container registry: ``python -m tools.images [IMAGE ...]``.

Requires root, debootstrap and buildah. The images hold the committed files and the locked packages, on a base of Debian's packages, as
``deploy/docker/Dockerfile`` says. Each is written to ``build/images/<image>.tar`` (an OCI archive), and sizes and times to
``build/images/report.json``. torch is the CPU build if find-links has its wheel, as in ``make setup``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tools.lock import CPU, CUDA, LOCK, OF_CUDA, ROOT, packages_of

OUT = ROOT / "build" / "images"
EXTRAS = {"control-plane": (), "trainer": ("train",)}
"""Image -> optional dependencies in it."""
APP = (
    "agent", "control_plane", "core", "deploy", "docs", "engine", "examples", "ft_assets", "ft_client", "resources", "sensors",
    "dagster.yaml", "workspace.yaml", "pyproject.toml", "README.md", "LICENSE", LOCK, CPU, CUDA,
)  # fmt: skip
BASE = "localhost/ft-base:bookworm"
NAME = re.compile(r"[A-Za-z0-9._-]+")


def locked(extras: Iterable[str], *, cpu: bool, root: Path = ROOT) -> list[str]:
    """Return the locked packages, with hashes, that the project needs with `extras`, and no other of the lock files."""
    chosen = [argument for extra in extras for argument in ("--extra", extra)]
    command = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", "3.11", "--constraint", LOCK, *chosen]
    env = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}  # as for the lock: names, not local builds
    uv = str(Path(sys.executable).with_name("uv"))
    found = subprocess.run([uv, *command[1:], "pyproject.toml"], check=True, cwd=root, env=env, capture_output=True, text=True).stdout
    wanted = {name(line) for line in found.splitlines()}
    packages = packages_of((root / LOCK).read_text()) + ([] if cpu else packages_of((root / CUDA).read_text()))
    if cpu:
        packages = [p for p in packages if name(p) != "torch"] + packages_of((root / CPU).read_text())
        wanted = {n for n in wanted if not OF_CUDA.match(f"{n}==")}
    chosen_packages = [p for p in packages if name(p) in wanted]
    if missing := wanted - {name(p) for p in chosen_packages}:
        raise SystemExit(f"not in the lock files: {', '.join(sorted(missing))}; run `make lock`")
    return chosen_packages


def name(package: str) -> str:
    """Return the name of a package as in the lock file."""
    found = NAME.match(package)
    assert found, package
    return found[0].lower().replace("_", "-")


def pins(packages: Iterable[str]) -> str:
    """Return `packages` without hashes: the wheels were verified, and some were built here."""
    return "".join(package.partition(" \\\n")[0] + "\n" for package in packages)


def prepare_context(context: Path, commit: str, *, cpu: bool) -> None:
    """Put the files of `commit`, the wheels, and each image's packages into `context`."""
    shutil.rmtree(context / "app", ignore_errors=True)
    (context / "app").mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit, *APP], check=True, cwd=ROOT, capture_output=True).stdout
    subprocess.run(["tar", "--extract", "--no-same-owner", "--directory", context / "app"], check=True, input=archive)
    (context / "app" / "COMMIT").write_text(f"{commit}\n")  # with another commit, buildah reuses no step that reads it
    shutil.copy(ROOT / "deploy" / "docker" / "Dockerfile", context)
    for image, extras in EXTRAS.items():
        (context / f"{image}.txt").write_text(pins(locked(extras, cpu=cpu)))
    _wheels(context / "wheels", locked(["train"], cpu=cpu) + _build_tools())


def _build_tools() -> list[str]:
    return [p for p in packages_of((ROOT / LOCK).read_text()) if name(p) == "setuptools"]


def _wheels(directory: Path, packages: list[str]) -> None:
    """Fetch `packages`, each checked against its hash; those without a wheel are built here. Kept while the list is the same."""
    wanted = "".join(dict.fromkeys(packages))
    listed = directory.with_name("wheels.lock")
    if listed.exists() and listed.read_text() == wanted:
        return
    shutil.rmtree(directory, ignore_errors=True)
    draft = directory.with_name("wheels.lock.new")
    draft.write_text(wanted)
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--requirement", draft, "--wheel-dir", directory], check=True)
    draft.replace(listed)


def build_base(scratch: Path) -> None:
    """Create the image that the others start from, of Debian's packages. One that exists stays; `buildah rmi` it to update the packages."""
    if BASE in _run("buildah", "images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    shutil.rmtree(scratch, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", scratch)
    for cache in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(scratch / cache)
        (scratch / cache / "partial").mkdir(parents=True)
    container = _run("buildah", "from", "scratch")
    _run("buildah", "add", "--quiet", container, scratch, "/")
    _run("buildah", "commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(scratch)


def build(image: str, context: Path, commit: str) -> dict[str, object]:
    """Build `image` of `commit`, write its archive, and return its sizes and times."""
    tag, archive = f"localhost/ft-{image}:{commit[:12]}", OUT / f"{image}.tar"
    arguments = {"BASE": BASE, "IMAGE": image, "COMMIT": commit}
    began = time.monotonic()
    given = [part for key, value in arguments.items() for part in ("--build-arg", f"{key}={value}")]
    _run("buildah", "build", "--quiet", "--layers", *given, "--tag", tag, context)
    built = time.monotonic()
    archive.unlink(missing_ok=True)
    _run("buildah", "push", "--quiet", "--digestfile", OUT / f"{image}.digest", tag, f"oci-archive:{archive}:{tag}")
    layers = json.loads(_run("buildah", "inspect", "--type", "image", tag))["OCIv1"]["rootfs"]["diff_ids"]
    return {
        "image": tag,
        "digest": (OUT / f"{image}.digest").read_text().strip(),
        "layers": len(layers),
        "unpacked_mib": _unpacked_mib(tag),
        "compressed_mib": archive.stat().st_size >> 20,
        "build_s": round(built - began, 1),
        "compress_s": round(time.monotonic() - built, 1),
    }


def _unpacked_mib(tag: str) -> int:
    container = _run("buildah", "from", tag)
    try:
        return int(_run("du", "--summarize", "--one-file-system", "--block-size=1M", _run("buildah", "mount", container)).split()[0])
    finally:
        _run("buildah", "rm", container)


def _run(*command: str | Path) -> str:
    env = {"BUILDAH_ISOLATION": "chroot", **os.environ}  # needs no user namespaces
    try:
        return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, env=env).stdout.strip()
    except FileNotFoundError as e:
        raise SystemExit(f"{command[0]} is missing; install it (Debian: apt-get install debootstrap buildah)") from e


def main(images: list[str]) -> None:
    if unknown := set(images) - EXTRAS.keys():
        raise SystemExit(f"unknown image {', '.join(sorted(unknown))}; choose from {', '.join(EXTRAS)}")
    find_links = os.environ.get("UV_FIND_LINKS", "")
    context, commit = OUT / "context", _run("git", "-C", ROOT, "rev-parse", "HEAD")
    began = time.monotonic()
    prepare_context(context, commit, cpu=bool(find_links) and any(Path(find_links).glob("torch-*+cpu-*.whl")))
    prepared = time.monotonic()
    build_base(OUT / "base")
    report: dict[str, object] = {"context_s": round(prepared - began, 1), "base_s": round(time.monotonic() - prepared, 1), "images": []}
    report["images"] = [build(image, context, commit) for image in images or EXTRAS]
    (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print((OUT / "report.json").read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
