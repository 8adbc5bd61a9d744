"""The adapters' directory as a volume of its own, which the platform and a server see at two paths."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from control_plane.adapters import promotions
from control_plane.adapters.service import get_adapter
from control_plane.composition import adapters_volume
from control_plane.platform.context import Platform
from control_plane.serving import rollout
from control_plane.serving.node_files import materialise
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from engine.adapters import package
from resources.inference.fleet_client import HttpFleet
from tests.support.models.tiny_model import build_tiny_model
from tests.support.servers.inference_server import TOKEN, free_port, inference_server
from tests.vllm.customer import Customer

PLACES = (Path("/dev/shm"), Path("/var/tmp"))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """On another file system than the rest of the platform's home."""
    others = [place for place in PLACES if place.is_dir() and place.stat().st_dev != tmp_path.stat().st_dev]
    if not others:
        pytest.skip(f"neither of {', '.join(map(str, PLACES))} is another file system than {tmp_path}")
    made = Path(tempfile.mkdtemp(dir=others[0], prefix="ft-volume-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def customer(new_platform: Callable[..., Platform], volume: Path, tmp_path: Path) -> Customer:
    base = build_tiny_model(tmp_path / "base")
    platform = replace(
        new_platform(served_adapters_dir=str(volume), drain_s="0"), models=Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})
    )
    platform.settings.work_dir.mkdir(parents=True, exist_ok=True)
    platform.settings.adapters_dir.symlink_to(volume)
    made, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    return Customer(platform=platform, id=made.id, base=base, scratch=tmp_path)


def test_an_adapter_is_made_on_the_volume_that_it_is_served_from(customer: Customer, volume: Path) -> None:
    record = get_adapter(customer.platform, customer.id, customer.register(customer.trained()).id)
    for digest in (None, "f" * 64):
        made = materialise(customer.platform, record, digest)
        assert (volume / made.name / package.PACKAGE_MANIFEST).is_file()
    assert list((volume / ".making").iterdir()) == []


@pytest.mark.slow
def test_a_server_that_sees_the_volume_elsewhere_takes_part_in_the_hand_off(customer: Customer, volume: Path) -> None:
    with inference_server(customer.base, port=free_port()) as url:
        servers = HttpFleet([url], token=TOKEN, volume=adapters_volume(customer.platform.settings))
        raw = HttpFleet([url], token=TOKEN)
        platform = replace(customer.platform, fleet=servers)
        adapter = customer.register(customer.trained())
        assert promotions.promote(platform, customer.id, adapter.id).observed == "loaded"
        (seen,) = raw.replicas()
        assert PurePosixPath(seen.adapters[adapter.name]).parent == volume
        assert rollout.reconcile(platform) == [], "what the server lists is what is desired"
        promotions.deprecate(platform, customer.id, adapter.id)
        rollout.reconcile(platform)
        assert raw.replicas()[0].adapters == {}
        for made in (servers, raw):
            made.close()
