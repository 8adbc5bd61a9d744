"""Lists the capability suites: task definitions of lm-evaluation-harness, read without importing it.

Shipped ones are in ``tasks/``, an operator's in the directories of ``FT_EVAL_TASKS``; of two with the same name the later counts. A
definition is *ready* if its rows are on disk: evaluations download nothing. Definitions may name Python functions, which the evaluation
process imports: the operator must trust such a directory, so tenants choose suites by name and cannot bring their own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from core import yaml_files
from core.errors import InvalidRequest
from core.typed_json import JsonObject
from engine.evals.tasks import files

BUILDERS = frozenset({"json", "csv", "parquet", "text", "arrow"})
"""Values of ``dataset_path`` that read files; any other is a name on a hub."""
UNKNOWN = "capability_suite_unknown"
LARGEST_LISTED = 1 << 28
"""Bytes of a text file above which its rows are not counted for a list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A task or a group of tasks as written in its file, with its includes merged."""

    name: str
    path: Path
    config: Mapping[str, Any]
    """Functions are texts here."""
    error: str | None = None
    """Why the file cannot be read."""

    @property
    def is_group(self) -> bool:
        return "group" in self.config

    @property
    def metadata(self) -> Mapping[str, Any]:
        found = self.config.get("metadata")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A suite as listed for users."""

    name: str
    version: str | None
    num_fewshot: int | None
    """Examples before each question; None for a group whose tasks define it themselves."""
    num_items: int | None
    """Rows of its test files; None if unknown before loading."""
    output: str | None
    """``multiple_choice``, ``generate_until``, ``loglikelihood`` or ``loglikelihood_rolling``."""
    shipped: bool
    ready: bool
    reason: str | None
    """Why it is not ready."""


def find(task_dirs: Sequence[Path]) -> dict[str, Definition]:
    """Returns every definition by name: shipped ones, then those of `task_dirs`."""
    found: dict[str, Definition] = {}
    for root in (files.SHIPPED, *task_dirs):
        found |= {definition.name: definition for definition in _definitions(root)}
    return found


def list_suites(task_dirs: Sequence[Path], data_dir: Path | None) -> list[Listed]:
    """Returns suites that a job may name, sorted by name; members of a group are not listed beside it."""
    definitions = find(task_dirs)
    members = {task for d in definitions.values() if d.is_group for task in _named_members(d)}
    return [_listed(d, definitions, data_dir) for name, d in sorted(definitions.items()) if name not in members]


def check_suites(names: Sequence[str], task_dirs: Sequence[Path], data_dir: Path | None) -> None:
    """Refuses a suite that is unknown or not ready, before a job that names it costs anything."""
    definitions = find(task_dirs)
    for name in names:
        if name not in definitions:
            raise InvalidRequest(
                f"unknown capability suite {name!r}; known: {', '.join(sorted(definitions))}",
                code=UNKNOWN,
                param="eval_config.capability",
            )
        if reason := why_not(definitions[name], definitions, data_dir):
            raise InvalidRequest(f"capability suite {name!r} is not ready: {reason}", code=files.NOT_READY, param="eval_config.capability")


def why_not(definition: Definition, definitions: Mapping[str, Definition], data_dir: Path | None) -> str | None:
    """Returns why a suite cannot run; None if it can."""
    if definition.error:
        return definition.error
    try:
        for task in leaves(definition, definitions):
            for _ in _data_files(task, data_dir):
                pass
    except InvalidRequest as e:
        return e.message
    return None


def suite_data_files(names: Sequence[str], task_dirs: Sequence[Path], data_dir: Path | None) -> set[Path]:
    """Returns the files in `data_dir` that the suites `names` read."""
    definitions = find(task_dirs)
    tasks = (task for name in names for task in leaves(definitions[name], definitions))
    found = (path for task in tasks for _, path in _data_files(task, data_dir))
    return {path for path in found if data_dir is not None and path.is_relative_to(data_dir)}


