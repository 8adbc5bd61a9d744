"""The workload's inputs on this node: each file once, by its digest, whichever jobs of the tenant share it.

<node>/inputs/<tenant>/<sha256>        a file, read-only; of base models under ``.base_models``, which no tenant is called
<node>/jobs/<job>/inputs-a<N>/<name>/  hard links to them, under the names that the training process expects
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from agent.node_space import noticing_a_full_disk
from agent.objects import Objects
from agent.workload import Input, InputFile
from ft_assets.durable_files import in_threads, sha256_of
from ft_assets.errors import IntegrityError
from ft_assets.retries import RetryPolicy, with_retries

SHARED = "base_models/"
"""Prefix of objects that belong to no tenant."""
RETRIES = RetryPolicy(give_up_s=300.0)


def stage_in(
    objects: Objects, inputs: tuple[Input, ...], *, cache: Path, tenant: str, target: Path, check: Callable[[], None]
) -> dict[str, Path]:
    """Fetch what is missing or damaged on this node, verify every byte, and return the directory of each input by its name.

    `check` is called before each file and may raise. ``IntegrityError`` if the store has other bytes than the workload names,
    ``Unavailable`` if it does not answer, ``NodeFull`` if there is no space.
    """
    for earlier in target.parent.glob("inputs-a*"):
        shutil.rmtree(earlier, ignore_errors=True)
    for each in inputs:
        (target / each.name).mkdir(parents=True)
    files = [(target / each.name, file) for each in inputs for file in each.files]

    def stage(target: Path, file: InputFile) -> None:
        check()
        with noticing_a_full_disk():
            link(_cached(objects, file, cache / _owner(file, tenant)), target / _inside(file.path))

    in_threads(lambda pair: stage(*pair), files)
    return {each.name: target / each.name for each in inputs}


def _owner(file: InputFile, tenant: str) -> str:
    return ".base_models" if file.key.startswith(SHARED) else tenant


def _cached(objects: Objects, file: InputFile, directory: Path) -> Path:
    """Return the file in the node's cache, verified; fetched at most twice, because the way here may have damaged it."""
    path = directory / file.sha256
    for attempt in range(3):
        if path.is_file() and sha256_of(path) == file.sha256:
            return path
        if attempt < 2:
            path.unlink(missing_ok=True)
            with_retries(lambda: fetch(objects, file.key, path), RETRIES)
            path.chmod(0o444)
    path.unlink(missing_ok=True)
    raise IntegrityError(f"object {file.key} is not the one that the job was to be trained on", code="input_changed")


def fetch(objects: Objects, key: str, path: Path) -> None:
    with noticing_a_full_disk():
        objects.fetch(key, path)


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    os.link(source, target)


def _inside(path: str) -> str:
    """Return a relative path that stays inside its directory."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise IntegrityError(f"input file {path!r} leaves its directory")
    return path
