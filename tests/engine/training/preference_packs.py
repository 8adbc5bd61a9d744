"""Small packs of answers for the tiny model."""

from __future__ import annotations

from pathlib import Path

from engine.data.packs.build import PackSettings, build_judged_pack, build_preference_pack
from engine.data.packs.manifest import PackManifest
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.preferences_of import varied_judged, varied_preferences


def build_preferences(directory: Path, model: Path, *, count: int = 60, fraction: float = 0.2) -> PackManifest:
    """`count` pairs in several files, some held out, some cut."""
    settings = PackSettings(max_seq_len=400, validation_fraction=fraction, file_tokens=16 * 400)
    return build_preference_pack(varied_preferences(count), ChatTokenizer.load(model), settings, directory, dataset_id="ds_1")


def build_judged(directory: Path, model: Path, *, count: int = 60, fraction: float = 0.2) -> PackManifest:
    """`count` answers called good or bad in several files, some held out, some cut."""
    settings = PackSettings(max_seq_len=400, validation_fraction=fraction, file_tokens=16 * 400)
    return build_judged_pack(varied_judged(count), ChatTokenizer.load(model), settings, directory, dataset_id="ds_1")
