"""Transcripts of any text: split as the plain patterns say, and in time that grows with the text, whatever stands in it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.readers.transcripts import ROLE_OF, begins_as_transcript, split_transcript, transcript_marks
from engine.data.shapes import to_example

NAMES = "(Human|User|Assistant|Bot|AI|System)"
PLAIN = re.compile(rf"(?:\A\s*|\n\s*\n){NAMES}[ \t]?:")
PLAIN_CLOSE = re.compile(rf"(?:\A\s*|\n\s*){NAMES}[ \t]?:")
HEADING = re.compile(r"\s*###[ \t]*(Human|User|Assistant|Bot|System|Instruction|Response|Prompter)[ \t]*:")
LLAMA = re.compile(r"\s*(?:<s>)?\s*\[INST\]")
LLAMA_TURN = re.compile(r"\[INST\](.*?)\[/INST\](.*?)(?=(?:</s>)?\s*(?:<s>)?\s*\[INST\]|(?:</s>)?\s*\Z)", re.DOTALL)
LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>", re.DOTALL)
"""What the marks are, in patterns that are plain to read, and far too slow for long texts."""

Turns = list[tuple[str, str]]


def reference(text: str) -> Turns | None:
    if LLAMA.match(text):
        return llama_reference(text)
    if HEADING.match(text):
        return marked_reference(text, HEADING)
    if not PLAIN.match(text):
        return None
    turns = marked_reference(text, PLAIN)
    return turns if len(turns) > 1 else marked_reference(text, PLAIN_CLOSE)


def marked_reference(text: str, pattern: re.Pattern[str]) -> Turns:
    first: dict[str, str] = {}
    marks = [m for m in pattern.finditer(text) if first.setdefault(ROLE_OF[m[1].lower()], m[1]) == m[1]]
    ends = [m.start() for m in marks[1:]] + [len(text)]
    return [(ROLE_OF[m[1].lower()], text[m.end() : end].strip()) for m, end in zip(marks, ends, strict=True)]


def llama_reference(text: str) -> Turns | None:
    turns: Turns = []
    end = 0
    for match in LLAMA_TURN.finditer(text):
        asked, end = match[1], match.end()
        if not turns and (system := LLAMA_SYSTEM.match(asked)):
            turns.append(("system", system[1].strip()))
            asked = asked[system.end() :]
        turns.append(("user", asked.strip()))
        if answer := match[2].strip().removesuffix("</s>").strip():
            turns.append(("assistant", answer))
    if turns and "[INST]" in text[end:]:
        turns.append(("user", text[end:].partition("[INST]")[2].strip()))
    return turns or None


PIECES = (
    "Human:", "Assistant :", "User:", "Bot\t:", "AI:", "System:", "Human", ":", "### ", "###", "### Human:", "###Assistant :",
    "### Response:", "[INST]", "[/INST]", "<s>", "</s>", "<<SYS>>", "<</SYS>>", "\n", "\n\n", "\n \n", " ", "\t", "\r\n", "\x85", "hi",
    "x",
)  # fmt: skip
STARTS = ("", "Human:", "\n\nHuman:", " \n User:", "### Human:", "\n###Instruction:", "[INST]", "<s>[INST]", " <s> [INST] <<SYS>>")
seen: set[str] = set()


@settings(max_examples=3000, deadline=None, derandomize=True)  # the test below wants every form met
@given(start=st.sampled_from(STARTS), pieces=st.lists(st.sampled_from(PIECES), max_size=24))
def test_any_mixture_of_marks_is_split_as_the_plain_patterns_say(start: str, pieces: list[str]) -> None:
    text = start + "".join(pieces)
    expected = reference(text)
    assert split_transcript(text) == expected
    assert expected is None or begins_as_transcript(text)
    seen.add("none" if expected is None else f"{text.lstrip()[:1]} {min(len(expected), 3)}")


def test_the_property_above_met_every_form_with_several_turns() -> None:
    assert seen >= {"none", "H 3", "# 3", "[ 3", "< 3"}


def test_a_last_question_that_is_not_closed_is_a_turn_too() -> None:
    turns = split_transcript("[INST] Hi [/INST] Hello </s><s>[INST] And now?")
    assert turns == [("user", "Hi"), ("assistant", "Hello"), ("user", "And now?")]
    assert split_transcript("[INST] half") is None


MIB = 1 << 20
OPENINGS = ("", "Human: hi", "### Human: hi", "[INST] hi [/INST]", "[INST] <<SYS>>", "<s>")
REPEATED = (
    " ", "\n", "\t", "\r\n", "\n ", " \n", "\x85", "#", "### ", "###", "<s>", "</s>", " <s> ", "[INST]", "[/INST]", "[INST] ", "<<SYS>>",
    "<</SYS>>", "Human:", "\nHuman:", "\n\nHuman:", "\n\n Assistant", "Human", "### Human:", "###Human ", "[INST][/INST]", "<s>\n[INST]",
)  # fmt: skip


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_mebibyte_of_one_mark_is_looked_through_once(opening: str) -> None:
    """With a time that grows with the square, each of these takes hours."""
    for piece in REPEATED:
        text = opening + piece * (MIB // len(piece)) + "x"
        turns = split_transcript(text)
        marks = transcript_marks(text)
        assert (marks is None) or turns
        assert sum(len(content) for _, content in turns or ()) <= len(text)


@pytest.mark.parametrize("field", ["prompt", "completion"])
def test_a_row_with_a_mebibyte_of_white_space_after_a_mark_is_read(field: str) -> None:
    value = {"prompt": "a", "completion": "b", field: "[INST] hi [/INST]" + " " * MIB + "x"}
    example, problems = to_example(value, "prompt_completion", row=1)
    assert example is None
    assert [p.code for p in problems] == ["transcript_text"]
