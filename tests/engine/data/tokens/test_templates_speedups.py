"""The short ways (patterns, segments, remembered words) never change an id: compared with the long ways on random and hostile text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.data.schema import Example, Message
from engine.data.tokens.assistant_turns import Turns
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.encoders import Offsets, Segments
from engine.data.tokens.patterns import Pattern, Patterns
from engine.data.tokens.templates import ChatTemplate
from engine.data.tokens.words import SPLITS, Words
from tests.engine.data.conftest import CORPUS
from tests.engine.data.examples_of import PIECES, varied_chats
from tests.engine.data.tokens.test_templates import LLAMA, by_offsets, same

WORD_SPLITS = sorted(s for s in SPLITS if " ?" in s)
DIGITS = sorted(s for s in SPLITS if " ?" not in s)
ATOMS = [
    *PIECES,
    " ",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x1c",
    "\x85",
    "a",
    "B",
    "it's",
    "5",
    "12",
    "!",
    "...",
    "/",
]
ATOMS += [
    "\u0301",
    "\u0338",
    "\u0e01\u0e33",
    "\u1100\u1161",
    "\ufb01",
    "\u017f",
    "'S",
    "=\u0338",
    "</think>",
    "<|im",
    "_",
    "\u00ad",
    "\ue000",
    "\U000f0000",
]


def byte_level(*steps: Any, nfc: bool = False, regex: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "".join(ATOMS * 3)], trainer)
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def unpacked(ids: bytes) -> list[int]:
    return memoryview(ids).cast("i").tolist()


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("split", [*WORD_SPLITS, *DIGITS])
def test_the_ids_of_words_are_the_ids_of_the_text(split: str, nfc: bool) -> None:
    rng = random.Random(split)
    tokenizer = byte_level(pre_tokenizers.Split(Regex(split), "isolated"), nfc=nfc, regex=split in DIGITS)
    words = Words(tokenizer)
    texts = ["".join(rng.choice(ATOMS) for _ in range(rng.randint(0, 40))) for _ in range(400)]
    assert words._cuts
    for batch in (texts, texts[::-1]):  # new, then remembered
        assert [unpacked(ids) for ids in words.encode(batch)] == [ids_of(tokenizer, text) for text in batch]
    assert len(words._others) > 100


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(
        st.text(st.sampled_from("ab1 \n\t.'\u00e9\u0301\u65e5/\r") | st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4
    )
)
def test_no_text_at_all_has_other_ids_by_its_words(texts: list[str]) -> None:
    for tokenizer, words in SHARED:
        assert [unpacked(ids) for ids in words.encode(texts)] == [ids_of(tokenizer, text) for text in texts]


SHARED = [(t, Words(t)) for t in (byte_level(pre_tokenizers.Split(Regex(LLAMA), "isolated"), nfc=True), byte_level(regex=True))]


def test_a_pre_tokenizer_that_is_not_known_is_given_whole_texts() -> None:
    words = Words(byte_level(pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated")))
    assert not words._cuts
    assert [unpacked(i) for i in words.encode(["a b c", "a b c"])] == [ids_of(words._tokenizer, "a b c")] * 2


def metaspace() -> Tokenizer:
    """As Llama 2's and Mistral's first: a space before the first word, SentencePiece's sign for spaces, bytes as a last resort."""
    vocab = ["<unk>", "<|im_start|>", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz\n."]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def made(tokenizer: Tokenizer, template: str) -> ChatTokenizer:
    return ChatTokenizer(tokenizer, template=template, config={"eos_token": "<|im_end|>"}, digests=("", ""))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_tokenizer_that_is_not_byte_level_is_asked_for_offsets() -> None:
    fast, slow = made(metaspace(), CHATML), by_offsets(made(metaspace(), CHATML))
    assert isinstance(fast._encoder, Offsets)
    examples = varied_chats(40, weights=True)
    assert all(same(*pair) for pair in zip(*(t.encode_batch(examples, max_seq_len=10**6) for t in (fast, slow)), strict=True))
    assert fast.count_tokens_batch(examples).tolist() == [
        len(ids_of(metaspace(), e.text)) for e in slow.encode_batch(examples, max_seq_len=10**6)
    ]


@pytest.mark.parametrize("odd", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_added_tokens_that_eat_their_neighbours_are_left_to_offsets(odd: dict[str, bool]) -> None:
    tokenizer = byte_level(regex=True)
    tokenizer.add_tokens([AddedToken("<x>", special=False, **odd)])
    assert isinstance(made(tokenizer, CHATML)._encoder, Offsets)
    assert isinstance(made(byte_level(regex=True), CHATML)._encoder, Segments)


ROLES = ("system", "user", "assistant")
COPIES = [
    CHATML,
    CHATML.replace("m.content", "m.content | trim"),
    CHATML.replace("m.content", "m['content'].strip()"),
    CHATML.replace("m.content", "(m.content or 'nothing') | string"),
    CHATML.replace("m.content", "m.content ~ '!'"),
    CHATML.replace("m.content", "'secret' if 'password' in m.content else m.content"),
    CHATML.replace("m.content", "m.content.lstrip('\n') if m.content.startswith('a') else m.content"),
]
LOOKS = [
    CHATML.replace("m.content", part)
    for part in (
        "m.content | upper",
        "m.content | tojson",
        "m | tojson",
        "m.content[:5]",
        "m.content | length",
        "m.content.replace('a', 'b')",
        "m.content.split('x')[0]",
        "'%s' % m.content",
        "'%s' % (m.content,)",
        "m.content | e",
        "[m.content] | join",
        "m.content if m.content > 'k' else 'low'",
        "m.content if messages[0].content == m.content else 'other'",
        "{m.content: 1} | tojson",
        "m.content | wordwrap(5)",
        "m.content.format(1)",
        "m.content | list",
    )
]
LOOKS.append(CHATML.replace("{{ m.content }}", "{% set c %}{{ m.content }}{% endset %}{{ 'x' if 'password' in c else c }}"))
LOOKS.append(CHATML.replace("{{ m.content }}", "{% set c = 'a' ~ m.content %}{{ 'x' if 'password' in c else c }}"))
LOOKS.append(
    "{% macro f(c) %}{{ c }}{% endmacro %}"
    + CHATML.replace("m.content", "f(m.content) if 'password' in f(m.content) else f(m.content) + '!'")
)
CONTENTS = ["", " ", "my password", "\nabc\n", "a{{ b }}", "<b>&'\"\\", "Ab  c", "\u00e9\n", "x%s", "low"]


def by_both(template: str, contents: tuple[str, ...]) -> tuple[Any, Any, bool]:
    """(text, turns) by the pattern and by the template, and whether there is a pattern that holds."""
    tokenizer = made(byte_level(regex=True), template)
    pattern = pattern_of(template, tokenizer)
    messages = tuple(Message(role=r, content=c) for r, c in zip(ROLES, contents, strict=True))  # type: ignore[arg-type]
    fast, slow = tokenizer, by_offsets(made(byte_level(regex=True), template))
    one, other = (t.encode(Example(kind="chat", messages=messages), max_seq_len=10**6) for t in (fast, slow))
    return one, other, pattern is not None and pattern.holds(contents)


def pattern_of(template: str, tokenizer: ChatTokenizer) -> Pattern | None:
    parsed = ChatTemplate(template, variables={})
    return Patterns(parsed, Turns(parsed, tokenizer.control_token_pattern)).find(ROLES)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", COPIES)
def test_a_template_that_copies_content_is_rendered_once_and_filled_in(template: str) -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(25):
        one, other, holds = by_both(template, tuple(rng.choice(CONTENTS) for _ in ROLES))
        assert same(one, other)
        held += holds
    assert held > 2


@pytest.mark.parametrize("template", LOOKS)
def test_a_template_that_looks_at_content_renders_every_row(template: str) -> None:
    pattern = pattern_of(template, made(byte_level(regex=True), template))
    assert pattern is None or not pattern.holds(("system", "a user", "xyz"))
