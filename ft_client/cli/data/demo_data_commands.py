"""``ft demo-data``: the demo's files, for trying every other command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from core.errors import Conflict
from ft_client.cli.output import Json, print_json, say


def register(app: typer.Typer) -> None:
    app.command("demo-data", rich_help_panel="Data")(demo_data)


def demo_data(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to; created if missing.")], as_json: Json = False
) -> None:
    """Write the demo's support tickets: 1,500 rows to train on and 240 held out; the same bytes each time."""
    from ft_client.demo import tickets

    texts = {directory / name: text for name, text in tickets.files().items()}
    for path, text in texts.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != text.encode()):
            raise Conflict(f"{path} exists with other content; name another directory", code="file_exists", param="DIR")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    training, validation = (str(directory / name) for name in (tickets.TICKETS, tickets.HOLDOUT))
    following = f"ft check {shlex.quote(training)} --model demo-llama-3m"
    if as_json:
        rows = [text.count("\n") for text in texts.values()]
        print_json(
            {"training_file": training, "validation_file": validation, "rows": rows[0], "validation_rows": rows[1], "next": following}
        )
        return
    for path, text in texts.items():
        print(path)
        say(f"wrote {text.count(chr(10)):,} rows to {path}")
    say(f"next: {following}")
