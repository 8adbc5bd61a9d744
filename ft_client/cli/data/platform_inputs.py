"""What the check of a local file takes from the platform: the limits of a tier, contamination lists, a base model's tokenizer.

Nothing of the file is sent. Without an address and a key, or if nothing answers, the check uses what this installation ships, and names
what it did not compare.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.base_models import BaseModel, Catalogue, catalogue_file, template_digest, tokenizer_digest
from core.errors import FtError, InvalidRequest, NotFound, Unavailable, did_you_mean
from ft_client.cli import session
from ft_client.cli.session import connect, require_answer

if TYPE_CHECKING:
    from ft_client import FtClient

LIMITS, LISTS = "the limits of your tier", "contamination lists of the operator and your own"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    base: BaseModel | None
    """The base model, its directory with at least the tokenizer and the chat template; None if no model was named."""
    suites: Path | None
    """Directory of the index of contamination lists; None: rows are compared with none."""
    max_examples: int | None = None
    max_file_bytes: int | None = None
    url: str | None = None
    """Address of the platform that was asked; None if none was."""
    reason: str | None = None
    """Why none was."""
    not_compared: Sequence[str] = field(default=())

    def to_dict(self) -> Mapping[str, Any]:
        """Return the part of a report in JSON."""
        return {"url": self.url, "not_compared": list(self.not_compared), "reason": self.reason}


def collect(directory: Path, *, model: str | None, lists: bool, offline: bool) -> Inputs:
    """Return the platform's inputs, or those of this installation if the platform cannot be asked; `lists`: with contamination lists."""
    from engine.data import shipped_index

    try:
        with _platform(offline=offline) as client:
            quota = client.quota.retrieve()
            return Inputs(
                base=None if model is None else _of_platform(client, model, directory),
                suites=_index(client, directory) if lists else None,
                max_examples=quota["max_examples"],
                max_file_bytes=quota["max_file_bytes"],
                url=session.api_url(),
            )
    except FtError as error:
        if error.param == "model":
            raise
        base = None if model is None else _of_this_machine(model, error.message)
        unknown = (LIMITS, *([LISTS] if lists else ()), *([f"the platform's tokenizer and template of {model}"] if model else ()))
        suites = shipped_index(directory / "shipped") if lists else None
        return Inputs(base=base, suites=suites, reason=error.message, not_compared=unknown)


def base_model(directory: Path, model: str, *, offline: bool) -> tuple[BaseModel, str | None]:
    """Return a base model with its tokenizer, and None if it is the platform's; else why this installation's is used instead."""
    try:
        with _platform(offline=offline) as client:
            return _of_platform(client, model, directory), None
    except FtError as error:
        if error.param == "model":
            raise
        return _of_this_machine(model, error.message), error.message


@contextmanager
def _platform(*, offline: bool) -> Iterator[FtClient]:
    """Yield a client of the platform of this call; raises ``FtError`` if there is no key, or nothing answers."""
    if offline:
        raise Unavailable("--offline was given", code="unreachable")
    found = session.credentials()
    require_answer(found.url)
    with connect(found) as client:
        yield client


def _of_platform(client: FtClient, model: str, directory: Path) -> BaseModel:
    cards = {card["id"]: card for card in client.models.list(type="base_model")}
    if (card := cards.get(model)) is None:
        known = f"{', '.join(sorted(cards)) or 'none'}{did_you_mean(model, cards)}"
        message = f"base model {model[:80]!r} is not in the catalogue of {session.api_url()}; choose one of: {known}"
        raise NotFound(message, code="model_not_found", param="model")
    client.models.tokenizer(model, directory / "tokenizer.zip")
    target = _unpacked(directory / "tokenizer.zip", directory / "model")
    return BaseModel(
        **{name: card[name] for name in ("id", "repo", "revision", "digest", "license", "context_length", "num_parameters")},
        tokenizer_digest=tokenizer_digest(target),
        template_digest=template_digest(target),
        deprecated_since=None,
        directory=target,
    )


def _of_this_machine(model: str, reason: str) -> BaseModel:
    further = tuple(Path(path).absolute() for path in session.setting("FT_BASE_MODELS").split(":") if path)
    try:
        base = Catalogue.load(further, operator=catalogue_file(session.home() / "models")).get(model)
    except NotFound as error:
        message = f"{error.message}. Only the models of this directory were looked at: {reason}"
        raise NotFound(message, code=error.code, param="model") from error
    if base.directory is None:
        raise InvalidRequest(
            f"base model {model} has no files on this machine, and the platform was not asked: {reason}; leave out --model, or upload the "
            "file to check it there",
            param="model",
        )
    return base


def _index(client: FtClient, directory: Path) -> Path:
    from engine.data import SuiteIndex

    client.suites.index(directory / "index.zip")
    target = _unpacked(directory / "index.zip", directory / "index")
    SuiteIndex.load(target)  # one of another version is refused here
    return target


def _unpacked(archive: Path, target: Path) -> Path:
    with zipfile.ZipFile(archive) as file:
        file.extractall(target)
    return target
