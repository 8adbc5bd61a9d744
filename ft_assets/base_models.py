"""The catalogue of base models: which bytes an id means, and what they can take.

An id stands for pinned bytes. ``digest`` covers weights, config, tokenizer and template, so an adapter can be tied to
exactly what it was trained on; it is computed from the files of a local model, or pinned in the catalogue, and if both
exist they must agree. It is never null: a model whose bytes are unknown cannot be looked up at all.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from ft_assets.errors import IntegrityError, InvalidRequest, NotFound, Unavailable

BUILTIN = Path(__file__).with_name("base_models.yaml")
REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
CONFIG_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PINNED = ("repo", "revision", "digest", "tokenizer_digest", "template_digest", "context_length", "num_parameters")
"""Fields that a model without files on this machine must state."""
FIELDS = frozenset(("id", "path", "license", "deprecated_since", *PINNED))


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    id: str
    repo: str
    """Hub repository, or ``local``."""
    revision: str
    """Pinned commit of `repo`; of a local model the first 40 digits of its digest."""
    digest: str
    """sha256 over weights, config, tokenizer and template (see :func:`model_digest`)."""
    tokenizer_digest: str
    template_digest: str
    license: str
    context_length: int
    """Tokens in one example at most (``max_position_embeddings``)."""
    num_parameters: int
    deprecated_since: dt.date | None
    """Refused at submission from this day on; running jobs finish."""
    directory: Path | None
    """Where the files lie on this machine; None when they are only known by digest."""


class Catalogue:
    """Base models by id, from YAML files; entries are resolved (and their files hashed) when they are asked for."""

    def __init__(self, entries: Mapping[str, tuple[Mapping[str, Any], Path]]) -> None:
        self._entries = dict(entries)

    @classmethod
    def load(cls, extra: Iterable[Path] = ()) -> Self:
        """The built-in catalogue, then each of `extra`; a later file replaces an id of an earlier one."""
        entries: dict[str, tuple[Mapping[str, Any], Path]] = {}
        for file, root in [(BUILTIN, REPOSITORY_ROOT), *((f, f.absolute().parent) for f in extra)]:
            for entry in _read_entries(file):
                entries[entry["id"]] = (entry, root)
        return cls(entries)

    def ids(self) -> list[str]:
        return sorted(self._entries)

    def get(self, model_id: str) -> BaseModel:
        """The model called `model_id`; ``NotFound`` names the known ids, ``Unavailable`` the missing directory."""
        found = self._entries.get(model_id)
        if found is None:
            known = ", ".join(self.ids()) or "none"
            raise NotFound(
                f"base model {model_id[:80]!r} is not in the catalogue; choose one of: {known}", code="model_not_found", param="model"
            )
        return _resolve(*found)

    def check_submittable(self, model_id: str, *, today: dt.date) -> BaseModel:
        """:meth:`get`, refusing a model that is deprecated on `today`."""
        model = self.get(model_id)
        if model.deprecated_since is not None and model.deprecated_since <= today:
            raise InvalidRequest(
                f"base model {model.id!r} is deprecated since {model.deprecated_since}; choose another one of: {', '.join(self.ids())}",
                code="model_deprecated",
                param="model",
            )
        return model


def _read_entries(file: Path) -> list[dict[str, Any]]:
    try:
        body = yaml.safe_load(file.read_text())
    except OSError as error:
        raise Unavailable(f"base model catalogue {file} cannot be read ({error.strerror}); check FT_BASE_MODELS") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"base model catalogue {file} is not valid YAML: {error}", code="invalid_catalogue") from error
    models = body.get("models") if isinstance(body, dict) else None
    if not isinstance(models, list):
        raise InvalidRequest(f"base model catalogue {file} needs a top-level list 'models'", code="invalid_catalogue")
    for entry in models:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            raise InvalidRequest(f"base model catalogue {file}: each model needs a text 'id', got {entry!r}", code="invalid_catalogue")
        if unknown := set(entry) - FIELDS:
            raise InvalidRequest(
                f"base model catalogue {file}: {entry['id']} has unknown fields {sorted(unknown)}; known are {sorted(FIELDS)}",
                code="invalid_catalogue",
            )
    return models


def _resolve(entry: Mapping[str, Any], root: Path) -> BaseModel:
    if "path" in entry:
        return _resolve_local(entry, root / entry["path"])
    if missing := [k for k in PINNED if not entry.get(k)]:
        raise InvalidRequest(
            f"base model {entry['id']} has no 'path', so its bytes must be pinned: add {', '.join(missing)} to the catalogue",
            code="invalid_catalogue",
        )
    return BaseModel(
        directory=None,
        license=str(entry.get("license") or "unknown"),
        deprecated_since=entry.get("deprecated_since"),
        **{k: entry[k] for k in ("id", *PINNED)},
    )


def _resolve_local(entry: Mapping[str, Any], directory: Path) -> BaseModel:
    if not (directory / "config.json").is_file():
        raise Unavailable(f"base model {entry['id']} has no config.json in {directory}; fetch or build it there, or correct 'path'")
    digest = model_digest(directory)
    digests = {"digest": digest, "tokenizer_digest": tokenizer_digest(directory), "template_digest": template_digest(directory)}
    for name, actual in digests.items():
        if entry.get(name) and entry[name] != actual:
            raise IntegrityError(
                f"base model {entry['id']}: {name} of {directory} is {actual}, but the catalogue pins {entry[name]}; "
                "restore the files or pin the new digest on purpose"
            )
    config = _json_object(directory / "config.json")
    context_length = entry.get("context_length") or config.get("max_position_embeddings")
    if not context_length:
        raise InvalidRequest(
            f"base model {entry['id']}: config.json has no max_position_embeddings; add context_length", code="invalid_catalogue"
        )
    return BaseModel(
        id=entry["id"],
        repo=str(entry.get("repo") or "local"),
        revision=str(entry.get("revision") or digest[:40]),
        license=str(entry.get("license") or "unknown"),
        context_length=int(context_length),
        num_parameters=int(entry.get("num_parameters") or count_parameters(directory)),
        deprecated_since=entry.get("deprecated_since"),
        directory=directory,
        **digests,
    )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model; a model that has only pickled weights, or wants code of its own, is refused."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
        raise InvalidRequest(
            f"{directory} has no *.safetensors{f' (only {pickled[0]})' if pickled else ''}; pickled weights can run code and are "
            "never loaded: convert them to safetensors",
            code="unsafe_weights",
        )
    if "auto_map" in _json_object(directory / "config.json"):
        raise InvalidRequest(f"{directory}/config.json asks for code of its own (auto_map), which is never run", code="remote_code")
    return files


def model_digest(directory: Path) -> str:
    """sha256 over the sorted (name, sha256) of weights, config, tokenizer and template files that exist."""
    files = [*weight_files(directory), *(p for name in CONFIG_FILES if (p := directory / name).is_file())]
    return _digest_of((p.name, file_sha256(p)) for p in files)


def tokenizer_digest(directory: Path) -> str:
    """Digest of what turns text into ids: ``tokenizer.json`` and the config beside it, without its chat template."""
    config = _json_object(directory / "tokenizer_config.json")
    config.pop("chat_template", None)
    spelled = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return _digest_of([("tokenizer.json", file_sha256(directory / "tokenizer.json")), ("tokenizer_config", spelled)])


def template_digest(directory: Path) -> str:
    """sha256 of the chat template's text; of the empty text when there is none."""
    return hashlib.sha256((read_template(directory) or "").encode()).hexdigest()


def read_template(directory: Path) -> str | None:
    """The chat template: ``chat_template.jinja`` before the one in ``tokenizer_config.json``."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def count_parameters(directory: Path) -> int:
    """Parameters in the safetensors headers; no weight is read."""
    total = 0
    for file in weight_files(directory):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def file_sha256(path: Path) -> str:
    """sha256 of a file, remembered in this process for as long as its size and time of change stay."""
    try:
        stat = path.stat()
    except FileNotFoundError as error:
        raise Unavailable(f"{path} is missing; a base model needs it") from error
    return _file_sha256(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4096)
def _file_sha256(path: Path, _mtime_ns: int, _size: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name}\0{sha}\n" for name, sha in sorted(parts)).encode()).hexdigest()


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    body = json.loads(path.read_text(encoding="utf-8"))
    return body if isinstance(body, dict) else {}
