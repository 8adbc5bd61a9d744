"""Refuses what a request demands of its answer and this server does not enforce: an answer that ignores it could pass for one that follows it."""

from __future__ import annotations

from typing import Any

from resources.inference.answers import RequestError
from resources.inference.schemas import ChatRequest, CompletionRequest

INSTEAD = "Describe them in the messages and let the model answer with text, or ask an inference server that calls tools."


def check(body: ChatRequest | CompletionRequest) -> None:
    """``RequestError`` for a response format other than text, and for tools that the answer might call."""
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(
            f'response_format of type {str(kind)[:40]!r} is not enforced by this server; send {{"type": "text"}} or leave it out.',
            code="unsupported_parameter",
            param="response_format",
        )
    if isinstance(body, ChatRequest):
        _check_calls("tools", body.tools, "tool_choice", body.tool_choice)
        _check_calls("functions", body.functions, "function_call", body.function_call)


def _check_calls(name: str, offered: list[Any] | None, choice_name: str, choice: Any) -> None:
    if choice == "none":
        return
    if offered:
        what = f"{name} has {len(offered)} entries"
    elif choice not in (None, "auto"):
        name, what = choice_name, f"{choice_name} demands a call"
    else:
        return
    raise RequestError(
        f'{what}, and this server calls none; leave {name} out or send "{choice_name}": "none". {INSTEAD}',
        code="unsupported_parameter",
        param=name,
    )
