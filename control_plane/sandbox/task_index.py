"""Builds an index of contamination lists, which a tenant chooses, in a child process (:mod:`control_plane.sandbox.sandbox_parent`).

``python -m control_plane.sandbox.task_index DIRECTORY``: the order names shipped suites, the item files of other suites, and the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from control_plane.sandbox.sandbox_child import main
from engine.data import PassProgress


def _work(order: Mapping[str, Any], _: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:  # noqa: ARG001 (it has no parts to tell of)
    from engine.data import SuiteGrams, SuiteIndex, shipped_suites

    shipped = {suite.name: suite.grams() for suite in shipped_suites() if suite.name in order["shipped"]}
    registered = {label: SuiteGrams.of(_items(Path(path))) for label, path in order["suites"].items()}
    SuiteIndex.from_grams({**shipped, **registered}).save(Path(order["target"]))
    return {}


def _items(path: Path) -> Iterator[str]:
    with path.open() as stream:
        for line in stream:
            yield json.loads(line)


if __name__ == "__main__":
    main(_work)
