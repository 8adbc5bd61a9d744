"""One installation for all tests of the cluster; they are skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import installed_platform
from tests.cluster.installed_platform import Installed


@pytest.fixture(scope="session")
def cluster() -> Iterator[Installed]:
    if why := installed_platform.missing():
        pytest.skip(why)
    with installed_platform.installed() as made:
        yield made
