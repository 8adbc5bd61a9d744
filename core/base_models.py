"""The catalogue of base models: the bytes that an id stands for, and their limits.

An id stands for pinned bytes. ``digest`` covers weights, config, tokenizer and template, so an adapter can be tied to exactly what it was
trained on; it is computed from the files of a local model, or pinned in the catalogue, and if both exist they must agree
(``base_model_changed``). It is never null: a model whose bytes are unknown cannot be looked up.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from core.durable_files import sha256_of
from core.errors import IntegrityError, InvalidRequest, NotFound, Unavailable, did_you_mean

BUILTIN = Path(__file__).with_name("base_models.yaml")
KNOWN = Path(__file__).with_name("known_models.yaml")
DEFAULTS = Path(__file__).with_name("config_defaults.yaml")
REPOSITORY_ROOT = Path(__file__).resolve().parents[1]
CONFIG_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files that text becomes token ids by; not every model has all of them."""
CHANGED = "base_model_changed"
"""Error code for bytes that are not the pinned ones: the platform's fault, and final for callers that were promised the pinned ones."""
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters with which vLLM 0.33 can be started (its ``MaxLoRARanks``)."""
MAX_RANK = 128
"""Highest rank that servers load (``--max-lora-rank``), unless the deployment sets another (``FT_MAX_LORA_RANK``)."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PINNED = ("repo", "revision", "digest", "tokenizer_digest", "template_digest", "context_length", "num_parameters")
"""Fields that a model without files on this machine must state."""
CARD = ("digest", "tokenizer_digest", "template_digest", "context_length", "num_parameters")
FIELDS = frozenset(("id", "path", "license", "extended_from", "deprecated_since", "next", "previous", "history", *PINNED))
VERSION_FIELDS = ("path", "repo", "revision", "license", "extended_from", *CARD)
"""Fields of an entry about its bytes, and about those that an update staged (`next`) or replaced (`previous`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    id: str
    repo: str
    """Hub repository, or ``local``."""
    revision: str
    """Pinned commit of `repo`; for a local model the first 40 digits of its digest."""
    digest: str
    """sha256 over weights, config, tokenizer and template (see :func:`model_digest`)."""
    tokenizer_digest: str
    template_digest: str
    license: str
    context_length: int
    """Most tokens in one example (``max_position_embeddings``)."""
    num_parameters: int
    deprecated_since: dt.date | None
    """Submissions are refused from this day on; running jobs finish."""
    directory: Path | None
    """Directory of the files on this machine; None if they are known only by digest."""
    added_tokens: tuple[str, ...] = ()
    """Tokens that ``ft admin models extend`` added, whose rows of the embedding only training with adapter ``full`` changes."""


def catalogue_file(models_dir: Path) -> Path:
    """Return the file of the operator's own base models, in the directory of models of the platform's home."""
    return models_dir / "catalogue.yaml"


Entries = dict[str, tuple[Mapping[str, Any], Path]]
"""By id: an entry as written, and the directory that its path is relative to."""


class Catalogue:
    """Base models by id, from YAML files; entries are resolved (and their files hashed) on demand.

    The operator's file may change, appear and disappear while processes run; every call uses its current content.
    """

    def __init__(self, entries: Mapping[str, tuple[Mapping[str, Any], Path]], *, operator: Path | None = None) -> None:
        self._fixed = dict(entries)
        self._operator = operator
        self._read: tuple[tuple[int, ...] | None, Entries] = (None, {})

    @classmethod
    def load(cls, extra: Iterable[Path] = (), *, operator: Path | None = None) -> Self:
        """Loads the built-in catalogue, then each of `extra`, then `operator` if it exists; a later file replaces an id of an earlier
        one."""
        entries: Entries = {}
        for file, root in [(BUILTIN, REPOSITORY_ROOT), *((f, f.absolute().parent) for f in extra)]:
            entries.update(_by_id(file, root))
        return cls(entries, operator=operator)

    @property
    def _entries(self) -> Entries:
        if self._operator is None:
            return self._fixed
        try:
            stat = self._operator.stat()
        except FileNotFoundError:
            return self._fixed
        stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        known = self._read  # replaced as a whole, so that threads see a consistent pair
        if known[0] != stamp:
            known = self._read = (stamp, _by_id(self._operator, self._operator.absolute().parent))
        return {**self._fixed, **known[1]}

    def ids(self) -> list[str]:
        return sorted(self._entries)

    def entry(self, model_id: str) -> tuple[dict[str, Any], Path]:
        """Returns the entry of `model_id` as written, with the directory that its path is relative to; ``NotFound`` names the known ids."""
        found = self._entries.get(model_id)
        if found is None and model_id in known_models():
            raise NotFound(
                f"base model {model_id} is not pinned here; an operator adds it with `ft admin models add {model_id} --revision COMMIT`",
                code="model_not_pinned",
                param="model",
            )
        if found is None:
            known = ", ".join(self.ids()) or "none"
            raise NotFound(
                f"base model {model_id[:80]!r} is not in the catalogue; choose one of: {known}{did_you_mean(model_id, self.ids())}",
                code="model_not_found",
                param="model",
            )
        return dict(found[0]), found[1]

    def get(self, model_id: str, *, fresh: bool = False) -> BaseModel:
        """Returns the model called `model_id`, its files compared with its pins; ``Unavailable`` names a missing directory.

        `fresh`: reads every file again, even if the file system says that it has not changed since it was hashed.
        """
        return _resolve(*self.entry(model_id), fresh=fresh)

    def get_pinned(self, model_id: str, digest: str, *, fresh: bool = False) -> BaseModel:
        """Does :meth:`get` for a caller that was promised `digest`: other bytes are refused, whatever their origin.

        Bytes that an update has staged or replaced are also found by their digest, for as long as they are kept.
        """
        entry, root = self.entry(model_id)
        if (other := _other_version(entry, digest)) is not None:
            return _resolve(other, root, fresh=fresh)
        model = self.get(model_id, fresh=fresh)
        if model.digest != digest:
            raise IntegrityError(
                f"base model {model_id} has digest {model.digest} on this machine, but {digest} was pinned when it was chosen; "
                "restore its files, or its entry in the catalogue",
                code=CHANGED,
            )
        return model

    def get_local(self, model_id: str, digest: str, *, fresh: bool = False) -> tuple[BaseModel, Path]:
        """Returns the model with `digest` and the directory of its files on this machine. Other bytes raise ``base_model_changed``."""
        model = self.get_pinned(model_id, digest, fresh=fresh)
        if model.directory is None:
            raise Unavailable(f"base model {model_id} is not on this machine; fetch it there", code="base_model_unavailable")
        return model, model.directory

    def digests_alike(self, model_id: str) -> frozenset[str]:
        """Returns the earlier digests of an id whose adapters are served on its present files, because prompts and weights are the same."""
        found = self._entries.get(model_id)
        return frozenset(v["digest"] for v in (found[0].get("previous", ()) if found else ()) if v.get("answers_alike"))

    def card(self, model_id: str) -> BaseModel:
        """Returns the catalogue's data of a model: like :meth:`get`, but without reading files if everything is pinned."""
        entry, root = self.entry(model_id)
        if any(not entry.get(k) for k in CARD):
            return _resolve(entry, root)
        digest = str(entry["digest"])
        return BaseModel(
            repo=str(entry.get("repo") or "local"),
            revision=str(entry.get("revision") or digest[:40]),
            license=str(entry.get("license") or "unknown"),
            deprecated_since=entry.get("deprecated_since"),
            directory=root / entry["path"] if "path" in entry else None,
            added_tokens=_added_tokens(entry),
            **{k: entry[k] for k in ("id", *CARD)},
        )

    def check_submittable(self, model_id: str, *, today: dt.date) -> BaseModel:
        """Does :meth:`get`, refusing a model that is deprecated on `today`."""
        model = self.get(model_id)
        if model.deprecated_since is not None and model.deprecated_since <= today:
            raise InvalidRequest(
                f"base model {model.id!r} is deprecated since {model.deprecated_since}; choose another one of: {', '.join(self.ids())}",
                code="model_deprecated",
                param="model",
            )
        return model


