"""Which adapters the embedded server holds in memory, and who waits where all of them are in use."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.adapters import tensors
from resources.inference.loaded_adapters import AdapterError, AdapterStore
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model


class Engine:
    """Holds what it is given."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.most = 0
        self.fails = False
        self.step = threading.Event()
        """Cleared while a step runs, which attaching and detaching wait for."""
        self.step.set()

    def read_adapter(self, directory: Path) -> dict[str, Any]:
        return {"from": directory}

    def attach(self, name: str, pairs: dict[str, Any]) -> None:
        assert self.step.wait(60)
        self.held.append(name)
        self.most = max(self.most, len(self.held))

    def detach(self, name: str) -> None:
        assert self.step.wait(60)
        if self.fails:
            raise TimeoutError("the step takes too long")
        self.held.remove(name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    base = build_tiny_model(root / "base")
    for seed, name in enumerate("abc", 1):
        build_tiny_adapter(root / name, base, base_name="tiny", seed=seed)
    return root


async def store_of(place: Path, engine: Engine, *, max_resident: int) -> AdapterStore:
    store = AdapterStore(engine, base_name="tiny", base_shapes=tensors.weight_shapes(place / "base"), max_resident=max_resident)
    for name in "abc":
        await store.load(name, place / name)
    return store


def test_a_request_waits_while_every_adapter_in_memory_is_in_use_and_then_takes_the_first_free_place(place: Path) -> None:
    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=2)
        order: list[str] = []

        async def ask(name: str, until: asyncio.Event) -> None:
            async with store.using(name):
                order.append(name)
                await until.wait()

        ends = {name: asyncio.Event() for name in "abc"}
        tasks = [asyncio.create_task(ask(name, ends[name])) for name in "ab"]
        while len(order) < 2:
            await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(ask("c", ends["c"])))
        await asyncio.sleep(0.1)
        assert (sorted(order), sorted(engine.held)) == (["a", "b"], ["a", "b"]), "nobody is pushed out of a request"
        ends["b"].set()
        async with asyncio.timeout(60):
            while len(order) < 3:
                await asyncio.sleep(0.01)
        assert (order[-1], sorted(engine.held)) == ("c", ["a", "c"])
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks)
        assert engine.most == 2, "there are never more than fit"

    asyncio.run(run())


@pytest.mark.parametrize("loaded_again", [False, True])
def test_a_request_that_waits_goes_on_when_the_weights_of_an_unloaded_adapter_are_freed(place: Path, loaded_again: bool) -> None:
    async def run() -> None:
        store = await store_of(place, Engine(), max_resident=1 + loaded_again)
        order: list[str] = []

        async def ask(name: str, until: asyncio.Event) -> None:
            async with store.using(name):
                order.append(name)
                await until.wait()

        async def until_in(*names: str) -> None:
            async with asyncio.timeout(60):
                while order != [*names]:
                    await asyncio.sleep(0.01)

        end_of_first, end = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(ask("a", end_of_first))]
        await until_in("a")
        await store.unload("a")
        if loaded_again:
            await store.load("a", place / "a")
            tasks.append(asyncio.create_task(ask("a", end)))
            await until_in("a", "a")
        tasks.append(asyncio.create_task(ask("b", end)))
        await asyncio.sleep(0.1)
        assert "b" not in order
        end_of_first.set()
        await until_in(*(["a"] * (1 + loaded_again)), "b")
        end.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_a_caller_that_gives_up_waiting_keeps_no_place(place: Path) -> None:
    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=1)

        async def ask(name: str) -> None:
            async with store.using(name):
                pass

        async with store.using("a"):
            waiting = asyncio.create_task(ask("b"))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(60):
            await ask("c")
        assert (engine.held, engine.most) == (["c"], 1)

    asyncio.run(run())


def test_the_adapter_that_was_used_longest_ago_makes_room(place: Path) -> None:
    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=2)
        assert sorted(engine.held) == ["b", "c"]
        for name in "ba":
            async with store.using(name):
                pass
        assert sorted(engine.held) == ["a", "b"], "b was loaded before c and is used after it"

    asyncio.run(run())


@pytest.mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_whose_files_have_changed_is_not_read_again(place: Path, tmp_path: Path, changed: str) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    build_tiny_adapter(mine, place / "base", base_name="tiny", seed=1)
    build_tiny_adapter(other, place / "base", base_name="tiny", seed=2, config={"lora_alpha": 4})

    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=1)
        await store.load("mine", mine)
        async with store.using("a"):  # and mine makes room
            (other / changed).replace(mine / changed)
        with pytest.raises(AdapterError, match=r"The files of 'mine' in .* have changed since it was loaded"):
            async with store.using("mine"):
                pass
        assert engine.held == ["a"]

    asyncio.run(run())


def test_an_engine_that_fails_to_detach_costs_no_place(place: Path) -> None:
    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=1)
        engine.fails = True
        with pytest.raises(TimeoutError):
            async with store.using("a"):
                pass
        engine.fails = False
        engine.held.clear()
        async with asyncio.timeout(10):
            for name in "abc":
                async with store.using(name):
                    assert name in engine.held

    asyncio.run(run())


@pytest.mark.parametrize("waits_for", ["a place", "a load"])
def test_a_caller_that_gives_up_during_a_long_step_costs_no_place(place: Path, waits_for: str) -> None:
    async def run() -> None:
        engine = Engine()
        store = await store_of(place, engine, max_resident=1)

        async def ask(name: str) -> None:
            async with store.using(name):
                assert engine.held == [name]

        await store.unload("c")
        if waits_for == "a place":
            await ask("b")
        engine.step.clear()
        waiting = asyncio.create_task(ask("a") if waits_for == "a place" else store.load("c", place / "c"))
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.sleep(0.1)
        engine.step.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(10):
            for name in "abab":
                await ask(name)
        assert engine.most == 1

    asyncio.run(run())


def test_an_engine_that_has_ended_refuses_changes_at_once(place: Path) -> None:
    from resources.inference.engine.engine_thread import Engine as RealEngine

    engine = RealEngine(place / "base")
    engine.close()
    with pytest.raises(RuntimeError, match="the engine has ended"):
        engine.detach("a")
