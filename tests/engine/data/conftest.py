"""Fixtures of the datasets stage: the tiny model's tokenizer, and one with merges whose tokens span several characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.support.models.tiny_model import CHAT_TEMPLATE, SPECIAL, build_tiny_model

CORPUS = [
    "<|im_start|>user\nHow do I know if I will get my card, or if it is lost?<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. 12345 67890\n\n\tdef f(x):\n        return x + 1\n",
    "Grüße aus Köln, naïve façade, 日本語のテキスト, emoji 🙂🙃 and é combined",
] * 20


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def merging_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a tokenizer and its template: byte-level BPE with merges."""
    directory = tmp_path_factory.mktemp("merging")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    """One token a byte."""
    return ChatTokenizer.load(tiny_model)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or raw bytes for a line as it stands) as a JSONL file."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
        return path

    return write
