"""A preview shows what is trained, to the character, and cannot steer the terminal it is shown on."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from core.errors import InvalidRequest
from core.typed_json import from_json
from engine.data.row_preview import TRAINED, Preview, preview, preview_lines
from engine.data.schema import Example, Message, ToolCall
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from tests.engine.data.examples_of import chat_example, varied_chats


def preference() -> Example:
    good, bad = ((Message(role="assistant", content=c),) for c in ("Gladly.", "No."))
    return Example(kind="preference", messages=(Message(role="user", content="Help?"),), chosen=good, rejected=bad, row=3)


def test_spans_are_the_loss_by_token_and_by_character(tokenizer: ChatTokenizer) -> None:
    examples = varied_chats(40, weights=True)
    shown = preview(examples, tokenizer, max_seq_len=10**6, num_examples=40)
    assert len(shown) == 40
    for example, one in zip(examples, shown, strict=True):
        labels = tokenizer.encode(example, max_seq_len=10**6).labels
        trained = {i for span in one.loss_spans for i in range(span.start, span.end)}
        assert trained == {i for i, label in enumerate(labels.tolist()) if label != IGNORE}
        for span in one.loss_spans:
            assert one.text[span.start_char : span.end_char] == span.text == tokenizer.decode(one.input_ids[span.start : span.end])
    assert sum(len(one.loss_spans) for one in shown) > 40  # several turns were seen


def test_a_preference_is_shown_as_its_two_sides(tokenizer: ChatTokenizer) -> None:
    chosen, rejected = preview([preference()], tokenizer, max_seq_len=1000)
    assert [(p.row, p.side) for p in (chosen, rejected)] == [(3, "chosen"), (3, "rejected")]
    assert [[s.text for s in p.loss_spans] for p in (chosen, rejected)] == [["Gladly.<|im_end|>"], ["No.<|im_end|>"]]


def test_what_is_cut_is_shown_as_cut(tokenizer: ChatTokenizer) -> None:
    (whole,) = preview([chat_example("Hi?", "Yes indeed.")], tokenizer, max_seq_len=1000)
    (cut,) = preview([chat_example("Hi?", "Yes indeed.")], tokenizer, max_seq_len=whole.loss_spans[0].start + 3)
    assert (whole.truncated, cut.truncated, cut.num_tokens) == (False, True, whole.num_tokens)
    assert cut.text == whole.text
    assert cut.text[: cut.kept_chars].endswith("assistant\nYes")
    assert "\n".join(preview_lines(cut, colour=False)).endswith("{+Yes+}{- indeed.<|im_end|>\n-}")


def test_a_text_is_shown_with_the_token_that_ends_it(tokenizer: ChatTokenizer) -> None:
    (shown,) = preview([Example(kind="text", text="abc")], tokenizer, max_seq_len=100)
    assert shown.text == "abc<|im_end|>"
    assert list(preview_lines(shown, colour=False)) == ["row 0 (text): 4 tokens, 3 with loss", "a{+bc<|im_end|>+}"]


def test_a_row_without_loss_says_so(tokenizer: ChatTokenizer) -> None:
    silent = Example(kind="chat", messages=(Message(role="user", content="Hi?"), Message(role="assistant", content="Yes.", weight=0)))
    (shown,) = preview([silent], tokenizer, max_seq_len=100)
    lines = list(preview_lines(shown, colour=False))
    assert "  no loss: no token of this row is trained" in lines
    (shown,) = preview([chat_example("Hi?", "Yes.")], tokenizer, max_seq_len=100)
    assert not any("no loss" in line for line in preview_lines(shown, colour=False))


def test_lines_mark_the_loss_with_and_without_colour(tokenizer: ChatTokenizer) -> None:
    (shown,) = preview([chat_example("Hi?", "Yes.", row=7)], tokenizer, max_seq_len=100)
    plain, colour = ("\n".join(preview_lines(shown, colour=c)) for c in (False, True))
    assert "assistant\n{+Yes.<|im_end|>+}" in plain
    assert "\x1b" not in plain
    assert f"assistant\n{TRAINED}Yes.<|im_end|>" in colour


@pytest.mark.parametrize("colour", [False, True])
def test_content_cannot_steer_the_terminal(tokenizer: ChatTokenizer, colour: bool) -> None:
    (shown,) = preview([chat_example("a\x1b[2Jb\r", "c\u202ed\x07")], tokenizer, max_seq_len=100)
    lines = "\n".join(preview_lines(shown, colour=colour))
    assert "\\u001b[2Jb\\u000d" in lines and "c\\u202ed\\u0007" in lines
    assert "\x1b[2J" not in lines and "\x07" not in lines


def test_an_escaped_control_token_is_shown_as_the_text_it_is(tokenizer: ChatTokenizer) -> None:
    (shown,) = preview([chat_example("<|im_end|>?", "Yes.")], tokenizer, max_seq_len=1000, escape_control_tokens=True)
    assert "user\n<|im_end|>?<|im_end|>" in shown.text
    assert shown.input_ids.count(tokenizer.eos_token_id) == 2


def test_a_preview_survives_json(tokenizer: ChatTokenizer) -> None:
    for one in preview([preference(), chat_example("a", "b")], tokenizer, max_seq_len=100):
        assert from_json(Preview, json.loads(json.dumps(asdict(one)))) == one


LONG = "word" * 750_000
HI, YES = Message(role="user", content="Hi?"), Message(role="assistant", content="Yes.")
HUGE = {
    "content": chat_example(LONG, "Hi.", row=7),
    "text": Example(kind="text", text=LONG, row=7),
    "reasoning": Example(kind="chat", messages=(HI, Message(role="assistant", content="Yes.", reasoning=LONG)), row=7),
    "tool calls": Example(
        kind="chat", messages=(HI, Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"a": [LONG]}),))), row=7
    ),
    "tools": Example(kind="chat", messages=(HI, YES), tools=({"type": "function", "function": {"name": "f", "description": LONG}},), row=7),
    "rejected": Example(kind="preference", messages=(HI,), chosen=(YES,), rejected=(Message(role="assistant", content=LONG),), row=7),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_row_of_3_mb_is_refused_before_it_is_rendered_whichever_field_has_them(tokenizer: ChatTokenizer, case: str) -> None:
    too_long = r"row 7 has 3000\d\d\d characters, over the 1000000 that a preview shows; split the row"
    with pytest.raises(InvalidRequest, match=too_long) as refused:
        preview([HUGE[case]], tokenizer, max_seq_len=100)
    assert refused.value.code == "example_too_long"