@functools.cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Returns well-known models by id, which is their repository: what was read about them, and where. None is pinned."""
    import yaml  # here: settings, which every command reads, import this module

    return {entry["id"]: entry for entry in yaml.safe_load(KNOWN.read_text(encoding="utf-8"))["models"]}


def _other_version(entry: Mapping[str, Any], digest: str) -> dict[str, Any] | None:
    """Returns the entry with the staged or replaced bytes of that digest; None if it has none, or their files no longer exist."""
    if entry.get("digest") in (None, digest):
        return None
    versions = [*([entry["next"]] if entry.get("next") else []), *entry.get("previous", ())]
    found = next((v for v in versions if v["digest"] == digest and v.get("path")), None)
    return None if found is None else {k: v for k, v in entry.items() if k not in VERSION_FIELDS} | found


def _added_tokens(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(token["content"] for token in (entry.get("extended_from") or {}).get("tokens", ()))


def _by_id(file: Path, root: Path) -> Entries:
    return {entry["id"]: (entry, root) for entry in read_entries(file)}


def read_entries(file: Path) -> list[dict[str, Any]]:
    import yaml  # here: settings, which every command reads, import this module

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


def _resolve(entry: Mapping[str, Any], root: Path, *, fresh: bool = False) -> BaseModel:
    if "path" in entry:
        return _resolve_local(entry, root / entry["path"], fresh=fresh)
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


def _resolve_local(entry: Mapping[str, Any], directory: Path, *, fresh: bool) -> BaseModel:
    if not (directory / "config.json").is_file():
        raise Unavailable(f"base model {entry['id']} has no config.json in {directory}; fetch or build it there, or correct 'path'")
    digest = model_digest(directory, fresh=fresh)
    digests = {"digest": digest, "tokenizer_digest": tokenizer_digest(directory), "template_digest": template_digest(directory)}
    for name, actual in digests.items():
        if entry.get(name) and entry[name] != actual:
            raise IntegrityError(
                f"base model {entry['id']}: {name} of {directory} is {actual}, but the catalogue pins {entry[name]}; "
                "restore the files, or add the new ones under a new id",
                code=CHANGED,
            )
    config = text_config(model_config(directory))
    read = known_models().get(entry["id"], {}).get("context_length")
    length = entry.get("context_length") or context_length(config) or read
    if not length:
        raise InvalidRequest(
            f"base model {entry['id']}: config.json has no max_position_embeddings; add context_length", code="invalid_catalogue"
        )
    return BaseModel(
        id=entry["id"],
        repo=str(entry.get("repo") or "local"),
        revision=str(entry.get("revision") or digest[:40]),
        license=str(entry.get("license") or "unknown"),
        context_length=int(length),
        num_parameters=int(entry.get("num_parameters") or count_parameters(directory)),
        deprecated_since=entry.get("deprecated_since"),
        directory=directory,
        added_tokens=_added_tokens(entry),
        **digests,
    )


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a model; refuses a model that has only pickled weights, or requires its own code."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
        raise InvalidRequest(
            f"{directory} has no *.safetensors{f' (only {pickled[0]})' if pickled else ''}; pickled weights can run code and are "
            "never loaded: convert them to safetensors",
            code="unsafe_weights",
        )
    for name in ("config.json", "tokenizer_config.json"):
        if "auto_map" in _json_object(directory / name):
            raise InvalidRequest(f"{directory}/{name} requires its own code (auto_map), which is never run", code="remote_code")
    return files


def model_digest(directory: Path, *, fresh: bool = False) -> str:
    """Returns the sha256 over the sorted (name, sha256) of existing weights, config, tokenizer and template files."""
    files = [*weight_files(directory), *(p for name in CONFIG_FILES if (p := directory / name).is_file())]
    return digest_of_files({p.name: file_sha256(p, fresh=fresh) for p in files})


def digest_of_files(sha256_by_name: Mapping[str, str]) -> str:
    """Returns a model's digest from those of its files; files that it does not cover are ignored."""
    return _digest_of((name, sha) for name, sha in sha256_by_name.items() if name.endswith(".safetensors") or name in CONFIG_FILES)