def add_suite_rows(name: str, split: str, source: Path, *, task_dirs: Sequence[Path], data_dir: Path | None) -> tuple[Path, int]:
    """Copies an operator's file of a suite's rows to where the suite reads it; returns that place and the number of rows.

    Replaces an earlier file. Raises ``InvalidRequest`` for a suite or split that reads no such file, and for a file of another form.
    """
    definitions = find(task_dirs)
    if name not in definitions:
        raise InvalidRequest(f"unknown capability suite {name!r}; known: {', '.join(sorted(definitions))}", code=UNKNOWN, param="name")
    metadata = definitions[name].metadata
    named, wanted = metadata.get("files") or {}, frozenset(metadata.get("columns") or ())
    if not str(next(leaves(definitions[name], definitions)).config.get("custom_dataset") or "").endswith("files.operator"):
        raise InvalidRequest(f"capability suite {name!r} has its own rows", code=files.NOT_READY, param="name")
    if split not in named:
        raise InvalidRequest(f"{name} has no split {split!r}; it has {', '.join(named)}", code=files.NOT_READY, param="split")
    if data_dir is None:
        raise files.no_directory(named)
    if source.suffix not in files.ENDINGS:
        raise InvalidRequest(f"{source.name} is neither {' nor '.join(files.ENDINGS)}", code=files.NOT_READY, param="file")
    try:
        missing = wanted - files.columns(source)
    except (ValueError, OSError, pa.ArrowException) as e:
        raise InvalidRequest(f"{source} cannot be read: {e}", code=files.NOT_READY, param="file") from e
    if missing:
        message = f"{source} has no column {', '.join(sorted(missing))}; take the published file of {name}"
        raise InvalidRequest(message, code=files.NOT_READY, param="file")
    target = data_dir / f"{named[split]}{source.suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, beside)
    beside.replace(target)
    for ending in set(files.ENDINGS) - {source.suffix}:
        target.with_suffix(ending).unlink(missing_ok=True)
    return target, files.num_rows(target)


def leaves(definition: Definition, definitions: Mapping[str, Definition]) -> Iterator[Definition]:
    """Returns the tasks of a group, at any depth; of a task, itself."""
    if definition.error:
        raise InvalidRequest(definition.error, code=files.NOT_READY)
    if not definition.is_group:
        yield definition
        return
    shared = {k: v for k, v in definition.config.items() if k not in {"group", "task", "metadata"}}
    for member in _members(definition):
        name = member.get("task") or member.get("group")
        if not isinstance(name, str):
            yield from leaves(
                Definition(name=definition.name, path=definition.path, config={**member, "group": definition.name}), definitions
            )
        elif known := definitions.get(name):
            yield from leaves(known, definitions)
        else:
            yield Definition(name=name, path=definition.path, config={**shared, **member})


def _members(group: Definition) -> list[JsonObject]:
    listed = group.config.get("task")
    found = listed if isinstance(listed, list) else [listed] if listed else []
    return [member if isinstance(member, dict) else {"task": member} for member in found]


def _named_members(group: Definition) -> Iterator[str]:
    for member in _members(group):
        if isinstance(name := member.get("task") or member.get("group"), str):
            yield name


def _listed(definition: Definition, definitions: Mapping[str, Definition], data_dir: Path | None) -> Listed:
    reason = why_not(definition, definitions, data_dir)
    version = definition.metadata.get("version")
    config = definition.config
    return Listed(
        name=definition.name,
        version=None if version is None else str(version),
        num_fewshot=config.get("num_fewshot", None if definition.is_group else 0),
        num_items=None if reason else _num_items(definition, definitions, data_dir),
        output=config.get("output_type"),
        shipped=definition.path.is_relative_to(files.SHIPPED),
        ready=reason is None,
        reason=reason,
    )


