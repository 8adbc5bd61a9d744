"""``ft admin models extend``: makes another base model with added tokens from a registered one.

The result is a base model like any other, with a tokenizer of its own, so packs, digests, servers, evaluations and exports need no special
case (decision 0074). Repeatable: the new directory is complete or absent, and a call that finds it complete only registers it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import AddedToken, Tokenizer

from control_plane.models import catalogue, embedding_rows
from control_plane.models.embedding_rows import Rows
from control_plane.models.model_fetch import INDEX, WANTED
from control_plane.platform.settings import Settings
from core.base_models import BaseModel, model_config, weight_files
from core.durable_files import in_threads, sync_to_disk
from core.errors import Conflict, InvalidRequest, Unavailable
from engine.data import ChatTokenizer
from engine.training import free_bytes, is_disk_full

RECORD = "extended_from.json"
"""Written into the new directory: the base's id and digest, and the tokens that were added."""
REWRITTEN = ("config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", INDEX)
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class NewToken:
    content: str
    special: bool = False
    """A control token: refused or escaped in the content of rows, and left out of answers. Otherwise it is text that has an id of its
    own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extended:
    model: BaseModel
    base: str
    base_digest: str
    token_ids: Mapping[str, int]
    """Id of each added token, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    source: Path
    tokens: Sequence[NewToken]
    ids: Mapping[str, int]
    rows: Rows
    record: Mapping[str, Any]


def extend(
    settings: Settings, model_id: str, *, base: str, tokens: Sequence[NewToken], directory: Path,
    say: Callable[[str], None] = lambda _: None,
) -> Extended:  # fmt: skip
    """Write `base` with `tokens` into `directory`, which must be new or empty, and pin it under `model_id`.

    License and context are the base's. One call at a time in a home.
    """
    catalogue.check_id(model_id)
    known = catalogue.catalogue_of(settings)
    card = known.card(base)
    source = card.directory
    if source is None or not (source / "tokenizer.json").is_file():
        _, source = known.get_local(base, card.digest)  # reports what is missing
    ids = _checked(source, tokens)
    rows = embedding_rows.plan(source, first_id=min(ids.values()), num_tokens=len(ids))
    record = {"id": base, "digest": card.digest, "tokens": [asdict(token) for token in tokens]}
    target = directory.resolve()
    settings.models_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(settings.models_dir / ".extend.lock"):
        if _record_of(target) != record:
            _check_free(settings, model_id, target)
            say(f"reading {base} and comparing it with its digest")
            known.get_pinned(base, card.digest, fresh=True)
            _make(_Plan(source=source, tokens=tokens, ids=ids, rows=rows, record=record), target, say)
        made = catalogue.add_extended(settings, model_id, target, base=card, record=record)
    return Extended(model=made, base=base, base_digest=card.digest, token_ids=ids)


def _checked(source: Path, tokens: Sequence[NewToken]) -> dict[str, int]:
    """Returns the id that each token gets, or refuses one that would not be a token of its own."""
    live = Tokenizer.from_file(str(source / "tokenizer.json"))
    control = sorted(ChatTokenizer.load(source).control_tokens)
    contents = [token.content for token in tokens]
    if not contents:
        raise _refused("no token was given", "name at least one with --token or --special-token")
    for at, content in enumerate(contents):
        if not content or content != content.strip():
            raise _refused(f"token {content!r} is empty, or begins or ends with white space", "give the text between the white space")
        if content in contents[:at]:
            raise _refused(f"token {content!r} was given twice", "give it once")
        if (found := _known_id(live, content)) is not None:
            raise _refused(f"token {content!r} is in the vocabulary already, with id {found}", "leave it out, or choose another text")
        if (hidden := next((token for token in control if _takes_from(content, token)), None)) is not None:
            raise _refused(f"token {content!r} would hide the control token {hidden!r} of the base", "choose another text")
    before = live.get_vocab(with_added_tokens=True)
    live.add_tokens(list(map(_added, tokens)))
    ids = {content: number for content in contents if (number := live.token_to_id(content)) is not None}
    first = max(before.values()) + 1
    if list(ids.values()) != list(range(first, first + len(ids))):
        raise InvalidRequest(
            f"the tokenizer in {source} has gaps between its ids, so new tokens would get {sorted(ids.values())} instead of {first} and "
            "those after it; add the tokens with the tools of the model's author, then `ft admin models add ID --path DIR`",
            code="model_not_extendable",
        )
    return ids


