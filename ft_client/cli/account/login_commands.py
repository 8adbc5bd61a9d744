"""``ft login``: checks a key and stores it with the API's address."""

from __future__ import annotations

import os
import sys

import typer

from core.errors import InvalidRequest
from ft_client.cli import session
from ft_client.cli.output import Json, print_json, say


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Account")(login)


def login(as_json: Json = False) -> None:
    """Check and store the API's address and a key; both as options before the command, or the key at a prompt."""
    from ft_client.cli.remote import connect, require_answer

    url = session.api_url()
    key = session.given.api_key or os.environ.get("FT_API_KEY")
    if not key:
        require_answer(url)
        key = _ask(url)
    found = session.Credentials(url=url, api_key=key)
    with connect(found) as client:
        models = client.models.list().all()
    path = session.store(found)
    if as_json:
        print_json({"url": url, "credentials_file": str(path), "models": len(models)})
    else:
        say(f"logged in to {url}; the key is in {path}")


def _ask(url: str) -> str:
    if not sys.stdin.isatty():
        key = sys.stdin.readline().strip()
    else:
        key = str(typer.prompt(f"API key for {url}", hide_input=True)).strip()
    if not key:
        raise InvalidRequest(
            "no API key was given; type or paste it, send it on standard input (`ft login < key.txt`), or set FT_API_KEY", code="no_api_key"
        )
    return key
