"""Answers of the embedded server on their way to whoever asked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from resources.inference.adapters import AdapterStore
from resources.inference.answers import Call, events
from resources.inference.engine.loop import Engine, Piece
from resources.inference.engine.sampling import Sampling


class Endless:
    """An engine whose first piece is followed by none for a long time."""

    def __init__(self) -> None:
        self.running = 0

    def submit(self, prompt: list[int], **options: Any) -> Endless:
        self.running += 1
        options["emit"](Piece(text="On", completion_tokens=1))
        return self

    def cancel(self) -> None:
        self.running -= 1


def test_who_hangs_up_frees_their_place_in_the_batch() -> None:
    async def run() -> None:
        engine = Endless()
        call = Call(
            model="tiny", adapter=None, prompt=[1], max_tokens=500, sampling=Sampling(), stops=[], constraint=None, chat=True
        )  # fmt: skip
        begun = asyncio.Event()

        async def read() -> None:
            async for event in events(cast(Engine, engine), cast(AdapterStore, None), call):
                if '"On"' in event:
                    begun.set()

        reader = asyncio.create_task(read())
        await begun.wait()
        assert engine.running == 1
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert engine.running == 0

    asyncio.run(run())
