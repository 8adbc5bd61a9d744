"""Builds a pack: a dataset tokenized for one model and packed into windows, once, under a fingerprint.

    manifest.json         written last: a directory with a manifest is a whole pack
    shard-00000.parquet   one row per window: input_ids, labels (-100: no loss), seq_lengths of the examples in it
    val-00000.parquet     the same for the validation part, if any
    rows.parquet          one row per training window: the rows of the uploaded file in it, in order

Equal inputs give byte-identical ids. Building again under the same fingerprint does no work; after a crash the finished token
shards are used and at most one is done again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ft_assets.datasets.durable import sync_directory, write_durable
from ft_assets.datasets.identity import content_hash
from ft_assets.datasets.packs.windows import PartManifest, write_windows
from ft_assets.datasets.schema import Example
from ft_assets.datasets.split import Part, part_of
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from ft_assets.datasets.tokens.token_shards import Tally, TokenShard, open_shard, write_shard
from ft_assets.errors import IntegrityError, InvalidDataset

PACK_FORMAT = 1
"""Of the pack's files and of the algorithm that fills them; a change makes new fingerprints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    max_seq_len: int = 4096
    """Tokens of one window, and of one example at most."""
    train_on_inputs: bool | Literal["auto"] = "auto"
    """Loss on prompts too. auto: no for chat; text rows always carry loss everywhere."""
    over_long: Literal["truncate", "drop", "reject"] = "truncate"
    """Examples over `max_seq_len`: cut, left out, or a refusal of the whole pack; counted in each case."""
    control_tokens: Literal["reject", "drop"] = "reject"
    """Examples whose content holds a control token: refuse the pack, or leave them out and count them."""
    validation_fraction: float = 0.0
    """Share of the examples held out by the hash of their content; 0: none (or a validation file of its own)."""
    split_seed: int = 0
    validation_dataset_id: str | None = None
    """Of the tenant's own validation file."""
    packing: bool = True
    """False: one example per window."""
    shard_examples: int = 2048
    """Examples per token shard: what a crash can cost."""

    def __post_init__(self) -> None:
        if self.max_seq_len < 2:
            raise ValueError(f"max_seq_len {self.max_seq_len} is too small; use at least 2")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction {self.validation_fraction} is outside of 0 <= f < 1")
        if self.validation_fraction and self.validation_dataset_id:
            raise ValueError("give validation_fraction or validation_dataset_id, not both")

    @property
    def loss_on_inputs(self) -> bool:
        return self.train_on_inputs is True


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    stage: Literal["tokenize", "pack"]
    """tokenize: reported after each token shard that was done now, not for those found finished."""
    part: Part
    num_examples: int
    """Done so far in this stage and part."""


