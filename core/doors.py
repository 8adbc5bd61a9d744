"""The door of a package: names of its modules, each imported when it is first used, so that a door costs nothing to open."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of `package`: it offers what its ``__init__`` imports under ``if TYPE_CHECKING:``.

    The list is read from the source, so that type checkers, import contracts and the running program share one.
    """

    @cache
    def offered() -> dict[str, str]:
        loader: Any = sys.modules[package].__loader__
        body = ast.parse(loader.get_source(package)).body
        guarded = [n for b in body if isinstance(b, ast.If) for n in b.body if isinstance(n, ast.ImportFrom) and n.module]
        return {name.name: str(n.module) for n in guarded for name in n.names}

    def get(name: str) -> Any:
        room = None if name.startswith("__") else offered().get(name)
        if room is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(room), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(offered())
