"""Workloads read and write the objects of a store that encrypts them, with the key of each object that they are granted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.fernet import Fernet, MultiFernet

from agent.api_client import ApiClient
from agent.objects import Objects
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from core.errors import IntegrityError
from resources.object_store import LOCAL_KEYS, from_url

INSTALLATION = MultiFernet([Fernet(Fernet.generate_key())])
WEIGHTS = bytes(range(256)) * 10_000  # more than two chunks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], root: Path) -> Platform:
    return replace(new_platform(), objects=from_url(f"file://{root}", tenant_key=LOCAL_KEYS, cipher=lambda: INSTALLATION))


def test_what_an_agent_stores_is_encrypted_and_what_it_fetches_is_not(
    platform: Platform, api: ApiClient, held: Claim, root: Path, tmp_path: Path
) -> None:
    key = f"{attempts.checkpoint_prefix(held)}/step-00000010/adapter_model.safetensors"
    (tmp_path / "weights").write_bytes(WEIGHTS)
    objects = Objects(api)
    objects.store(key, tmp_path / "weights", None)
    assert WEIGHTS[:256] not in (root / key).read_bytes()
    assert platform.objects.get_bytes(key) == WEIGHTS
    objects.fetch(key, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == WEIGHTS
    damaged = (root / key).read_bytes()
    (root / key).write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="was changed or cut off"):
        objects.fetch(key, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    objects.close()