ProgressCallback = Callable[[PackProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackManifest:
    fingerprint: str
    dataset_id: str
    max_seq_len: int
    num_examples: int
    num_windows: int
    num_tokens: int
    num_trained_tokens: int
    fill: float
    """Share of the training windows' room that holds tokens."""
    shards: list[dict[str, Any]]
    """``{"name", "sha256", "num_windows"}`` each."""
    tokenizer_digest: str
    template_digest: str
    settings: dict[str, Any]
    validation: dict[str, Any] | None
    """The same counts and shards for the validation part."""
    truncated: int
    """Training and validation examples that were cut."""
    dropped: dict[str, int]
    """Reason code to number of examples left out."""
    dropped_rows: dict[str, list[int]]
    lengths: dict[str, list[int]]
    """``{"counts", "edges"}``: histogram of tokens per training example."""
    rows: dict[str, str]
    """``{"name", "sha256"}`` of the file that says which rows are in which window."""
    format: int = PACK_FORMAT

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The manifest of a whole pack; ``IntegrityError`` where there is none."""
        file = directory / "manifest.json"
        try:
            return cls(**json.loads(file.read_text()))
        except FileNotFoundError:
            raise IntegrityError(f"{directory} holds no pack manifest: the pack is absent or was not finished; build it again") from None
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{file} is no pack manifest ({str(error)[:120]}); remove the pack and build it again") from error

    def files(self) -> list[dict[str, Any]]:
        """Every file of the pack but the manifest."""
        return [*self.shards, *(self.validation["shards"] if self.validation else ()), self.rows]


def verify(directory: Path) -> PackManifest:
    """The manifest, once every file was found with its digest."""
    manifest = PackManifest.read(directory)
    for entry in manifest.files():
        file = directory / str(entry["name"])
        actual = _sha256(file) if file.is_file() else "absent"
        if actual != entry["sha256"]:
            raise IntegrityError(
                f"pack file {file} is {actual}, but the manifest says {entry['sha256']}; remove the pack and build it again"
            )
    return manifest


def pack_fingerprint(dataset_id: str, tokenizer_digest: str, template_digest: str, settings: PackSettings) -> str:
    """``pk_`` + 32 hex digits over everything that decides the pack's content."""
    shaping = {k: v for k, v in asdict(settings).items() if k != "shard_examples"}
    shaping["train_on_inputs"] = settings.loss_on_inputs
    spelled = json.dumps([PACK_FORMAT, dataset_id, tokenizer_digest, template_digest, shaping], sort_keys=True)
    return "pk_" + hashlib.sha256(spelled.encode()).hexdigest()[:32]


def build_pack(
    examples: Iterable[Example],
    tokenizer: ChatTokenizer,
    settings: PackSettings,
    out_dir: Path,
    *,
    dataset_id: str,
    validation: Iterable[Example] = (),
    progress: ProgressCallback | None = None,
) -> PackManifest:
    """The pack of `examples` in `out_dir`; one that is there already under the same fingerprint is returned as it is.

    `validation` is the tenant's own validation file; without it `settings.validation_fraction` is held out. Raises ``InvalidDataset``
    when a policy refuses an example or nothing is left to train on.
    """
    fingerprint = pack_fingerprint(dataset_id, tokenizer.tokenizer_digest, tokenizer.template_digest, settings)
    if (out_dir / "manifest.json").is_file() and PackManifest.read(out_dir).fingerprint == fingerprint:
        return verify(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    tokens_dir = out_dir / f".tokens-{fingerprint}-{settings.shard_examples}"
    report = progress or (lambda _: None)
    tokenized = _tokenize(examples, validation, tokenizer, settings, tokens_dir, report)
    tally = _tally(itertools.chain.from_iterable(tokenized.values()))
    _enforce(tally, settings)
    parts: dict[Part, PartManifest] = {}
    for part, shards in tokenized.items():
        if any(s.tally.num_examples for s in shards):
            parts[part] = write_windows(shards, out_dir, part=part, capacity=settings.max_seq_len, pack=settings.packing, key=fingerprint)
            report(PackProgress(stage="pack", part=part, num_examples=parts[part].num_examples))
    if "train" not in parts:
        raise InvalidDataset(
            f"no example is left to train on: {_spell(tally)}; lower validation_fraction or correct the rows", code="too_few_examples"
        )
    manifest = _manifest(fingerprint, dataset_id, tokenizer, settings, parts, tally)
    _write_manifest(out_dir, manifest)
    shutil.rmtree(tokens_dir, ignore_errors=True)
    return manifest


def _tokenize(
    examples: Iterable[Example],
    validation: Iterable[Example],
    tokenizer: ChatTokenizer,
    settings: PackSettings,
    tokens_dir: Path,
    report: ProgressCallback,
) -> dict[Part, list[TokenShard]]:
    """Token shards of both parts; those that an earlier call finished are taken as they are."""
    out: dict[Part, list[TokenShard]] = {"train": [], "validation": []}
    done: dict[Part, int] = {"train": 0, "validation": 0}
    for part, batch in _batches(examples, validation, settings):
        directory = tokens_dir / part / f"{len(out[part]):05d}"
        shard = open_shard(directory)
        done[part] += len(batch)
        if shard is None:
            shard = write_shard(
                directory,
                batch,
                tokenizer,
                max_seq_len=settings.max_seq_len,
                train_on_inputs=settings.loss_on_inputs,
                drop_over_long=settings.over_long != "truncate",
            )
            report(PackProgress(stage="tokenize", part=part, num_examples=done[part]))
        out[part].append(shard)
    return out


def _batches(examples: Iterable[Example], validation: Iterable[Example], settings: PackSettings) -> Iterator[tuple[Part, list[Example]]]:
    """`examples` in batches of one part each, then `validation`."""
    held: dict[Part, list[Example]] = {"train": [], "validation": []}
    for example in examples:
        part: Part = "train"
        if settings.validation_fraction:
            part = part_of(content_hash(example), validation_fraction=settings.validation_fraction, seed=settings.split_seed)
        held[part].append(example)
        if len(held[part]) == settings.shard_examples:
            yield part, held[part]
            held[part] = []
    if held["train"]:
        yield "train", held["train"]
    for example in validation:
        held["validation"].append(example)
        if len(held["validation"]) == settings.shard_examples:
            yield "validation", held["validation"]
            held["validation"] = []
    if held["validation"]:
        yield "validation", held["validation"]


def _tally(shards: Iterable[TokenShard]) -> Tally:
    total = Tally()
    for shard in shards:
        total.add(shard.tally)
    return total


def _enforce(tally: Tally, settings: PackSettings) -> None:
    """Refuse what the policies do not let pass, naming the first rows."""
    refused = {"control_token_in_content": settings.control_tokens == "reject", "example_too_long": settings.over_long == "reject"}
    for code, refuse in refused.items():
        if refuse and (count := tally.dropped.get(code)):
            rows = ", ".join(map(str, tally.dropped_rows[code]))
            what = (
                "hold a control token of the base model"
                if code == "control_token_in_content"
                else f"are over {settings.max_seq_len} tokens"
            )
            raise InvalidDataset(f"{count} examples {what} (rows {rows}); correct them, or choose the policy 'drop'", code=code)


def _spell(tally: Tally) -> str:
    return ", ".join(f"{count} x {code}" for code, count in tally.dropped.items()) or "every example is in the validation part"


def _manifest(
    fingerprint: str, dataset_id: str, tokenizer: ChatTokenizer, settings: PackSettings, parts: dict[Part, PartManifest], tally: Tally
) -> PackManifest:
    train, held_out = parts["train"], parts.get("validation")
    return PackManifest(
        fingerprint=fingerprint,
        dataset_id=dataset_id,
        max_seq_len=settings.max_seq_len,
        tokenizer_digest=tokenizer.tokenizer_digest,
        template_digest=tokenizer.template_digest,
        settings=asdict(settings),
        validation=held_out.to_dict() if held_out else None,
        truncated=tally.truncated,
        dropped=tally.dropped,
        dropped_rows=tally.dropped_rows,
        lengths=train.lengths,
        rows=train.rows,
        **train.to_dict(),
    )


def _write_manifest(out_dir: Path, manifest: PackManifest) -> None:
    partial = out_dir / ".manifest.tmp"
    with partial.open("w") as stream:
        json.dump(asdict(manifest), stream, indent=1)
        write_durable(stream)
    partial.replace(out_dir / "manifest.json")
    sync_directory(out_dir)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


__all__ = ["PackManifest", "PackProgress", "PackSettings", "build_pack", "pack_fingerprint", "verify"]
