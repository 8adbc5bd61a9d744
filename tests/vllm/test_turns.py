"""Tenants of one vLLM server: a flood makes nobody wait, neither for its places nor for adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.vllm.vllm_server import MAX_LORAS, SERVED, Server

PLACES, LEFT_TO_OTHERS, LONG = 8, 2, 240
"""The server's places, those that a flood leaves free, and the tokens of a long answer."""


@pytest.fixture(scope="module")
def server(vllm_python: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    where = tmp_path_factory.mktemp("turns")
    made = Server(python=vllm_python, base=base, base_digest="0" * 64, adapters=where, log=where / "log")
    made.start()
    try:
        made.wait()
        yield made
    finally:
        made.stop()


async def ask(client: httpx.AsyncClient, tenant: str, *, model: str = SERVED, num_tokens: int, began: set[int], number: int = 0) -> None:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": num_tokens}
    body |= {"ignore_eos": True, "temperature": 0, "vllm_xargs": {"ft_tenant": "quiet"}}  # which says nothing: the header counts
    async with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-ft-tenant": tenant}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if '"content"' in line and '"content":""' not in line:
                began.add(number)


def test_a_quiet_tenants_answer_comes_while_a_flood_still_waits(server: Server) -> None:
    async def run() -> None:
        began, ended = set[int](), set[int]()

        async def loud(number: int) -> None:
            await ask(client, "loud", num_tokens=LONG, began=began, number=number)
            ended.add(number)

        async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
            flood = [asyncio.create_task(loud(number)) for number in range(3 * PLACES)]
            while len(began) < PLACES - LEFT_TO_OTHERS:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(ask(client, "quiet", num_tokens=4, began=set()), timeout=60)
            assert not ended and len(began) == PLACES - LEFT_TO_OTHERS, "a quarter of the places stays free for others, whatever waits"
            await asyncio.gather(*flood)
        assert len(ended) == 3 * PLACES, "nothing is lost"

    asyncio.run(run())


def test_a_tenant_that_uses_all_adapters_without_a_pause_does_not_keep_anothers_from_running(
    server: Server, base: Path, tmp_path: Path
) -> None:
    names = [f"adapter-{number}" for number in range(MAX_LORAS + 2)]
    for seed, name in enumerate(names):
        assert server.load(name, build_tiny_adapter(tmp_path / name, base, base_name="tiny", seed=seed)).status_code == 200

    async def run() -> None:
        began, goes_on = set[int](), True

        async def loud(model: str, number: int) -> None:
            while goes_on:
                await ask(client, "loud", model=model, num_tokens=60, began=began, number=number)

        async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as client:
            flood = [asyncio.create_task(loud(name, number)) for number, name in enumerate(4 * names[:MAX_LORAS])]
            while len(began) < len(flood):  # all of its adapters ran: after a while it makes room for its own too
                await asyncio.sleep(0.01)
            others = [ask(client, f"quiet-{name}", model=name, num_tokens=4, began=set()) for name in names[MAX_LORAS:]]
            await asyncio.wait_for(asyncio.gather(*others), timeout=60)
            goes_on = False
            await asyncio.gather(*flood)

    asyncio.run(run())
    for name in names:
        assert server.unload(name).status_code == 200
