"""Options that several commands have, and what people write for them: times, durations, amounts, pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from core.errors import InvalidDataset, InvalidRequest
from ft_client.cli.commands import given, option

MICROS = 1_000_000
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Map = Annotated[
    str | None, typer.Option("--map", help="Columns of a CSV or Parquet file: `text=prompt,category=completion` (COLUMN=FIELD).")
]
Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="CHECK=VERDICT", help="Policy of a check, such as `pii=redact`; may be repeated."),
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding of the file if it is not UTF-8: windows-1252, utf-16, mac-roman, ...")
]
RowsAt = Annotated[str | None, typer.Option("--rows-at", metavar="KEY", help="Key of the rows, in a file that is one JSON object.")]


def unix_seconds(text: str | None, param: str) -> int | None:
    """Parse ``2026-11-21``, ``2026-11-21T15:04`` (UTC unless stated) or seconds since 1970; None for None."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    if (moment := _moment(text)) is None:
        raise InvalidRequest(f"{text!r} is not a time; write 2026-11-21, 2026-11-21T15:04 or seconds since 1970", param=param)
    return int(moment.timestamp())


def moment_of(text: str | None, name: str) -> datetime | None:
    """Parse a day or a time, in UTC unless stated; None for None."""
    if text is None:
        return None
    if (moment := _moment(text)) is None:
        raise typer.BadParameter(f"{name} {text!r} is not a date: write 2026-01-31 or 2026-01-31T12:00")
    return moment


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def span_s(text: str | None) -> int | None:
    """Parse ``30d``, ``12h``, ``90min``, ``45s`` or ``45`` into seconds; None for None."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    if not number.isdecimal() or unit not in UNITS:
        raise InvalidRequest(f"{text!r} is not a duration; write 30d, 12h, 90min or seconds", param="expires_in")
    return int(number) * UNITS[unit]


def micros_of(text: str) -> int:
    """Parse ``-99.50`` into micro-dollars, exactly, without a float."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    whole, _, rest = digits.partition(".")
    if not whole.isdecimal() or (rest and not rest.isdecimal()) or len(rest) > 6 or len(whole) > 12:
        raise typer.BadParameter(f"{text!r} is not an amount in dollars with at most six decimals: 250 or 99.50")
    return sign * (int(whole) * MICROS + int(rest.ljust(6, "0") or "0"))


def percents(text: str | None) -> list[int] | None:
    """Parse ``50,80,100``; None for None."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of percents: 50,80,100")
    return [int(part) for part in parts]


def parse_value(text: str) -> object:
    """Parse JSON; anything else is text (``auto``)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_hyperparameters(pairs: Sequence[str]) -> Mapping[str, object]:
    """Parse ``n_epochs=3`` into ``{"n_epochs": 3}``."""
    found = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not (name and sep and value):
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE; write --hp n_epochs=3")
        found[name] = parse_value(value)
    return found


def parse_map(text: str | None) -> dict[str, str] | None:
    """Parse ``text=prompt`` into ``{"text": "prompt"}``; a usage error for anything else."""
    from engine.data import parse_column_map

    try:
        return None if text is None else parse_column_map(text)
    except InvalidDataset as error:
        raise typer.BadParameter(error.message) from None


def parse_policies(pairs: Sequence[str] | None, *, encoding: str | None, rows_at: str | None) -> Mapping[str, object] | None:
    """Parse ``pii=redact`` into ``{"pii": "redact"}``, numbers as numbers, and add how the file is read; None if nothing is given."""
    found: dict[str, object] = {}
    for pair in pairs or ():
        name, sep, value = pair.partition("=")
        if not (name.strip() and sep and value.strip()):
            raise typer.BadParameter(f"{pair!r} is not CHECK=VERDICT; write --policy pii=redact")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return {**found, **given(encoding=encoding, rows_at=rows_at)} or None


Lifetime = option("--expires-in", "30d, 12h or seconds; never if left out.", metavar="SPAN", parser=span_s, type=int | None)
