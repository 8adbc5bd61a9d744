"""One thread for every torch in these tests, and one tiny model for all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.evals.run_evaluations import build_place


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    if torch:
        torch.set_num_threads(1)
    yield
    if torch and before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model, an adapter, one that changes nothing, a holdout file, a pack with validation windows."""
    return build_place(tmp_path_factory.mktemp("evals"))
