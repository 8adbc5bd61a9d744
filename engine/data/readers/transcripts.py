r"""Conversations that are written out as one text: finds them, names their marks, and splits them into turns.

    Human/Assistant    "\n\nHuman: Hi\n\nAssistant: Hello"          (also User:, Bot:, AI:, System:)
    ### headings       "### Human: Hi\n### Assistant: Hello"        (also "### User:", "### Instruction:", "### Response:")
    Llama 2            "<s>[INST] <<SYS>>...<</SYS>> Hi [/INST] Hello </s>"

A text is a transcript only if it starts with a mark; "Human: " in the middle of prose is prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
MARKERS = ("'Human: ...' and 'Assistant: ...' (or User, Bot, AI)", "'### Human:' and '### Assistant:'", "'[INST] ... [/INST]'")
ROLE_OF: Mapping[str, str] = {
    "human": USER, "user": USER, "instruction": USER, "prompter": USER,
    "assistant": ASSISTANT, "bot": ASSISTANT, "ai": ASSISTANT, "response": ASSISTANT, "gpt": ASSISTANT, "system": SYSTEM,
}  # fmt: skip
START = re.compile(r"(?:###[ \t]*)?(?:Human|User|Assistant|Bot|AI|System|Instruction|Response|Prompter)[ \t]*:|(?:<s>\s*)?\[INST\]")
"""Start of any transcript, after white space: a cheap first check."""
PLAIN = re.compile(r"(?:\A|\n)(Human|User|Assistant|Bot|AI|System)[ \t]?:")
"""Marks of the first form: at the start of the text, or after an empty line, which :func:`_plain_marks` searches."""
PLAIN_CLOSE = re.compile(r"(?:\A|\n[^\S\n]*)(Human|User|Assistant|Bot|AI|System)[ \t]?:")
"""The same at the start of any line, for texts without empty lines between turns."""
HEADING = re.compile(r"###[ \t]*(Human|User|Assistant|Bot|System|Instruction|Response|Prompter)[ \t]*:")
LLAMA_START = re.compile(r"(?:<s>\s*)?\[INST\]")
LLAMA_OPEN, LLAMA_CLOSE, SYSTEM_OPEN, SYSTEM_CLOSE = "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"

# The patterns are for texts without white space before them, and none can match the same characters in two ways: a text of any
# length is looked through in time that grows with its length, whatever stands in it.


def begins_as_transcript(text: str) -> bool:
    """The first mark of a turn is at the start of `text`."""
    return START.match(text.lstrip()) is not None


def begins_as_llama(text: str) -> bool:
    return LLAMA_START.match(text.lstrip()) is not None


def split_transcript(text: str) -> list[tuple[str, str]] | None:
    """Returns (role, content) of each turn without surrounding white space; None for a text that does not start with a mark."""
    text = text.lstrip()
    if not START.match(text):
        return None
    if LLAMA_START.match(text):
        return _llama(text)
    if HEADING.match(text):
        return _marked(text, HEADING.finditer(text))
    if not PLAIN.match(text):
        return None
    turns = _marked(text, _plain_marks(text))
    return turns if len(turns) > 1 else _marked(text, PLAIN_CLOSE.finditer(text))


def transcript_marks(text: str) -> str | None:
    """Returns the marks of a text that is a whole conversation of both sides, in words; None for any other text."""
    turns = split_transcript(text)
    if turns is None or not {USER, ASSISTANT} <= {role for role, _ in turns}:
        return None
    text = text.lstrip()
    if LLAMA_START.match(text):
        return "'[INST]' and '[/INST]'"
    pattern, mark = (HEADING, "### ") if HEADING.match(text) else (PLAIN_CLOSE, "")
    found: dict[str, str] = {}
    for match in pattern.finditer(text):
        found.setdefault(ROLE_OF[match.group(1).lower()], match.group(1))
    return " and ".join(f"'{mark}{name}:'" for name in found.values())


def _plain_marks(text: str) -> Iterator[re.Match[str]]:
    """Yields marks at the start of the text and after an empty line; the line before each is read once."""
    for match in PLAIN.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if match.start(1) == 0 or not before or before.isspace():
            yield match


def _marked(text: str, marks: Iterable[re.Match[str]]) -> list[tuple[str, str]]:
    """Returns the turns between marks. Only the first mark of each role counts: "User:" inside an answer to "Human:" is part of it."""
    names: dict[str, str] = {}
    turns: list[tuple[str, str]] = []
    role, begin = "", 0
    for match in marks:
        name = match.group(1)
        if names.setdefault(ROLE_OF[name.lower()], name) != name:
            continue
        if role:
            turns.append((role, text[begin : match.start()].strip()))
        role, begin = ROLE_OF[name.lower()], match.end()
    turns.append((role, text[begin:].strip()))
    return turns


def _llama(text: str) -> list[tuple[str, str]] | None:
    """Returns the turns of a text in Llama's form, including a last question without its closing mark; None if no question is closed."""
    turns: list[tuple[str, str]] = []
    opened = text.find(LLAMA_OPEN)
    while opened >= 0:
        begin = opened + len(LLAMA_OPEN)
        closed = text.find(LLAMA_CLOSE, begin)
        if closed < 0:
            return [*turns, (USER, text[begin:].strip())] if turns else None
        requested = text[begin:closed].lstrip()
        end = requested.find(SYSTEM_CLOSE, len(SYSTEM_OPEN)) if not turns and requested.startswith(SYSTEM_OPEN) else -1
        if end >= 0:
            turns.append((SYSTEM, requested[len(SYSTEM_OPEN) : end].strip()))
            requested = requested[end + len(SYSTEM_CLOSE) :]
        turns.append((USER, requested.strip()))
        begin = closed + len(LLAMA_CLOSE)
        opened = text.find(LLAMA_OPEN, begin)
        if answer := _answer(text[begin:] if opened < 0 else text[begin:opened], more=opened >= 0):
            turns.append((ASSISTANT, answer))
    return turns


def _answer(text: str, *, more: bool) -> str:
    """Returns `text` without the marks that end one conversation and, if there is `more`, begin the next."""
    text = text.rstrip()
    if more:
        text = text.removesuffix("<s>").rstrip()
    return text.removesuffix("</s>").strip().removesuffix("</s>").strip()
