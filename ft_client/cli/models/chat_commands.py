"""``ft chat``: talks to a base model or an adapter through the API's gateway."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.storable_text import shown_answer
from ft_client.cli.output import Json, print_json, say
from ft_client.cli.record_views import given
from ft_client.cli.remote import connect

if TYPE_CHECKING:
    from ft_client import FtClient


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Models")(chat)


def chat(
    model: Annotated[str, typer.Argument(help="Model name (`ft models`).")],
    prompt: Annotated[str | None, typer.Argument(help="One question; without it: a conversation, ended by Ctrl-D.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0)] = 0.0,
    as_json: Json = False,
) -> None:
    """Chat with a model; the response is streamed. `ft chat MODEL -` reads the question from standard input."""
    messages = [{"role": "system", "content": system}] if system else []
    options = {"temperature": temperature, **given(max_tokens=max_tokens)}
    with connect() as client:
        if prompt is not None or not sys.stdin.isatty():
            text = sys.stdin.read() if prompt in (None, "-") else prompt
            _ask(client, model, [*messages, {"role": "user", "content": text}], options, as_json=as_json)
            return
        say("Ctrl-D ends the conversation")
        while (question := _question()) is not None:
            messages.append({"role": "user", "content": question})
            answer = _ask(client, model, messages, options, as_json=as_json)
            messages.append({"role": "assistant", "content": answer})


def _question() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _ask(client: FtClient, model: str, messages: Sequence[Mapping[str, object]], options: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        answer = client.chat.create(model=model, messages=messages, **options)
        print_json(answer)
        return answer["choices"][0]["message"]["content"] or ""
    parts: list[str] = []
    for part in client.chat.stream(model=model, messages=messages, **options):
        print(part, end="", flush=True)
        parts.append(part)
    print(flush=True)
    text = "".join(parts)
    if not text.strip():
        say(shown_answer(text))
    return text
