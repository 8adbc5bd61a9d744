"""The forms in which rows are hashed and compared equal their plain definitions, for any text."""

from __future__ import annotations

import hashlib
import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.dedup.normalization import CodePoints, fold, near_text
from engine.data.identity import content_hash, content_hashes
from engine.data.schema import Example, Message, ToolCall
from tests.engine.data.examples_of import chat_example, varied_chats

ANY_TEXT = st.text(
    st.one_of(
        st.characters(exclude_characters="\0"),  # lone surrogates too; NUL is in no text that is accepted
        st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b"),
        st.sampled_from("aZ09éẞßﬁ\u0130\u0131Σς日本語e\u0301\u00bdK①🙂\ud800"),
    ),
    max_size=40,
)


def folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


@settings(deadline=None)  # the first call loads or compiles the kernel
@given(st.lists(ANY_TEXT, max_size=6))
def test_folding_equals_nfkc_casefold_and_split(texts: list[str]) -> None:
    got = fold(texts)
    assert len(got) == len(texts)
    assert [got.text(i) for i in range(len(texts))] == [folded(text) for text in texts]


def test_folding_knows_every_white_space_character() -> None:
    texts = [f"A{chr(c)}{chr(c)}B{chr(c)}" for c in range(0x3100)]
    got = fold(texts)
    wrong = [hex(c) for c in range(0x3100) if got.text(c) != folded(texts[c])]
    assert not wrong
    assert sum(chr(c).isspace() for c in range(0x110000)) == sum(chr(c).isspace() for c in range(0x3100)) > 20


def test_folding_takes_texts_one_by_one() -> None:
    texts = ["", "  Padded ", "plain", "", "\uff26\uff35\uff2c\uff2c width", "日本語"]
    together = fold(texts)
    assert [together.text(i) for i in range(len(texts))] == [fold([text]).text(0) for text in texts]
    assert together.text(1) == "padded" and together.text(4) == "full width"


def test_code_points_cannot_be_written_to() -> None:
    for points in (fold(["abc"]), CodePoints(np.zeros(3, np.uint32), np.array([0, 3]))):
        assert points.codes.dtype == np.uint32 and points.offsets.dtype == np.int64
        with pytest.raises(ValueError, match="read-only"):
            points.codes[0] = 1


def test_what_is_compared_leaves_out_system_messages_and_nothing_else() -> None:
    call = ToolCall(name="look_up", arguments={"city": "Köln"})
    example = Example(
        kind="preference",
        messages=(
            Message(role="system", content="Be kind."),
            Message(role="user", content="weather?"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="rain"),
        ),
        chosen=(Message(role="assistant", content="It rains."),),
        rejected=(Message(role="assistant", content="No idea."),),
    )
    assert near_text(example) == 'weather?\nlook_up {"city": "Köln"}\nrain\nIt rains.\nNo idea.'
    assert near_text(Example(kind="text", text="As it\nstands ")) == "As it\nstands "


def plain_content_hash(example: Example) -> str:
    """The definition, word for word."""

    def plain(text: str) -> str:
        return " ".join(unicodedata.normalize("NFC", text).split())

    spelled = example.kind + ("" if example.label is None else str(example.label))
    for group in (example.messages, example.chosen, example.rejected):
        spelled += "\0"
        for message in group:
            parts = [message.role, plain(message.content or "")]
            for call in message.tool_calls:
                parts += [plain(call.name), plain(json.dumps(call.arguments, sort_keys=True))]
            spelled += "".join("\0" + part for part in parts)
    if example.text is not None:
        spelled += "\0\0" + plain(example.text)
    if example.tools:
        spelled += "\0\0\0" + plain(json.dumps(example.tools, sort_keys=True))
    return hashlib.sha256(spelled.encode("utf-8", "surrogatepass")).hexdigest()


@given(ANY_TEXT, ANY_TEXT)
def test_the_content_hash_is_the_hash_of_its_definition(question: str, answer: str) -> None:
    call = ToolCall(name=question, arguments={"b": answer, "a": 1})
    cases = [
        chat_example(question, answer),
        Example(kind="text", text=question),
        Example(kind="kto", messages=(Message(role="user", content=question), Message(role="assistant", content=answer)), label=False),
        Example(kind="chat", messages=(Message(role="assistant", content=answer, tool_calls=(call, call)),), tools=({"x": 1},)),
        Example(kind="preference", chosen=(Message(role="assistant", content=answer),), rejected=(Message(role="assistant"),)),
    ]
    assert [digest.hex() for digest in content_hashes(cases)] == [plain_content_hash(case) for case in cases]


def test_content_hashes_of_conversations_equal_their_definition() -> None:
    examples = varied_chats(200, seed=5)
    hashes = [content_hash(example) for example in examples]
    assert hashes == [plain_content_hash(example) for example in examples] == [h.hex() for h in content_hashes(examples)]
    assert len(set(hashes)) > 150


def test_spacing_and_composition_do_not_tell_rows_apart_but_case_does() -> None:
    base = content_hash(chat_example("Wo ist die Bäckerei?", "Dort."))
    assert content_hash(chat_example(" Wo  ist\tdie Ba\u0308ckerei?\n", "Dort.")) == base
    assert content_hash(chat_example("wo ist die Bäckerei?", "Dort.")) != base
