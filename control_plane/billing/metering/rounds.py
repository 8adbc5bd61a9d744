"""A round over many: what fails is logged and keeps no other from going, and the round says at its end that it is not whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sqlalchemy.exc import DBAPIError

from core.errors import FtError

log = logging.getLogger(__name__)


class Round:
    """``with Round("invoices") as each: ... with each(tenant): ...``: the failure of one is raised at the end, with how many there were."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._tried = 0
        self._failed: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._tried += 1
        try:
            yield
        except Exception as error:
            if isinstance(error, DBAPIError) and error.connection_invalidated:
                raise  # the database is gone, for the others too
            log.exception("%s: %s has failed, and is tried again in the next round", self._of, name)
            self._failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._failed:
            raise FtError(f"{len(self._failed)} of {self._tried} {self._of} failed, and the others are done; first {self._failed[0]}")