def _num_items(definition: Definition, definitions: Mapping[str, Definition], data_dir: Path | None) -> int | None:
    """Counts the rows of the distinct files of the evaluated split: subjects of one file are counted once."""
    tested: set[Path] = set()
    for task in leaves(definition, definitions):
        split = task.config.get("test_split") or task.config.get("validation_split")
        paths = [path for name, path in _data_files(task, data_dir) if name == split]
        if not paths or any(path.suffix not in files.ENDINGS or path.stat().st_size > LARGEST_LISTED for path in paths):
            return None
        tested |= set(paths)
    return sum(files.num_rows(path) for path in tested)


def _data_files(task: Definition, data_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """Returns ``(split, file)`` of a task's rows if all exist; none if the task's own Python provides them."""
    source, named = str(task.config.get("custom_dataset") or ""), task.metadata.get("files")
    if source.endswith("engine.evals.tasks.files.operator") and isinstance(named, dict):
        if data_dir is None:
            raise files.no_directory(named)
        yield from ((split, files.existing(data_dir / name)) for split, name in named.items())
    elif source.endswith("engine.evals.tasks.files.shipped") and isinstance(named, dict):
        yield from ((split, files.existing(files.SHIPPED / name)) for split, name in named.items())
    elif not source and "class" not in task.config:
        yield from _builder_files(task)


def _builder_files(task: Definition) -> Iterator[tuple[str, Path]]:
    dataset = str(task.config.get("dataset_path"))
    if dataset not in BUILDERS:
        if Path(dataset).is_dir():
            return
        message = (
            f"task {task.name} reads the dataset {dataset!r} of a hub, and evaluations fetch nothing; use dataset_path: json and data_files"
        )
        raise InvalidRequest(message, code=files.NOT_READY)
    for split, path in absolute_files(task.config, task.path.parent).items():
        if not path.is_file():
            raise InvalidRequest(f"task {task.name}: {path} does not exist", code=files.NOT_READY)
        yield split, path


def absolute_files(config: Mapping[str, Any], directory: Path) -> dict[str, Path]:
    """Returns ``data_files`` by split; a relative name is beside the definition."""
    named = (config.get("dataset_kwargs") or {}).get("data_files") or {}
    by_split = named if isinstance(named, dict) else {"train": named}
    if any(not isinstance(name, str) or "://" in name for name in by_split.values()):
        raise InvalidRequest(f"data_files {named!r} are not one local file for each split", code=files.NOT_READY)
    return {split: directory / name for split, name in by_split.items()}


class _Loader(yaml_files.SafeLoader):
    """Parses ``!function module.name`` as a text."""


def _named_function(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("!function", _named_function)


def _definitions(root: Path) -> Iterator[Definition]:
    for path in sorted(root.glob("**/*.yaml")):
        try:
            config = _config(path, ())
        except (yaml.YAMLError, OSError, ValueError, UnicodeDecodeError) as e:
            yield Definition(name=path.stem, path=path, config={}, error=f"{path} cannot be read: {' '.join(str(e).split())}")
            continue
        name = config.get("group") or config.get("task")
        if isinstance(name, str):
            yield Definition(name=name, path=path, config=config)


def _config(path: Path, seen: tuple[Path, ...]) -> JsonObject:
    if path in seen:
        raise ValueError(f"{path} includes itself")
    stat = path.stat()
    config = _parsed(path, stat.st_mtime_ns, stat.st_size)
    included = config.get("include") or []
    merged: dict[str, object] = {}
    for name in included if isinstance(included, list) else [included]:
        merged |= {k: v for k, v in _config(path.parent / str(name), (*seen, path)).items() if k != "task_list"}
    return merged | {k: v for k, v in config.items() if k != "include"}


@lru_cache(maxsize=1024)
def _parsed(path: Path, _changed_ns: int, _bytes: int) -> Mapping[str, Any]:
    """Reads a file again once it has changed: every submission asks for the definitions."""
    with path.open(encoding="utf-8") as text:
        config = yaml.load(text, Loader=_Loader)
    if not isinstance(config, dict):
        raise ValueError("not a mapping")
    return config
