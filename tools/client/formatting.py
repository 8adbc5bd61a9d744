"""Formatting of generated text with this repository's formatter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

RUFF = Path(sys.executable).parent / "ruff"
CONFIG = Path(__file__).resolve().parents[2] / "pyproject.toml"


def formatted(texts: Mapping[str, str]) -> dict[str, str]:
    """Formats `texts`, which are keyed by file name, and sorts their imports."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, text in texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        known = ["--config", 'lint.isort.known-first-party = ["control_plane", "ft_assets"]']
        for command in (["check", "--quiet", "--fix", "--unsafe-fixes", "--select", "I,F401,UP028", *known], ["format", "--quiet"]):
            subprocess.run([RUFF, *command, "--no-cache", "--config", CONFIG, root], check=True)
        return {name: (root / name).read_text() for name in texts}
