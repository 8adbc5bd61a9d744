"""``python -m tools.client`` writes the client's types and its synchronous modules; ``--check`` only lists outdated files."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.client import formatting, synchronous, types

CLIENT = Path(__file__).resolve().parents[2] / "control_plane" / "client"


def generated() -> dict[Path, str]:
    """Returns the expected content of every generated file."""
    from control_plane.api.app import create_app

    document = types.with_streamed(create_app(None).openapi())  # type: ignore[arg-type]  # serves no requests
    made = types.modules(document, homes=types.homes_of()) | synchronous.modules(CLIENT / "asynchronous")
    return {CLIENT / name: text for name, text in formatting.formatted(made).items()}


def stale() -> list[Path]:
    """Returns generated files that are missing, outdated or no longer generated."""
    expected = generated()
    wrong = [path for path, text in expected.items() if not path.exists() or path.read_text() != text]
    kept = {path for folder in ("types", "synchronous") for path in (CLIENT / folder).rglob("*.py")}
    return sorted([*wrong, *(kept - set(expected))])


def write() -> None:
    expected = generated()
    for path in stale():
        if path not in expected:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(expected[path])


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{path} is out of date; run python -m tools.client" for path in stale()) or 0)
    write()
