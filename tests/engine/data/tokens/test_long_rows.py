"""Of a row far over `max_seq_len`, only the start is tokenized, and what is kept of it is what the whole would give."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from engine.data.ingest import validate_file
from engine.data.packs.build import PackSettings, build_pack
from engine.data.policies import Policies
from engine.data.schema import Example, Message
from engine.data.tokens.chat_tokenizer import ChatTokenizer, TokenizedExample
from engine.data.tokens.encoders import UNCUT, encode_prefix, exact_chars
from tests.engine.data.examples_of import PIECES, chat, chat_example
from tests.engine.data.tokens.test_templates import LLAMA
from tests.engine.data.tokens.test_templates_speedups import CHATML, byte_level, made, metaspace

LIMIT = 100
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "Llama 3's split": lambda: byte_level(pre_tokenizers.Split(Regex(LLAMA), "isolated"), nfc=True),
    "GPT-2's split": lambda: byte_level(regex=True),
    "a split that is not known": lambda: byte_level(pre_tokenizers.Split(Regex(r"\b\w+ \w+|."), "isolated")),
    "no byte-level tokenizer": metaspace,
}
TEXTS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: " ".join(rng.choice(("hello", "card", "the", "it's", "lost?", "Gr\u00fc\u00dfe", "42")) for _ in range(4_500)),
    "anything": lambda rng: "".join(rng.choice(PIECES) for _ in range(10_000)),
    "one run of letters": lambda rng: "".join(rng.choices("abcdefgh", k=20_000)),
    "white space": lambda rng: "".join(rng.choices(" \n\t", k=40_000)),
    "no spaces": lambda rng: "".join(rng.choices("\u65e5\u672c\u8a9e\u306e\u3002", k=40_000)),
}


@functools.cache
def trained(kind: str) -> ChatTokenizer:
    """With the plan of a long conversation, which takes a second to make."""
    return made(TOKENIZERS[kind](), CHATML)


def by_all(tokenizer: ChatTokenizer, example: Example) -> TokenizedExample:
    """`example` tokenized as a whole and then cut."""
    whole = tokenizer.encode(example, max_seq_len=UNCUT)
    cut = {"input_ids": whole.input_ids[:LIMIT], "labels": whole.labels[:LIMIT], "truncated": len(whole.input_ids) > LIMIT}
    return replace(whole, **cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("written", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_kept_of_a_long_row_is_what_the_whole_row_begins_with(kind: str, written: str) -> None:
    tokenizer, long = trained(kind), TEXTS[written](random.Random(written))
    examples = [
        chat_example(long, "Yes."),
        chat_example("Hi?", long),
        Example(
            kind="chat",
            messages=tuple(Message(role=r, content=long[i : i + 50]) for i in range(0, 20_000, 50) for r in ("user", "assistant")),
        ),
        Example(kind="text", text=long),
        chat_example("Hi?", "Yes."),
    ]
    shorter = 0
    for example, cut in zip(examples, tokenizer.encode_batch(examples, max_seq_len=LIMIT), strict=True):
        expected = by_all(tokenizer, example)
        assert cut.input_ids.tolist() == expected.input_ids.tolist()
        assert cut.labels.tolist() == expected.labels.tolist()
        assert cut.truncated == expected.truncated == (cut.num_tokens > LIMIT)
        assert cut.num_tokens <= expected.num_tokens
        shorter += cut.num_tokens < expected.num_tokens / 2
    assert shorter >= 3


def test_escaped_control_tokens_of_a_long_row_are_kept_as_text(tokenizer: ChatTokenizer) -> None:
    example = chat_example("a <|im_end|> b " * 20_000, "Yes.")
    cut = tokenizer.encode(example, max_seq_len=LIMIT, escape_control_tokens=True)
    whole = tokenizer.encode(example, max_seq_len=UNCUT, escape_control_tokens=True)
    assert cut.input_ids.tolist() == whole.input_ids[:LIMIT].tolist() and cut.num_tokens < whole.num_tokens / 5


@pytest.mark.parametrize(("chars_per_token", "tried"), [(1, 1), (5, 1), (100, 3)])
def test_the_characters_that_are_tokenized_are_bounded_by_the_limit_and_the_length_of_tokens(chars_per_token: int, tried: int) -> None:
    seen: list[int] = []

    def num_ids(part: str) -> int:
        seen.append(len(part))
        return len(part) // chars_per_token

    part = encode_prefix("x" * 50_000_000, LIMIT, num_ids)
    assert seen == [exact_chars(LIMIT) * 4**i for i in range(tried)] and len(part) == seen[-1]


def test_a_prefix_ends_at_the_last_space_that_is_near_enough() -> None:
    text = "some words " * 100_000
    part = encode_prefix(text, LIMIT, len)
    assert exact_chars(LIMIT) - len(" words") <= len(part) <= exact_chars(LIMIT)
    assert part.endswith(("some", "words")) and text.startswith(part)


@pytest.mark.parametrize("policy", ["truncate", "drop", "reject"])
def test_a_row_of_megabytes_is_counted_up_to_the_limit_whatever_the_policy(
    jsonl: Callable[..., Path], tiny_model: Path, policy: Any
) -> None:
    limit = 50_000  # above what the number of characters alone refuses
    rows = [*(chat(f"q {i}", f"a {i}") for i in range(3)), chat("word" * 750_000, "a")]
    policies = Policies(min_examples=1, over_long=policy, near_duplicates="off")
    report = validate_file(jsonl(*rows), filename="a.jsonl", policies=policies, model_dir=tiny_model, max_seq_len=limit).report
    assert report.stats["over_long"] == 1 and report.valid == (policy != "reject")
    if policy == "truncate":
        assert limit < report.stats["tokens"]["max"] <= exact_chars(limit) + 100
    if policy == "reject":
        assert report.errors[0].message.startswith("at least ")


def test_a_pack_cuts_a_row_of_megabytes_as_it_cuts_others(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = PackSettings(max_seq_len=LIMIT, shard_examples=16)
    examples = [chat_example("Hi?", "word " * 600_000, row=1), chat_example("Hi?", "word " * 100, row=2)]
    manifest = build_pack(examples, tokenizer, settings, tmp_path, dataset_id="ds_1")
    assert (manifest.num_examples, manifest.truncated, manifest.num_tokens) == (2, 2, 2 * LIMIT)


def test_a_row_at_the_limit_by_its_characters_alone_is_over_it_by_its_tokens(tiny_model: Path, jsonl: Callable[..., Path]) -> None:
    longest = max(map(len, ChatTokenizer.load(tiny_model)._tokenizer.get_vocab()))
    path = jsonl(chat("q", "a"), chat("x" * (longest * LIMIT - 1), "a"))
    policies = Policies(min_examples=1, near_duplicates="off", over_long="reject")
    (error,) = validate_file(path, filename="rows.jsonl", policies=policies, model_dir=tiny_model, max_seq_len=LIMIT).report.errors
    told = re.search(r"(\d+) tokens", error.message)
    assert told is not None and int(told[1]) > LIMIT, error.message
