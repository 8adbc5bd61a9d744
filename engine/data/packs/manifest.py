"""The manifest of a pack: its counts, and the digest of every file; written last, so that a directory with one is a complete pack."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from core.durable_files import sha256_of, sync_to_disk, write_durable
from core.errors import IntegrityError

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackManifest:
    fingerprint: str
    dataset_id: str
    max_seq_len: int
    """The most tokens of a row."""
    num_examples: int
    """Training examples: conversations, texts, pairs, or judged answers; each piece of a split one counts."""
    num_windows: int
    """Rows of the training shards: packed windows, pairs, or judged answers."""
    num_tokens: int
    num_trained_tokens: int
    fill: float
    """Share of the training rows' capacity that holds tokens."""
    shards: Sequence[Mapping[str, Any]]
    """``{"name", "sha256", "num_windows"}`` each."""
    tokenizer_digest: str
    template_digest: str
    settings: Mapping[str, Any]
    validation: Mapping[str, Any] | None
    """The same counts and shards for the validation part."""
    truncated: int
    """Training and validation examples that were truncated."""
    dropped: dict[str, int]
    """Number of omitted examples by reason code."""
    dropped_rows: dict[str, list[int]]
    lengths: dict[str, list[int]]
    """``{"counts", "edges"}``: histogram of tokens per training example; for a pair, of its longer side."""
    rows: dict[str, str]
    """``{"name", "sha256"}`` of the file that maps windows to rows; empty for pairs, which name their row."""
    kind: str = "windows"
    window: int | None = None
    """Tokens that examples are packed into together; a longer example has a window of its own. None for pairs and judged answers."""
    safety: Mapping[str, int] | None = None
    """``{"num_examples", "num_wanted", "num_distinct"}`` of the safety-preserving examples for training; their rows are -1, -2 ..."""
    split: int = 0
    """Training and validation examples over `max_seq_len` that were split into pieces."""
    num_desirable: int | None = None
    """Answers labeled good in the training part; None for packs of other kinds."""
    num_undesirable: int | None = None
    """Answers labeled bad."""
    untrained_turns: int = 0
    """Assistant turns of weight 1 without loss: the chat template writes them differently once more messages follow."""
    openings: dict[str, dict[str, int]] = field(default_factory=dict)
    """How the answers begin, by variables of the template (``reasoning_probe.Openings``)."""
    format: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of the training shards, which a batch counts for every kind of pack."""
        return self.num_windows

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the manifest of a complete pack; ``IntegrityError`` if there is none."""
        file = directory / MANIFEST
        try:
            return cls(**json.loads(file.read_text()))
        except FileNotFoundError:
            raise IntegrityError(f"{directory} holds no pack manifest: the pack is absent or was not finished; build it again") from None
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{file} is not a pack manifest ({str(error)[:120]}); remove the pack and build it again") from error

    def write(self, directory: Path) -> None:
        """Makes `directory` a complete pack: all other files are already on disk."""
        partial = directory / f".{MANIFEST}.tmp"
        with partial.open("w") as stream:
            json.dump(asdict(self), stream, indent=1, sort_keys=True)
            write_durable(stream)
        partial.replace(directory / MANIFEST)
        sync_to_disk(directory)

    def files(self) -> Sequence[Mapping[str, Any]]:
        """Returns every file of the pack except the manifest."""
        return [*self.shards, *(self.validation["shards"] if self.validation else ()), *([self.rows] if self.rows else [])]


def verify_pack(directory: Path) -> PackManifest:
    """Verifies every file's digest and returns the manifest."""
    manifest = PackManifest.read(directory)
    for entry in manifest.files():
        file = directory / str(entry["name"])
        actual = sha256_of(file) if file.is_file() else "absent"
        if actual != entry["sha256"]:
            raise IntegrityError(
                f"pack file {file} is {actual}, but the manifest says {entry['sha256']}; remove the pack and build it again"
            )
    return manifest
