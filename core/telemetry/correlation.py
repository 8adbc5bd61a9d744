"""Correlation fields of the current work (tenant, job, attempt, request), which log lines and spans include automatically.

A scope is one mapping shared by everything inside it, including threads started with a copy of the context: a web framework may
authenticate a request in one thread and answer it in another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

VARIABLE = "FT_CONTEXT"
"""Environment variable of a workload: its fields as JSON, for every log line and span."""

_scope: ContextVar[dict[str, str | int] | None] = ContextVar("ft_context", default=None)
_process: dict[str, str | int] = {}
_whole: list[dict[str, str | int]] = []
"""Scopes of the whole process, innermost last."""


@contextlib.contextmanager
def scope(*, whole_process: bool = False, **fields: str | int | None) -> Iterator[None]:
    """Adds `fields` to log lines and spans of the wrapped work; with `whole_process`, in all threads of a single-purpose process."""
    known = {k: v for k, v in fields.items() if v is not None}
    present = {**(_scope.get() or {}), **known}
    token = _scope.set(present)
    if whole_process:
        _whole.append(present)
    try:
        yield
    finally:
        _scope.reset(token)
        if whole_process:
            _whole.remove(present)


def bind(**fields: str | int | None) -> None:
    """Adds fields to the current scope; does nothing without one."""
    present = _scope.get()
    if present is not None:
        present.update({k: v for k, v in fields.items() if v is not None})


def fields() -> Mapping[str, str | int]:
    """Returns the known fields of the current work."""
    return {**_process, **(_whole[-1] if _whole else {}), **(_scope.get() or {})}


def environment() -> dict[str, str]:
    """Returns the variable that passes the fields to a workload."""
    known = fields()
    return {VARIABLE: json.dumps(known)} if known else {}


def adopt(env: Mapping[str, str]) -> None:
    """Adopts the fields in the process's environment; ignores an unreadable variable."""
    with contextlib.suppress(ValueError):
        given = json.loads(env.get(VARIABLE) or "{}")
        if isinstance(given, dict):
            _process.update({str(k): v for k, v in given.items() if isinstance(v, str | int)})
