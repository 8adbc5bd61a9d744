"""A small pack of preferences for the tiny model."""

from __future__ import annotations

from pathlib import Path

from ft_assets.datasets.packs.build import PackSettings, build_preference_pack
from ft_assets.datasets.packs.manifest import PackManifest
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from tests.ft_assets.datasets.preferences_of import varied_preferences


def build_preferences(directory: Path, model: Path, *, count: int = 60, fraction: float = 0.2) -> PackManifest:
    """`count` pairs in several files, some held out, some cut."""
    settings = PackSettings(max_seq_len=400, validation_fraction=fraction, file_tokens=16 * 400)
    return build_preference_pack(varied_preferences(count), ChatTokenizer.load(model), settings, directory, dataset_id="ds_1")
