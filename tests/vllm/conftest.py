"""Two replicas of the real vLLM behind a platform, started once: 30 to 40 s and 2 to 3 GB each."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from resources.inference.fleet_client import HttpFleet
from tests.support.servers.inference_server import TOKEN
from tests.vllm.customer import Customer
from tests.vllm.vllm_server import SERVED, Server, build_servable_model

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="package")
def vllm_python() -> Path:
    """Of an environment with vLLM and the plugin (`make vllm`)."""
    python = Path(os.environ.get("FT_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"no vLLM: {python} does not exist; make one with `make vllm`, or set FT_VLLM_PYTHON")
    found = subprocess.run([python, "-c", "import ft_vllm_plugin as p; print(p.__file__)"], capture_output=True, text=True, cwd="/")
    installed = Path(found.stdout.strip()) if found.returncode == 0 else None
    assert installed is not None, f"{python} has no plugin: install deploy/vllm there (`make vllm`)"
    for module in (ROOT / "deploy" / "vllm").glob("*.py"):
        same = installed.with_name(module.name)
        assert same.is_file() and same.read_bytes() == module.read_bytes(), f"its {module.name} is an old one: run `make vllm`"
    return python


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_servable_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="package")
def unserved(new_platform: Callable[..., Platform], base: Path, until_the_module_ends: list[Callable[[], object]]) -> Iterator[Platform]:
    """A platform with the base model in its catalogue, and no fleet."""
    models = Catalogue({SERVED: ({"id": SERVED, "path": str(base)}, base)})
    made = new_platform(drain_s="0")
    left, until_the_module_ends[:] = until_the_module_ends[::-1], []  # it is there for all modules
    yield replace(made, models=models)
    for call in left:
        call()


@pytest.fixture(scope="package")
def replicas(vllm_python: Path, unserved: Platform, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    logs, where = tmp_path_factory.mktemp("vllm"), unserved.settings.work_dir / "adapters"
    digest = unserved.models.get(SERVED).digest
    made = [Server(python=vllm_python, base=base, base_digest=digest, adapters=where, log=logs / f"{i}.log") for i in (1, 2)]
    try:
        for server in made:
            server.start()
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.stop()


@pytest.fixture(scope="package")
def served(unserved: Platform, replicas: list[Server]) -> Iterator[Platform]:
    fleet = HttpFleet([server.url for server in replicas], token=TOKEN)
    assert all(fleet.loads_adapters(server.url) for server in replicas)
    yield replace(unserved, fleet=fleet)
    fleet.close()


@pytest.fixture
def customer(served: Platform, replicas: list[Server], base: Path, tmp_path: Path) -> Iterator[Customer]:
    for server in replicas:
        assert server.is_healthy(), server.tail()
    made, _ = tenants.create(served, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    customer = Customer(platform=served, id=made.id, base=base, scratch=tmp_path)
    yield customer
    customer.withdraw_all()
