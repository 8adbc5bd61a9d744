"""Runs blocks through workers and yields their results in order, with few blocks in flight: memory stays bounded."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from ft_assets.datasets.pipeline.block_result import BlockResult
from ft_assets.datasets.pipeline.options import BlockOptions
from ft_assets.datasets.pipeline.worker import Block, BlockWorker
from ft_assets.errors import Unavailable

IN_FLIGHT_PER_WORKER = 2
"""Blocks per worker: one in progress and one waiting, 4 MB each."""

_worker: BlockWorker | None = None


def run_blocks(blocks: Iterable[Block], options: BlockOptions, *, workers: int) -> Iterator[BlockResult]:
    """Yields the result of each block, in the order of `blocks`; with one worker everything runs in this process."""
    if workers <= 1:
        worker = BlockWorker(options)
        yield from map(worker.run, blocks)
        return
    context = multiprocessing.get_context("spawn")  # the API's process has threads: a fork could hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(options,)) as pool:
        waiting: deque[Future[BlockResult]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_run, block))
                if len(waiting) >= workers * IN_FLIGHT_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise Unavailable("a validation worker died, most likely for want of memory; validate the file again") from error
        finally:
            for future in waiting:
                future.cancel()


def _start(options: BlockOptions) -> None:
    global _worker
    _worker = BlockWorker(options)


def _run(block: Block) -> BlockResult:
    if _worker is None:
        raise AssertionError("the pool starts each worker with its options")
    return _worker.run(block)
