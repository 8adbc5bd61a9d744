"""Streamed answers of the embedded inference server when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from resources.inference.answers import Call, events
from resources.inference.engine.engine_thread import Engine, Generation
from resources.inference.engine.sampler import Sampling
from resources.inference.server import Server
from tests.support.models.tiny_model import build_tiny_model


class Watched(Engine):
    """Remembers what it was asked for."""

    asked: tuple[Generation, ...] = ()

    def submit(self, *given: Any, **options: Any) -> Generation:
        generation = super().submit(*given, **options)
        self.asked += (generation,)
        return generation


def test_who_hangs_up_frees_their_place_in_the_batch(tmp_path: Path) -> None:
    engine = Watched(build_tiny_model(tmp_path))
    server = Server(engine, served_name="tiny", base_shapes={}, max_resident=1, max_rank=8)
    call = Call(
        model="tiny", adapter=None, prompts=([1],), max_tokens=10**6, sampling=Sampling(), stops=[], constraint=None, chat=True
    )  # fmt: skip

    async def read_one_piece() -> None:
        answer = events(engine, server.store, call)
        assert isinstance(answer, AsyncGenerator)
        await anext(answer)
        await anext(answer)
        await answer.aclose()

    try:
        asyncio.run(read_one_piece())
        assert [one.cancelled.is_set() for one in engine.asked] == [True]
    finally:
        engine.close()
