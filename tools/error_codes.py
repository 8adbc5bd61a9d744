"""Error and reason codes: ``python -m tools.error_codes`` renders docs/errors.md from docs/errors.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCE, PAGE, WIDTH = DOCS / "errors.yaml", DOCS / "errors.md", 140
FIELDS = {"status", "fault", "where", "means", "next"}
FAULTS = {"", "user", "platform", "ambiguous", "user; platform in an evaluation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    name: str
    section: str
    where: str
    """Where the code appears besides HTTP; empty if only there, or in a command's output."""
    statuses: frozenset[str]
    """HTTP statuses; empty if the code does not occur over HTTP."""
    fault: str
    means: str
    next: str
    """What to do; empty if there is nothing to do."""


def load(source: Path = SOURCE) -> dict[str, Code]:
    """Return every code by name; ValueError if an entry is not complete, or a code has two."""
    found: dict[str, Code] = {}
    for section in _document(source)["sections"]:
        for names, entry in section.get("codes", {}).items():
            if not entry.get("means") or set(entry) - FIELDS or entry.get("fault", "") not in FAULTS:
                raise ValueError(f"{names}: an entry has means, and may have {sorted(FIELDS - {'means'})}")
            for name in names.split(", "):
                if name in found:
                    raise ValueError(f"{name} has two entries; say in one where it appears")
                found[name] = _code(name, section, entry)
    return found


def page() -> str:
    """Return docs/errors.md."""
    document = _document(SOURCE)
    return str(document["intro"]) + "".join(part for section in document["sections"] for part in _section(section))


def _document(source: Path) -> Any:
    return yaml.safe_load(source.read_text(encoding="utf-8"))


def _code(name: str, section: dict[str, Any], entry: dict[str, Any]) -> Code:
    return Code(
        name=name,
        section=section["title"],
        where=entry.get("where", section.get("where", "")),
        statuses=frozenset(str(entry["status"]).split(", ")) if "status" in entry else frozenset(),
        fault=entry.get("fault", ""),
        means=entry["means"],
        next=entry.get("next", ""),
    )


def _section(section: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {section['title']}\n"
    if intro := section.get("intro"):
        yield f"\n{fill(intro, WIDTH, break_long_words=False, break_on_hyphens=False)}\n"
    for names, entry in section.get("codes", {}).items():
        for name in names.split(", "):
            yield f"\n### `{name}`\n"
        code = _code(names, section, entry)
        told = [", ".join(sorted(code.statuses)), code.where, code.fault and f"fault: {code.fault}"]
        head = "; ".join(part for part in told if part)
        text = f"{f'*{head[0].upper()}{head[1:]}.* ' if head else ''}{code.means}{f' **Next:** {code.next}' if code.next else ''}"
        yield f"\n{fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
