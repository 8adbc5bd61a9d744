"""The adapters loaded on a server, by name, of which a limited number are resident in memory.

A name refers to the same content for the life of the server, even after an unload. Weights are read and checked before they reach the
engine. At most `max_resident` adapters are in memory; the least recently used idle one is evicted and read again on its next request. If
none is idle, a request for another adapter waits until one is. Unloading closes the name at once and frees the weights when the last
request that uses them has ended.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from core.base_models import MAX_RANK
from core.durable_files import sha256_of
from engine.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PACKAGE_MANIFEST, Refusal, verify_package

if TYPE_CHECKING:
    from resources.inference.engine.lora import LoraPair


class AdapterEngine(Protocol):
    """The part of the engine that the store uses."""

    def read_adapter(self, directory: Path) -> dict[str, LoraPair]: ...
    def attach(self, name: str, pairs: dict[str, LoraPair]) -> None: ...
    def detach(self, name: str) -> None: ...


class AdapterError(Exception):
    """An adapter cannot be loaded; a retry does not help."""

    def __init__(self, message: str, *, kind: str = "BadRequestError", status: int = 400) -> None:
        super().__init__(message)
        self.message, self.kind, self.status = message, kind, status


@dataclass(kw_only=True, slots=True, eq=False)
class Loaded:
    name: str
    directory: Path
    content: tuple[str, str]
    """sha256 of config and weights at the first load."""
    num_active: int = 0
    resident: bool = False
    closed: bool = False


class AdapterStore:
    """Used from one event loop; disk reads and engine calls run in threads."""

    def __init__(
        self,
        engine: AdapterEngine,
        *,
        base_name: str,
        base_shapes: Mapping[str, Sequence[int]],
        max_resident: int = 32,
        max_rank: int = MAX_RANK,
        base_digest: str | None = None,
    ) -> None:
        self._engine, self.base_name, self._base_shapes = engine, base_name, base_shapes
        self._max_resident, self._max_rank = max_resident, max_rank
        self._base_digest = base_digest
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._history: dict[str, tuple[str, str]] = {}
        self._change = asyncio.Lock()
        self._released = asyncio.Event()
        """Set whenever an adapter may have become idle."""
        self._num_resident = 0

    def listing(self) -> list[Loaded]:
        return sorted(self._loaded.values(), key=lambda a: a.name)

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    async def load(self, name: str, directory: Path) -> None:
        """Serve the adapter in `directory` as `name`; raises ``AdapterError`` for an invalid adapter."""
        async with self._change:
            if name in self._loaded:
                raise AdapterError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                    "load it under a new name: a name is never reused for other weights.",
                    kind="InvalidUserInput",
                )
            if name == self.base_name:
                raise AdapterError(f"'{name}' is the name of the base model.", kind="InvalidUserInput")
            if not (directory / ADAPTER_CONFIG).is_file():
                raise AdapterError(f"No adapter found for {directory}", kind="NotFoundError", status=404)
            content = await asyncio.to_thread(self._checked, directory)
            if self._history.get(name, content) != content:
                raise AdapterError(f"The name '{name}' was used for other weights before; use a new name.", kind="InvalidUserInput")
            adapter = Loaded(name=name, directory=directory, content=content)
            try:
                await self._make_resident(adapter)  # if there is no room, its first request reads it
            except asyncio.CancelledError:
                await self._evict(adapter)
                raise
            self._loaded[name] = adapter
            self._history[name] = content

    async def unload(self, name: str) -> None:
        """Close `name` to new requests; those in flight finish with it. ``KeyError`` if it is not loaded."""
        async with self._change:
            adapter = self._loaded.pop(name)
            adapter.closed = True
            if adapter.num_active == 0:
                await self._evict(adapter)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Bring `name` into memory and keep it there until the block ends. ``KeyError`` if it is not loaded."""
        adapter = self._loaded[name]
        adapter.num_active += 1
        try:
            while not adapter.resident:
                self._released.clear()
                async with self._change:
                    if adapter.resident or await self._read_again(adapter):
                        break
                await self._released.wait()
            if name in self._loaded:
                self._loaded.move_to_end(name)
            yield
        finally:
            adapter.num_active -= 1
            self._released.set()
            if adapter.closed and adapter.num_active == 0:
                await asyncio.shield(self._evict_closed(adapter))

    async def _evict_closed(self, adapter: Loaded) -> None:
        async with self._change:
            current = self._loaded.get(adapter.name)
            if adapter.num_active:
                return
            if current is not None and current.resident and adapter.resident:  # loaded again since: the weights now belong to it
                adapter.resident = False
                self._num_resident -= 1
                self._released.set()
                return
            await self._evict(adapter)

    async def _read_again(self, adapter: Loaded) -> bool:
        content = await asyncio.to_thread(self._checked, adapter.directory)
        if content != adapter.content:
            raise AdapterError(f"The files of '{adapter.name}' in {adapter.directory} have changed since it was loaded.")
        return await self._make_resident(adapter)

    async def _make_resident(self, adapter: Loaded) -> bool:
        """Bring the weights into memory; False if every adapter there is in use."""
        while self._num_resident >= self._max_resident:
            idle = next((a for a in self._loaded.values() if a.resident and a.num_active == 0), None)
            if idle is None:
                return False
            await self._evict(idle)  # searched again each time: a request may have taken another one meanwhile
        await _to_its_end(self._attach(adapter))
        return True

    async def _attach(self, adapter: Loaded) -> None:
        self._num_resident += 1
        try:
            pairs = await asyncio.to_thread(self._engine.read_adapter, adapter.directory)
            await asyncio.to_thread(self._engine.attach, adapter.name, pairs)
        except BaseException:
            self._num_resident -= 1
            raise
        adapter.resident = True

    async def _evict(self, adapter: Loaded) -> None:
        if adapter.resident:
            await _to_its_end(self._detach(adapter))

    async def _detach(self, adapter: Loaded) -> None:
        adapter.resident = False
        try:
            await asyncio.to_thread(self._engine.detach, adapter.name)
        finally:
            self._num_resident -= 1
            self._released.set()

    def _checked(self, directory: Path) -> tuple[str, str]:
        """Verify the adapter's package and return the digests of its files."""
        found: list[Refusal]
        try:
            found = verify_package(directory, base_shapes=self._base_shapes, served_name=self.base_name, max_rank=self._max_rank)
            found += self._other_base(directory)
            if not found:
                return sha256_of(directory / ADAPTER_CONFIG), sha256_of(directory / ADAPTER_WEIGHTS)
        except OSError as e:
            raise AdapterError(f"No adapter found for {directory}: {e.strerror}", kind="NotFoundError", status=404) from e
        raise AdapterError("; ".join(f"{r.code}: {r.detail}" for r in found))

    def _other_base(self, directory: Path) -> list[Refusal]:
        """Refuse an adapter whose manifest, if it has one, names another base digest: its evaluation holds only on that base."""
        manifest = directory / PACKAGE_MANIFEST
        if self._base_digest is None or not manifest.is_file():
            return []
        trained_on = json.loads(manifest.read_text(encoding="utf-8")).get("base_digest")
        if trained_on in (None, self._base_digest):
            return []
        detail = f"trained on a base with digest {trained_on}, but {self._base_digest} is served; restore the base's files and restart"
        return [Refusal(code="base_digest_mismatch", detail=detail)]


async def _to_its_end(change: Coroutine[None, None, None]) -> None:
    """Runs a change of the engine to its end: a caller that is cancelled meanwhile is cancelled after it, because threads go on."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