def tokenizer_digest(directory: Path) -> str:
    """Returns the digest of what turns text into ids: ``tokenizer.json`` and the config beside it, without its chat template."""
    config = _json_object(directory / "tokenizer_config.json")
    config.pop("chat_template", None)
    spelled = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return _digest_of([("tokenizer.json", file_sha256(directory / "tokenizer.json")), ("tokenizer_config", spelled)])


def template_digest(directory: Path) -> str:
    """Returns the sha256 of the chat template's text; of the empty text if there is none."""
    return hashlib.sha256((read_template(directory) or "").encode()).hexdigest()


def read_template(directory: Path) -> str | None:
    """Returns the chat template: ``chat_template.jinja`` before the one in ``tokenizer_config.json``."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _json_object(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def count_parameters(directory: Path) -> int:
    """Counts the parameters in the safetensors headers, without reading weights."""
    total = 0
    for file in weight_files(directory):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def file_sha256(path: Path, *, fresh: bool = False) -> str:
    """Returns the sha256 of a file, cached in this process for as long as the file system reports the same file.

    The inode's change time is part of that: it moves when a file is written, replaced, or its modification time set back, and no call sets
    it. `fresh` reads the file regardless: a decaying disk reports nothing.
    """
    try:
        stat = path.stat()
    except FileNotFoundError as error:
        raise Unavailable(f"{path} is missing; the base model requires it") from error
    with _HASHING_LOCK:
        hashing = _HASHING.setdefault(path, threading.Lock())
    with hashing:  # concurrent callers wait for the result of the first read
        return _sha256_of(path, stat, fresh=fresh)


def _sha256_of(path: Path, stat: os.stat_result, *, fresh: bool) -> str:
    stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    known = _HASHED.get(path)
    if fresh or known is None or known[0] != stamp:
        known = _HASHED[path] = (stamp, sha256_of(path))
    return known[1]


_HASHED: dict[Path, tuple[tuple[int, ...], str]] = {}
_HASHING: dict[Path, threading.Lock] = {}
"""One lock per file, held while it is read."""
_HASHING_LOCK = threading.Lock()


def _digest_of(parts: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{name}\0{sha}\n" for name, sha in sorted(parts)).encode()).hexdigest()


def model_config(directory: Path) -> dict[str, Any]:
    return _json_object(directory / "config.json")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a ``config.json`` that describes the text decoder: all of it, unless the model reads more than text.

    What it omits has the value that transformers assumes, for the model types of :func:`config_defaults`.
    """
    nested = config.get("text_config")
    found = {"model_type": config.get("model_type")} | dict(nested) if isinstance(nested, Mapping) else dict(config)
    return {**config_defaults().get(str(found.get("model_type")).removesuffix("_text"), {}), **found}


