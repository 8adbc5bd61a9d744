"""Preferences and judged answers as chats of which only an answer carries loss."""

from __future__ import annotations

import msgspec

from engine.data.schema import Example


def preference_sides(example: Example) -> tuple[Example, Example]:
    """Returns the chosen and the rejected conversation as chats of which only the answer carries loss."""
    prompt = tuple(msgspec.structs.replace(m, weight=0) for m in example.messages)
    chosen, rejected = (
        Example(kind="chat", messages=(*prompt, *answers), tools=example.tools, row=example.row, template_kwargs=example.template_kwargs)
        for answers in (example.chosen, example.rejected)
    )
    return chosen, rejected


def judged_answer(example: Example) -> Example:
    """Returns a judged answer as a chat of which only the answer carries loss, whether it is good or bad."""
    *prompt, answer = example.messages
    quiet = (msgspec.structs.replace(m, weight=0) for m in prompt)
    return Example(kind="chat", messages=(*quiet, answer), tools=example.tools, row=example.row, template_kwargs=example.template_kwargs)
