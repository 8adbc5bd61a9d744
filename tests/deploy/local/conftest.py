"""A supervisor in a thread, ended after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local.supervisor.service_spec import Service
from tests.support.processes.stack import Running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def go(*services: Service, home: Path = tmp_path, **kwargs: Any) -> Running:
        started.append(Running(home, list(services), **kwargs))
        return started[-1]

    yield go
    for r in started:
        r.supervisor.stop()
        r.supervisor.stop()
        r.thread.join(60)
