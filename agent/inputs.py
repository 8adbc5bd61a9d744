"""The workload's inputs on this node: each file once, by its digest, whichever jobs of the tenant share it.

<node>/inputs/<tenant>/<sha256>        a file, read-only; of base models under ``.base_models``, which no tenant is called
<node>/jobs/<job>/inputs-a<N>/<name>/  hard links to them, under the names that the training process expects
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from agent.node_space import NodeFull, noticing_a_full_disk
from agent.objects import Objects
from core.durable_files import in_threads, mark_used, remove_unused, sha256_of
from core.errors import IntegrityError
from core.retries import RetryPolicy, with_retries
from core.workload import Input, InputFile
from engine.training import ARRIVING, TrainingSpec, arrival_order

SHARED = "base_models/"
"""Prefix of objects that belong to no tenant."""
RETRIES = RetryPolicy(give_up_s=300.0)
STREAM_RETRIES = RetryPolicy(give_up_s=3600.0)
"""Training goes on with what it has; starting it again elsewhere would not bring the store back."""


log = logging.getLogger(__name__)


class NodeInputs:
    """Puts an attempt's inputs into `target`; fetches what is missing or damaged in the node's `cache`, and verifies every byte.

    Errors: ``IntegrityError`` if the store has other bytes than the workload names, ``Unavailable`` if it does not answer, ``NodeFull`` if
    there is no space.
    """

    def __init__(self, objects: Objects, inputs: tuple[Input, ...], *, cache: Path, tenant: str, target: Path) -> None:
        self._objects, self._inputs, self._cache, self._tenant, self._target = objects, inputs, cache, tenant, target

    def stage(self, check: Callable[[], None]) -> dict[str, Path]:
        """Have all files that the process starts with, and return the directory of each input by its name.

        `check` is called before each file and may raise.
        """
        remove_unused(self._cache)
        for earlier in self._target.parent.glob("inputs-a*"):
            shutil.rmtree(earlier, ignore_errors=True)
        required = [each for each in self._inputs if not each.optional]
        self._have(required, check)
        found = required + [each for each in self._inputs if each.optional and self._has(each, check)]
        return {each.name: self._target / each.name for each in found}

    def stream(self, spec: TrainingSpec, step: int, *, make_room: Callable[[], None]) -> Stream:
        """Begin to fetch the later files in the order in which a training that continues after `step` steps reads them."""
        pending: list[tuple[str, InputFile]] = []
        for each in self._inputs:
            if each.later:
                packs = {
                    directory: json.loads((self._target / each.name / directory / "manifest.json").read_text())["shards"]
                    for _, directory in spec.packs
                }
                order = arrival_order(spec, *([shard["num_windows"] for shard in shards] for shards in packs.values()), step=step)
                paths = [str(PurePosixPath(directory, shard["name"])) for directory, shards in packs.items() for shard in shards]
                rank = {paths[number]: position for position, number in enumerate(order)}
                pending += [(each.name, file) for file in sorted(each.later, key=lambda file: rank[file.path])]

        def put(pair: tuple[str, InputFile]) -> None:
            try:
                self._put(*pair, STREAM_RETRIES)
            except NodeFull:
                make_room()
                self._put(*pair, STREAM_RETRIES)

        return Stream(put, pending, [self._target / name / ARRIVING for name in dict.fromkeys(name for name, _ in pending)])

    def _has(self, each: Input, check: Callable[[], None]) -> bool:
        try:
            self._have([each], check)
        except IntegrityError as error:
            log.warning("%s is not usable, and is made again: %s", each.name, error.message)
            return False
        return True

    def _have(self, inputs: Sequence[Input], check: Callable[[], None]) -> None:
        for each in inputs:
            (self._target / each.name).mkdir(parents=True)

        def put(pair: tuple[str, InputFile]) -> None:
            check()
            self._put(*pair, RETRIES)

        in_threads(put, [(each.name, file) for each in inputs for file in each.files])

    def _put(self, name: str, file: InputFile, retries: RetryPolicy) -> None:
        owner = ".base_models" if file.key.startswith(SHARED) else self._tenant
        target = self._target / name / _inside(file.path)
        with noticing_a_full_disk():
            try:
                link(self._cached(file, self._cache / owner, retries), target)
            except FileNotFoundError:  # another job of this node removed it before it was linked, to make space
                link(self._cached(file, self._cache / owner, retries), target)

    def _cached(self, file: InputFile, directory: Path, retries: RetryPolicy) -> Path:
        """Return the file in the node's cache, verified; fetched at most twice, because the way here may have damaged it."""
        path = directory / file.sha256
        for attempt in range(3):
            if path.is_file():
                mark_used(path)
                if sha256_of(path) == file.sha256:
                    return path
            if attempt < 2:
                path.unlink(missing_ok=True)
                with_retries(lambda: fetch(self._objects, file.key, path), retries)
                path.chmod(0o444)
        path.unlink(missing_ok=True)
        raise IntegrityError(f"object {file.key} is not the one that the job was to be trained on", code="input_changed")


class Stream:
    """Files that arrive one by one while the process runs, which waits for them as long as the `markers` exist.

    One at a time is enough: training reads 8 bytes per token, a hundredth of what a store sends.
    """

    def __init__(
        self, put: Callable[[tuple[str, InputFile]], None], pending: Sequence[tuple[str, InputFile]], markers: Sequence[Path]
    ) -> None:
        self.error: Exception | None = None
        """Why the rest will not arrive."""
        self._put, self._pending, self._markers = put, pending, markers
        self._closed = threading.Event()
        for marker in markers:
            marker.touch()
        threading.Thread(target=self._run, name="inputs", daemon=True).start()

    def close(self) -> None:
        """Begin no further file."""
        self._closed.set()

    def _run(self) -> None:
        for pair in self._pending:
            if self._closed.is_set():
                return
            try:
                self._put(pair)
            except Exception as error:
                self.error = error
                return
        for marker in self._markers:
            marker.unlink(missing_ok=True)


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
