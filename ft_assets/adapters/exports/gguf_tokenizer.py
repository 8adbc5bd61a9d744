"""The tokenizer of a model in GGUF's words: tokens with their types, merges or scores, and how text is split before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFWriter, TokenType

from ft_assets.base_models import read_template
from ft_assets.errors import InvalidRequest

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}": "llama-bpe",
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}": "qwen2",
}
"""Patterns by which byte-level tokenizers split text, and what llama.cpp calls them."""
GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    spec: Mapping[str, Any]
    """``tokenizer.json``"""
    config: Mapping[str, Any]
    """``tokenizer_config.json``"""
    tokens: list[str]
    types: list[TokenType]
    live: tokenizers.Tokenizer


def add_tokenizer(writer: GGUFWriter, directory: Path, *, vocab_size: int) -> None:
    """Write the tokenizer of the model in `directory`; one that llama.cpp would split text by otherwise is refused."""
    read = _read(directory, vocab_size)
    model = read.spec["model"]
    if model.get("type") != "BPE":
        raise _unsupported(f"a {model.get('type')} model")
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, read)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre(read.spec))
        writer.add_token_list(read.tokens)
        writer.add_token_types(read.types)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    _add_special(writer, read)
    if template := read_template(directory):
        writer.add_chat_template(plain_template(template))


def plain_template(template: str) -> str:
    """The template without the blocks that mark what is trained on, which only trainers know; what it renders stays the same."""
    return GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)


def _read(directory: Path, vocab_size: int) -> _Read:
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    live = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    by_id = {i: t for t, i in live.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= vocab_size:
        raise _unsupported(f"token ids up to {max(by_id)}, but the model has {vocab_size} rows for them")
    added = {t["id"]: t for t in spec.get("added_tokens") or ()}
    tokens, types = [], []
    for i in range(vocab_size):
        token = by_id.get(i)
        tokens.append(f"[PAD{i}]" if token is None else token)
        types.append(_type(token, added.get(i), spec))
    return _Read(spec=spec, config=config, tokens=tokens, types=types, live=live)


def _type(token: str | None, added: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> TokenType:
    if token is None:
        return TokenType.UNUSED
    if token == spec["model"].get("unk_token"):
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    return TokenType.BYTE if spec["model"].get("byte_fallback") and BYTE.fullmatch(token) else TokenType.NORMAL


def _add_sentencepiece(writer: GGUFWriter, read: _Read) -> None:
    """Scores stand for merges there: the pair that is merged first makes the token with the highest."""
    rank: dict[str, int] = {}
    for i, merge in enumerate(read.spec["model"]["merges"]):
        rank.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), i)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(read.tokens)
    writer.add_token_scores(
        [-float(rank.get(t, len(rank) if k is TokenType.NORMAL else 0)) for t, k in zip(read.tokens, read.types, strict=True)]
    )
    writer.add_token_types(read.types)
    writer.add_add_space_prefix('"prepend":"▁"' in json.dumps(read.spec.get("normalizer"), ensure_ascii=False, separators=(",", ":")))


def _pre(spec: Mapping[str, Any]) -> str:
    whole = spec.get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    kinds = [p.get("type") for p in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not parts[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    if not spec["model"]["merges"]:
        return "gpt-2"  # nothing is merged, so it does not matter where text is split
    raise _unsupported(f"a way to split text ({', '.join(map(str, kinds))}) for which llama.cpp has no name")


def _add_special(writer: GGUFWriter, read: _Read) -> None:
    ids: dict[str, int] = {}
    for kind, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        named = read.config.get(f"{kind}_token")
        token = named.get("content") if isinstance(named, dict) else named
        if token is not None and (found := read.live.token_to_id(token)) is not None:
            ids[kind] = found
            add(found)
    encoded = read.live.encode("a").ids
    writer.add_add_bos_token("bos" in ids and encoded[:1] == [ids["bos"]])
    writer.add_add_eos_token("eos" in ids and encoded[-1:] == [ids["eos"]])


def _unsupported(what: str) -> InvalidRequest:
    return InvalidRequest(f"the tokenizer has {what}: no GGUF file can say that; export merged weights instead", code="gguf_not_supported")
