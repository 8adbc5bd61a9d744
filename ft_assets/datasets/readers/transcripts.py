r"""Conversations that are written out as one text: finds them, names their marks, and splits them into turns.

    Human/Assistant    "\n\nHuman: Hi\n\nAssistant: Hello"          (also User:, Bot:, AI:, System:)
    ### headings       "### Human: Hi\n### Assistant: Hello"        (also "### User:", "### Instruction:", "### Response:")
    Llama 2            "<s>[INST] <<SYS>>...<</SYS>> Hi [/INST] Hello </s>"

A text is a transcript only if it starts with a mark; "Human: " in the middle of prose is prose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
MARKERS = ("'Human: ...' and 'Assistant: ...' (or User, Bot, AI)", "'### Human:' and '### Assistant:'", "'[INST] ... [/INST]'")
ROLE_OF: Mapping[str, str] = {
    "human": USER, "user": USER, "instruction": USER, "prompter": USER,
    "assistant": ASSISTANT, "bot": ASSISTANT, "ai": ASSISTANT, "response": ASSISTANT, "gpt": ASSISTANT, "system": SYSTEM,
}  # fmt: skip
PLAIN = re.compile(r"(?:\A\s*|\n\s*\n)(Human|User|Assistant|Bot|AI|System)[ \t]?:")
"""Marks of the first form: at the start of the text, or after an empty line."""
PLAIN_CLOSE = re.compile(r"(?:\A\s*|\n\s*)(Human|User|Assistant|Bot|AI|System)[ \t]?:")
"""The same at the start of any line, for texts without empty lines between turns."""
HEADING = re.compile(r"\s*###[ \t]*(Human|User|Assistant|Bot|System|Instruction|Response|Prompter)[ \t]*:")
LLAMA_START = re.compile(r"\s*(?:<s>)?\s*\[INST\]")
LLAMA_TURN = re.compile(r"(?:<s>)?\s*\[INST\](.*?)\[/INST\](.*?)(?=(?:</s>)?\s*(?:<s>)?\s*\[INST\]|(?:</s>)?\s*\Z)", re.DOTALL)
LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>", re.DOTALL)
START = re.compile(r"\s*(?:(?:###[ \t]*)?(?:Human|User|Assistant|Bot|AI|System|Instruction|Response|Prompter)[ \t]*:|(?:<s>)?\s*\[INST\])")
"""How any transcript begins: a cheap look before anything else."""


def split_transcript(text: str) -> list[tuple[str, str]] | None:
    """(role, content) of each turn, white space around it removed; None for a text that does not start with a mark."""
    if not START.match(text):
        return None
    if LLAMA_START.match(text):
        return _llama(text)
    if HEADING.match(text):
        return _marked(text, HEADING)
    if not PLAIN.match(text):
        return None
    turns = _marked(text, PLAIN)
    return turns if len(turns) > 1 else _marked(text, PLAIN_CLOSE)


def transcript_marks(text: str) -> str | None:
    """The marks of a text that is a whole conversation of both sides, in words; None for any other text."""
    turns = split_transcript(text)
    if turns is None or not {USER, ASSISTANT} <= {role for role, _ in turns}:
        return None
    if LLAMA_START.match(text):
        return "'[INST]' and '[/INST]'"
    pattern, mark = (HEADING, "### ") if HEADING.match(text) else (PLAIN_CLOSE, "")
    found: dict[str, str] = {}
    for match in pattern.finditer(text):
        found.setdefault(ROLE_OF[match.group(1).lower()], match.group(1))
    return " and ".join(f"'{mark}{name}:'" for name in found.values())


def _marked(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """Turns between marks. The first mark of each role is that role's: "User:" inside an answer to "Human:" is part of it."""
    names: dict[str, str] = {}
    turns: list[tuple[str, str]] = []
    role, begin = "", 0
    for match in pattern.finditer(text):
        name = match.group(1)
        if names.setdefault(ROLE_OF[name.lower()], name) != name:
            continue
        if role:
            turns.append((role, text[begin : match.start()].strip()))
        role, begin = ROLE_OF[name.lower()], match.end()
    turns.append((role, text[begin:].strip()))
    return turns


def _llama(text: str) -> list[tuple[str, str]] | None:
    turns: list[tuple[str, str]] = []
    for match in LLAMA_TURN.finditer(text):
        asked, answered = match.group(1), match.group(2)
        if not turns and (system := LLAMA_SYSTEM.match(asked)):
            turns.append((SYSTEM, system.group(1).strip()))
            asked = asked[system.end() :]
        turns.append((USER, asked.strip()))
        if answer := answered.strip().removesuffix("</s>").strip():
            turns.append((ASSISTANT, answer))
    return turns or None
