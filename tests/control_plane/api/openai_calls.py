"""The calls of OpenAI's client that the platform answers: read off the installed client, and off the table in ``docs/api.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/api.md"
RESOURCES = ("files", "uploads", "fine_tuning", "models", "webhooks", "chat", "completions", "responses")
ROW = re.compile(r"^\| `(?P<call>[a-z_.]+)` \| (?:`(?P<method>[A-Z]+) (?P<path>/v1/\S+)`|none) \|", re.MULTILINE)
NOT_OFFERED = re.compile(r"are not offered:\s+(?P<calls>[^|]+?)\.\n\n")


def of_client(client: openai.OpenAI | openai.AsyncOpenAI) -> set[str]:
    """``files.create``, ``fine_tuning.jobs.checkpoints.list``, ...: every public method below the resources of the platform."""
    return {call for name in RESOURCES for call in _methods(getattr(client, name), name)}


def _methods(resource: Any, prefix: str) -> Iterator[str]:
    for name, member in inspect.getmembers(type(resource)):
        if name.startswith(("_", "with_")):
            continue
        if inspect.isfunction(member):
            yield f"{prefix}.{name}"
        else:
            yield from _methods(getattr(resource, name), f"{prefix}.{name}")


def documented() -> dict[str, tuple[str, str] | None]:
    """By call: method and path of the request that it makes; None for what the client does by itself."""
    rows = ROW.finditer(DOCUMENT.read_text())
    return {row["call"]: (row["method"], row["path"]) if row["method"] else None for row in rows}


def not_offered() -> set[str]:
    """The calls that the page names as not offered."""
    found = NOT_OFFERED.search(DOCUMENT.read_text())
    assert found is not None
    return set(re.findall(r"`([a-z_.]+)`", found["calls"]))


def is_route(route: tuple[str, str], request: tuple[str, str]) -> bool:
    """Whether a request of this method to this path is one of the documented route."""
    pattern = re.sub(r"\\\{[a-z_]+\\\}", "[^?]+", re.escape(route[1]))
    return route[0] == request[0] and re.fullmatch(pattern, request[1]) is not None
