"""Puts torch back after tests that train in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic_only_here() -> Iterator[None]:
    """A training makes torch deterministic, for the module that imports this fixture alone."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filling