def context_length(config: Mapping[str, Any]) -> int:
    """Returns the positions that a text decoder with this config can take; 0 if it does not say.

    ``max_position_embeddings``; with YaRN its scaled length, because some configs (Qwen's with YaRN) leave the original one there.
    """
    config = text_config(config)
    scaled = [
        int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        for rope in _ropes(config)
        if rope.get("rope_type", rope.get("type")) == "yarn" and rope.get("factor") and rope.get("original_max_position_embeddings")
    ]
    return max(int(config.get("max_position_embeddings") or 0), *scaled, 0)


def rope_types(config: Mapping[str, Any]) -> frozenset[str]:
    """Returns the kinds of scaling of rotary positions in a config, those of all kinds of layers."""
    return frozenset(str(rope.get("rope_type", rope.get("type"))) for rope in _ropes(text_config(config)))


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the settings of rotary positions: one, or one for each kind of layer (Gemma 3)."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


@functools.cache
def config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Returns what transformers assumes where a text decoder's config says nothing, by model type without ``_text``."""
    import yaml  # here: settings, which every command reads, import this module

    defaults: Mapping[str, Mapping[str, Any]] = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    return defaults


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Returns whether a ``config.json`` says that embedding and output layer share their weights."""
    return bool(config.get("tie_word_embeddings") or text_config(config).get("tie_word_embeddings"))


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    body = json.loads(path.read_text(encoding="utf-8"))
    return body if isinstance(body, dict) else {}
