"""Tokenizes shards in processes that end with the coordinator.

Each worker has one pipe and one shard at a time. A worker whose coordinator was killed is killed by the kernel, or ends by itself where the
kernel does not support that; a killed worker is noticed at once and ends the build, whose finished shards remain.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from core.errors import FtError, IntegrityError, Unavailable
from core.processes.parent_death import die_with
from engine.data.tokens.chat_tokenizer import ChatTokenizer

PARALLEL_FROM = 20_000
"""Examples from which further processes are worth their start-up of about a second: one tokenizes some 10,000 per second."""


class Task(Protocol):
    """One shard of work; it and its result are pickled."""

    def run(self, tokenizer: ChatTokenizer) -> Any: ...


def suitable_workers(num_examples: int) -> int:
    """Returns the processes for a dataset of this size: one below `PARALLEL_FROM`, else one for each CPU that this process may use."""
    alone = num_examples < PARALLEL_FROM or multiprocessing.current_process().daemon  # a daemon may have no children
    return 1 if alone else len(os.sched_getaffinity(0))


def run_here(tasks: Iterable[Task], tokenizer: ChatTokenizer) -> Iterator[Any]:
    """Yields the results of `tasks` in order, computed by this process."""
    return (task.run(tokenizer) for task in tasks)


def run_in_workers(tasks: Iterable[Task], tokenizer: ChatTokenizer, *, model_dir: Path, workers: int) -> Iterator[Any]:
    """Yields the results of `tasks` as they complete. A failure of one ends all; so does closing the iterator.

    Each worker loads the tokenizer from `model_dir`, which must be the one that `tokenizer` came from.
    """
    spawn = multiprocessing.get_context("spawn")
    digests = (tokenizer.tokenizer_digest, tokenizer.template_digest)
    idle: list[Connection] = []
    busy: list[Connection] = []
    processes = {}
    try:
        for _ in range(workers):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_work, args=(theirs, model_dir, digests, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            idle.append(ours)
            processes[ours] = process
        for task in tasks:
            if not idle:
                yield from _collect(busy, idle, processes)
            connection = idle.pop()
            busy.append(connection)
            _send(connection, task, processes)
        while busy:
            yield from _collect(busy, idle, processes)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()
            process.close()


def _collect(busy: list[Connection], idle: list[Connection], processes: dict[Connection, Any]) -> Iterator[Any]:
    """Returns the available results, after waiting for the first."""
    for connection in wait(busy):
        assert isinstance(connection, Connection)
        try:
            failed, result = connection.recv()
        except (EOFError, ConnectionError):
            raise _lost(processes[connection]) from None
        if failed:
            raise result
        busy.remove(connection)
        idle.append(connection)
        yield result


def _send(connection: Connection, task: Task, processes: dict[Connection, Any]) -> None:
    try:
        connection.send(task)
    except (BrokenPipeError, ConnectionError):
        raise _lost(processes[connection]) from None


def _lost(process: Any) -> Unavailable:
    process.join(timeout=5)
    how = f"signal {-process.exitcode}" if process.exitcode and process.exitcode < 0 else f"exit code {process.exitcode}"
    return Unavailable(f"a tokenizing process ended with {how} (killed, or out of memory); start the pack again: finished shards are kept")


def _work(connection: Connection, model_dir: Path, digests: tuple[str, str], parent: int) -> None:
    """Main loop of a worker: tasks in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with(parent):
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    try:
        tokenizer = ChatTokenizer.load(model_dir)
        if (tokenizer.tokenizer_digest, tokenizer.template_digest) != digests:
            raise IntegrityError(f"the tokenizer in {model_dir} is not the one that the pack is for; start again with one of them")
        while True:
            connection.send((False, connection.recv().run(tokenizer)))
    except (EOFError, ConnectionError):
        return
    except FtError as error:
        connection.send((True, error))
    except Exception:
        connection.send((True, RuntimeError(f"a tokenizing process failed:\n{traceback.format_exc()[-4000:]}")))
