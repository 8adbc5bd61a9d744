"""Chooses the files of a Hub repository that make up a split: by its card's ``configs``, by names, or by the requested path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from core import yaml_files
from core.errors import InvalidRequest, NotFound

DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.zst)?\Z", re.IGNORECASE)
NO_DATA = re.compile(r"(?:^|/)(?:\.[^/]*|dataset_infos?\.json|state\.json|config\.json|package(?:-lock)?\.json)(?:/|\Z)")
"""Hidden files, and JSON metadata without rows."""
SHARD = re.compile(r"(?:^|/)([\w.]+)-\d{5}-of-\d{5}\.")
"""``data/train_sft-00000-of-00002.parquet``: the naming scheme of the library that writes it."""
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in paths that name a split, as on the Hub itself."""
MAX_PATTERN_CHARS = 512
"""Length of a card's file pattern; a path of ten folders is shorter."""
MAX_COMPARISONS = 1_000_000
"""Comparisons of files with a card's patterns: 100 patterns in a repository of 10,000 files."""
FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)


def pick(paths: Sequence[str], readme: str, *, config: str | None, path: str | None, split: str) -> list[str]:
    """Returns the files of `split` in order. If none or too many match, raises with the choices."""
    data = sorted(p for p in paths if DATA_FILE.search(p) and not NO_DATA.search(p))
    if path is not None:
        if path not in paths:
            raise NotFound(f"the repository has no file {path}; it has {_some(data)}", code="hub_split_not_found")
        return [path]
    if not data:
        raise NotFound("the repository holds no JSONL, JSON, CSV or Parquet file", code="hub_split_not_found")
    splits = _by_card(data, _card_configs(readme), config)
    if splits is None:
        splits = _by_name(_of_config(data, config))
    if split not in splits:
        raise NotFound(f"unknown split {split!r}; available: {', '.join(sorted(splits))}", code="hub_split_not_found")
    found = splits[split]
    kinds = {_kind(p) for p in found}
    folders = {p.rpartition("/")[0] for p in found}
    if len(kinds) > 1 or (len(folders) > 1 and config is None and not _card_configs(readme)):
        raise InvalidRequest(
            f"split {split!r} could be any of {_some(found)}; name one file as in hf://ORG/NAME@REVISION/{found[0]}, or a folder",
            code="hub_files_ambiguous",
        )
    return found


def _kind(path: str) -> str:
    match = DATA_FILE.search(path)
    return match.group(0).lower().replace("ndjson", "jsonl") if match else ""


def _of_config(data: Sequence[str], config: str | None) -> list[str]:
    """Returns the files below a folder named like the configuration."""
    if config is None:
        return list(data)
    found = [p for p in data if p.startswith((f"{config}/", f"data/{config}/"))]
    if not found:
        folders = sorted({p.rpartition("/")[0] for p in data if "/" in p})
        raise NotFound(f"unknown configuration {config!r}; available: {_some(folders) or 'none'}", code="hub_split_not_found")
    return found


def _by_name(data: Iterable[str]) -> dict[str, list[str]]:
    """Returns the splits named by files and folders; files that name none are ``train`` if no other file is."""
    splits: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for path in data:
        shard = SHARD.search(path)
        words = re.split(r"[^a-z]+", path.lower())
        named = shard.group(1) if shard else next((s for s, names in SPLIT_WORDS.items() if set(names) & set(words)), None)
        if named is None:
            unnamed.append(path)
        else:
            splits.setdefault(named, []).append(path)
    return splits or {"train": unnamed}


def _by_card(data: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None) -> dict[str, list[str]] | None:
    """Returns the splits that the dataset card declares; None for a card that declares no files."""
    configs = [c for c in configs if c.get("data_files") or c.get("data_dir")]
    if not configs:
        return None
    names = [str(c.get("config_name", "default")) for c in configs]
    chosen = [c for c, name in zip(configs, names, strict=True) if name == config]
    if config is None:
        chosen = [c for c, name in zip(configs, names, strict=True) if c.get("default") or name == "default" or len(configs) == 1]
        if not chosen:
            message = f"the dataset has the configurations {', '.join(names)}; name one as in hf://ORG/NAME@REVISION/{names[0]}"
            raise InvalidRequest(message, code="hub_files_ambiguous")
    if not chosen:
        raise NotFound(f"unknown configuration {config!r}; available: {', '.join(names)}", code="hub_split_not_found")
    folder = str(chosen[0].get("data_dir") or "").strip("/")
    inside = [p for p in data if p.startswith(f"{folder}/")] if folder else list(data)
    files = chosen[0].get("data_files")
    if not files:
        return _by_name(inside)
    entries = files if isinstance(files, list) else [files]
    splits: dict[str, list[str]] = {}
    known, compared = set(inside), 0
    for entry in entries:
        split, patterns = (str(entry.get("split", "train")), entry.get("path")) if isinstance(entry, dict) else ("train", entry)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            full = f"{folder}/{pattern}" if folder else str(pattern)
            if not any(c in full for c in "*?"):
                splits.setdefault(split, []).extend({full.removeprefix("./")} & known)
                continue
            compared += len(inside)
            if compared > MAX_COMPARISONS:
                message = f"the dataset card has too many patterns for {len(inside)} files; name one as in hf://ORG/NAME@REVISION/{data[0]}"
                raise InvalidRequest(message, code="hub_files_ambiguous")
            splits.setdefault(split, []).extend(_matching(full, inside))
    return {split: sorted(dict.fromkeys(found)) for split, found in splits.items() if found} or None


def _card_configs(readme: str) -> list[Mapping[str, Any]]:
    match = FRONT_MATTER.match(readme)
    if not match:
        return []
    loader = yaml_files.SafeLoader
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(match.group(1), Loader=loader)):
            return []  # nested aliases can expand to gigabytes, and no card needs them
        front = yaml.load(match.group(1), Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    configs = front.get("configs") if isinstance(front, dict) else None
    return [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []


def _matching(pattern: str, paths: Sequence[str]) -> list[str]:
    """Returns the `paths` that match `pattern`: ``*`` within a folder, ``**`` as a folder for any number of them, ``?`` one character."""
    pattern = pattern.removeprefix("./")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidRequest(
            f"the dataset card has a pattern of {len(pattern)} characters, and at most {MAX_PATTERN_CHARS} are read; name one file",
            code="hub_files_ambiguous",
        )
    segments = pattern.split("/")
    return [p for p in paths if _matches(segments, p.split("/"), "**", _same_name)]


def _same_name(pattern: str, name: str) -> bool:
    return _matches(pattern, name, "*", lambda p, c: p in ("?", c))


def _matches(pattern: Sequence[str], items: Sequence[str], star: str, same: Callable[[str, str], bool]) -> bool:
    """Returns whether `items` match `pattern`, where `star` stands for any number of them.

    Only the last star is ever extended: every item is compared with every part of the pattern at most once.
    """
    part = item = given = 0
    last_star = -1
    while item < len(items):
        if part < len(pattern) and pattern[part] == star:
            last_star, given, part = part, item, part + 1
        elif part < len(pattern) and same(pattern[part], items[item]):
            part, item = part + 1, item + 1
        elif last_star >= 0:
            given += 1
            part, item = last_star + 1, given
        else:
            return False
    return all(rest == star for rest in pattern[part:])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
