"""Settings that determine a pack's content, and the fingerprint over them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from engine.data.packs.safety_mix import safety_digest

PACK_FORMAT = 5
"""Version of the pack's files and of the packing algorithm; a change makes new fingerprints."""

PackKind = Literal["windows", "pairs", "judged"]
"""windows: examples packed into windows. pairs: a chosen and a rejected answer each. judged: single answers, labeled good or bad."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    max_seq_len: int = 4096
    """The most tokens of one example, and of a window."""
    min_windows: int = 0
    """Fewest windows of the training part: they get shorter if the data makes fewer of `max_seq_len`. 0: any number."""
    train_on_inputs: bool | Literal["auto"] = "auto"
    """Loss on prompts too. auto: no for chat; text rows always carry loss everywhere."""
    over_long: Literal["truncate", "split", "drop", "reject"] = "truncate"
    """Examples over `max_seq_len`: truncate, split into pieces without loss (only if every token is trained), omit, or refuse the whole
    pack; counted in each case."""
    control_tokens: Literal["reject", "drop", "escape"] = "reject"
    """Examples whose content contains a control token: refuse the pack, omit them, or tokenize it as plain text."""
    bad_rows: Literal["fail", "drop"] = "fail"
    """Examples that the base model's chat template refuses: refuse the pack, or omit them."""
    validation_fraction: float = 0.0
    """Share of the examples held out by their split key; 0: none (or a separate validation file)."""
    split_seed: int = 0
    validation_dataset_id: str | None = None
    """Digest of the tenant's own validation file."""
    packing: bool = True
    """False: one example per window."""
    safety_share: float = 0.0
    """Share of safety-preserving examples mixed into the training part; 0: none. See ``safety_mix.py``."""
    safety_file: Path | None = None
    """JSONL of conversations to mix in; None: the set that ships with the platform."""
    file_tokens: int = 1 << 24
    """Tokens per Parquet file: 16.8M tokens are about 24 MB on disk and 200 MB while being written."""
    shard_examples: int = 2048
    """Examples per token shard: the most that a crash can cost each worker. Does not affect the content."""

    def __post_init__(self) -> None:
        if self.max_seq_len < 2:
            raise ValueError(f"max_seq_len {self.max_seq_len} is too small; use at least 2")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction {self.validation_fraction} is outside of 0 <= f < 1")
        if self.validation_fraction and self.validation_dataset_id:
            raise ValueError("give validation_fraction or validation_dataset_id, not both")
        if not 0.0 <= self.safety_share <= 0.5:
            raise ValueError(f"safety_share {self.safety_share} is outside 0 to 0.5; a few percent are enough")
        if self.over_long == "split" and not self.loss_on_inputs:
            raise ValueError("over_long 'split' needs train_on_inputs: a piece of a conversation may hold no answer")
        if self.shard_examples < 1:
            raise ValueError(f"shard_examples {self.shard_examples} is too small; use at least 1")

    @property
    def loss_on_inputs(self) -> bool:
        return self.train_on_inputs is True

    def shaping(self) -> Mapping[str, Any]:
        """Returns the settings that determine the content, with files by their digest: part of the fingerprint and of the manifest."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("shard_examples", "safety_file")}
        values["train_on_inputs"] = self.loss_on_inputs
        values["safety_sha256"] = safety_digest(self.safety_file) if self.safety_share else None
        return values


def pack_fingerprint(
    dataset_id: str, tokenizer_digest: str, template_digest: str, settings: PackSettings, *, kind: PackKind = "windows"
) -> str:
    """Returns ``pk_`` + 32 hex digits over everything that determines the pack's content."""
    spelled = json.dumps([PACK_FORMAT, kind, dataset_id, tokenizer_digest, template_digest, settings.shaping()], sort_keys=True)
    return "pk_" + hashlib.sha256(spelled.encode()).hexdigest()[:32]
