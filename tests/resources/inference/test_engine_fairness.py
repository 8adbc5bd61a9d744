"""A tenant that floods the embedded server leaves the renderer of prompts to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.adapters import tensors
from resources.inference.engine.engine_thread import Engine
from resources.inference.engine.fair_turns import Share
from resources.inference.schemas import ChatRequest
from resources.inference.server import Server
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("fairness") / "base")


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Engine]:
    made = Engine(base)
    yield made
    made.close()


def test_prompts_of_one_tenant_are_rendered_one_at_a_time(engine: Engine, base: Path) -> None:
    """More of them than a process has threads would have the others wait for all."""
    server = Server(engine, served_name="tiny", base_shapes=tensors.weight_shapes(base), max_resident=1, max_rank=8)
    asked = ChatRequest.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 1})
    order: list[str] = []

    async def call(tenant: str) -> None:
        await server.call(asked, Share(tenant=tenant))
        order.append(tenant)

    async def scenario() -> None:
        with engine._rendering:
            calls = [asyncio.create_task(call("loud")) for _ in range(100)]
            await asyncio.sleep(0.2)
            calls.append(asyncio.create_task(call("quiet")))
            await asyncio.sleep(0.2)
        await asyncio.gather(*calls)

    asyncio.run(scenario())
    assert len(order) == 101
    assert order.index("quiet") < 10, order.index("quiet")