def _known_id(live: Tokenizer, content: str) -> int | None:
    """Returns the id that stands for exactly this text, if there is one; byte-level vocabularies spell texts differently."""
    found = live.token_to_id(content)
    alone = live.encode(content, add_special_tokens=False).ids
    if found is None and len(alone) == 1 and live.decode(alone, skip_special_tokens=False) == content:
        found = alone[0]
    return None if found is None else int(found)


def _takes_from(content: str, control: str) -> bool:
    """Returns whether a text that holds `content` and `control` would lose `control`: of tokens that share characters, the first wins."""
    return control in content or any(control.startswith(content[at:]) for at in range(1, len(content)))


def _refused(what: str, next_step: str) -> InvalidRequest:
    return InvalidRequest(f"{what}; {next_step}", code="invalid_token_text", param="token")


def _added(token: NewToken) -> AddedToken:
    return AddedToken(token.content, special=token.special, normalized=False)


def _record_of(target: Path) -> Any:
    file = target / RECORD
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _check_free(settings: Settings, model_id: str, target: Path) -> None:
    if model_id in catalogue.catalogue_of(settings).ids():
        raise Conflict(
            f"base model {model_id} is in the catalogue, and {target} is not what this command would make of it; choose another id",
            code="model_exists",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidRequest(
            f"{target} exists and is not empty, and does not hold this base with these tokens; name a new directory with --path",
            code="directory_not_empty",
            param="path",
        )


def _make(plan: _Plan, target: Path, say: Callable[[str], None]) -> None:
    """Fills a directory beside `target`, which then takes its name; what an interrupted call left there is deleted first."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    grown, _ = embedding_rows.added_to(plan.source, plan.rows)
    needed, free = sum(p.stat().st_size for p in _files(plan.source)) + grown, free_bytes(target.parent)
    if needed > free:
        raise _no_space(target, needed, free)
    say(f"writing {needed / GIB:.1f} GiB to {target}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InvalidRequest(f"{target} cannot be made ({error.strerror}); choose another directory with --path", param="path") from error
    try:
        _write(plan, partial)
        in_threads(sync_to_disk, [*partial.iterdir(), partial])
        partial.rename(target)
    except BaseException as error:
        is_full = is_disk_full(error, near=target)
        shutil.rmtree(partial, ignore_errors=True)
        if is_full:
            raise _no_space(target, needed, free_bytes(target.parent)) from error
        raise
    sync_to_disk(target.parent)


def _no_space(target: Path, needed: int, free: int) -> Unavailable:
    return Unavailable(
        f"{target} needs {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free on its disk; free some, or choose a directory on "
        "another disk with --path",
        code="no_disk_space",
    )


def _files(source: Path) -> list[Path]:
    return [*weight_files(source), *(p for name in (*WANTED, INDEX) if (p := source / name).is_file())]


def _write(plan: _Plan, partial: Path) -> None:
    for file in _files(plan.source):
        if file.suffix == ".safetensors":
            embedding_rows.copy_shard(file, partial / file.name, plan.rows)
        elif file.name not in REWRITTEN:
            shutil.copyfile(file, partial / file.name)
    _write_json(partial / "config.json", embedding_rows.extended_config(model_config(plan.source), plan.rows))
    if (plan.source / INDEX).is_file():
        num_bytes, num_parameters = embedding_rows.added_to(plan.source, plan.rows)
        index = embedding_rows.extended_index(_read(plan.source / INDEX), num_bytes=num_bytes, num_parameters=num_parameters)
        _write_json(partial / INDEX, index)
    _write_tokenizer(plan, partial)
    _write_json(partial / RECORD, plan.record)


def _write_tokenizer(plan: _Plan, partial: Path) -> None:
    """Writes each file that lists added tokens: ``tokenizer.json``, and those beside it that transformers reads if they exist."""
    spec = _read(plan.source / "tokenizer.json")
    states = {plan.ids[token.content]: _state(token) for token in plan.tokens}
    spec["added_tokens"] = [*(spec.get("added_tokens") or ()), *({"id": number, **state} for number, state in states.items())]
    _write_json(partial / "tokenizer.json", spec, indent=None)
    if (file := plan.source / "tokenizer_config.json").is_file():
        config = _read(file)
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] |= {str(number): state for number, state in states.items()}
        _write_json(partial / file.name, config)
    if (file := plan.source / "added_tokens.json").is_file():
        _write_json(partial / file.name, {**_read(file), **plan.ids})


def _state(token: NewToken) -> dict[str, Any]:
    added = _added(token)
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(added, name) for name in names}


def _read(file: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return body


def _write_json(file: Path, body: Any, *, indent: int | None = 2) -> None:
    file.write_text(json.dumps(body, ensure_ascii=False, indent=indent), encoding="utf-8")
