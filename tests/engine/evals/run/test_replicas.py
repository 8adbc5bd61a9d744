"""Several processes answer one evaluation: bit for bit what one process answers, in any number, and after any kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidRequest
from engine.evals.run import replicas, run_file, run_status
from engine.evals.run.journal import Journal
from engine.evals.run.replicas import Part, Replicas
from engine.evals.run.run_file import EvalRun
from tests.engine.evals.run_evaluations import evaluate, start


def test_every_batch_belongs_to_one_part_and_suites_begin_with_different_replicas() -> None:
    for of in (1, 2, 3, 5):
        for first in range(4):
            parts = [Part(index=index, of=of, first=first) for index in range(of)]
            taken = [[part.has_next() for part in parts] for _ in range(11)]
            assert all(sum(row) == 1 for row in taken)
            assert max(map(sum, zip(*taken, strict=True))) - min(map(sum, zip(*taken, strict=True))) <= 1
    assert [Part(index=0, of=2, first=first).has_next() for first in (0, 1)] == [True, False]


def test_replicas_get_equal_shares_of_the_gpus() -> None:
    assert [list(replicas.share_of("abcdef", index, 3)) for index in range(3)] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert replicas.share_of([], 1, 2) == []
    for devices, of in (("abc", 2), ("a", 2)):
        with pytest.raises(InvalidRequest, match=f"{len(devices)} GPUs cannot be divided equally among {of} replicas"):
            replicas.share_of(devices, 0, of)


def test_the_answers_of_all_journals_are_one_and_a_replica_appends_only_to_its_own(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    with Journal(first) as journal:
        journal.append("base", "suite", {"1": "x"}, seconds=1.0)
    with Journal(second, beside=[first]) as journal:
        journal.append("base", "suite", {"2": "y"}, seconds=2.0)
        assert journal.answered("base", "suite").answers == {"2": "y"}
        assert (journal.everyones("base", "suite").answers, journal.everyones("base", "suite").seconds) == ({"1": "x", "2": "y"}, 3.0)
        with Journal(first) as other:
            other.append("base", "suite", {"3": "z"}, seconds=1.0)
        journal.read_beside([first])
        assert (journal.everyones("base", "suite").answers, journal.everyones("base", "suite").seconds) == (
            {"1": "x", "2": "y", "3": "z"},
            4.0,
        )
    assert b'"1"' not in second.read_bytes()


def test_a_replica_that_dies_ends_the_evaluation_and_none_is_left(tmp_path: Path) -> None:
    with Replicas(tmp_path / "absent.json", tmp_path, num=3) as started:
        started.start([])
        pids = [process.pid for process in started._processes.values()]
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(Exception, match=r"replica \d of 3 ended with"):
            started.wait()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def without_times(result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but seconds, and how many processes took part."""
    subjects = {
        name: sections and {suite: {k: v for k, v in section.items() if k != "seconds"} for suite, section in sections.items()}
        for name, sections in result["subjects"].items()
    }
    return {k: v for k, v in result.items() if k not in ("seconds", "replicas", "num_gpus")} | {"subjects": subjects}


def wait_for(met: Callable[[], bool], *, seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_replicas_leave_the_result_of_one_process_after_a_kill_and_in_another_number(place: Path, tmp_path: Path) -> None:
    run = EvalRun(
        base_model_dir=place / "base",
        adapter_dir=place / "adapter",
        previous_adapter_dir=place / "adapter",
        digests={"base": "b", "adapter": "a", "previous": "p"},
        holdout=place / "holdout.jsonl",
        validation_pack_dir=place / "pack",
        safety=True,
        capability=("standin_choices",),
        capability_limit=24,
        max_new_tokens=8,
        batch_size=3,
        out_dir=tmp_path / "one",
    )
    code, one = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK

    several = replace(run, replicas=2, out_dir=tmp_path / "several")
    second = replicas.directory(several.out_dir, 1) / run_status.JOURNAL_NAME
    killed = start(several)
    try:
        wait_for(lambda: killed.poll() is not None or (second.exists() and second.stat().st_size > 2000))
        assert killed.poll() is None, killed.communicate()
        children = [int(pid) for pid in Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()]
    finally:
        killed.kill()
        killed.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    kept = [path.read_bytes() for path in replicas.journals(several.out_dir)]
    assert len(kept) == 2 and all(kept)

    resumed = start(replace(several, replicas=3))
    try:
        assert resumed.wait(timeout=1200) == run_status.EVAL_EXIT_OK, resumed.stderr and resumed.stderr.read()[-2000:]
    finally:
        resumed.kill()
        resumed.communicate()
    found = run_status.read_eval_result(several.out_dir)
    assert without_times(found) == without_times(one)
    assert [list(s["answers"]) for s in found["subjects"]["adapter"].values()] == [
        list(s["answers"]) for s in one["subjects"]["adapter"].values()
    ]
    assert (found["replicas"], one["replicas"]) == (3, 1)
    parts = replicas.journals(several.out_dir)
    assert len(parts) == 3
    assert all(path.read_bytes().startswith(before) for path, before in zip(parts, kept, strict=False)), "what was answered is kept"
    beat = run_status.read_heartbeat(several.out_dir)
    assert beat["phase"] == "done"
    assert beat["total"] == run_file.num_requests(run, run_file.plain_suites(run)[0]) + 3 * 24 * 4
