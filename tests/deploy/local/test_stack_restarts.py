"""Services that die, hang or start late: which of them are restarted, and when the stack gives up."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.errors import Unavailable
from deploy.local import postgres
from deploy.local.readiness import file_touched, file_written
from deploy.local.supervisor import child_process, stack_supervisor
from deploy.local.supervisor.service_spec import Limits, Readiness, Service
from deploy.local.supervisor.stack_report import Phase, ServiceState
from deploy.local.supervisor.unit import RESTART_WINDOW_S, Unit
from tests.support.jobs.followed_jobs import until
from tests.support.processes.small_disk import small_disk
from tests.support.processes.stack import (
    BEAT,
    PYTHON,
    SERVE,
    WHEN_TOLD,
    Running,
    alive,
    free_port,
    http_service,
    pids,
    serving,
    state_of,
    until_asked,
)


def test_a_service_that_can_never_serve_on_its_second_start_is_started_a_third_time(tmp_path: Path, start: Callable[..., Running]) -> None:
    starts: list[float] = []

    def probe(started_at: float) -> Readiness:
        if started_at not in starts:
            starts.append(started_at)
        second = starts.index(started_at) == 1
        return Readiness(ready=not second, broken=second, detail="no model" if second else "")

    service = Service(name="fragile", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=probe)
    stack = start(service, start_timeout_s=600.0, max_restart_pause_s=0.2)
    os.kill(pids(stack.ready())["fragile"], signal.SIGKILL)
    up = stack.wait(lambda r: state_of(r, "fragile").restarts == 2 and state_of(r, "fragile").state is ServiceState.UP)
    assert len(starts) == 3 and up.error is None
    assert stack.end().phase is Phase.STOPPED


def test_a_long_log_is_begun_again_while_its_service_writes_on(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 2000)
    monkeypatch.setattr(stack_supervisor, "LOG_ROTATION_CHECK_S", 0.1)
    wordy = "import itertools, sys, time\nfor n in itertools.count(): print(n, flush=True); time.sleep(0.001); open(sys.argv[1], 'w')"
    stack = start(serving(tmp_path, "wordy", wordy))
    stack.ready()
    log = tmp_path / "logs" / "wordy.log"
    earlier = log.with_name("wordy.log.1")
    for _ in range(2):
        until(earlier.exists)
        earlier.unlink()
    until(lambda: log.stat().st_size > 100)
    assert log.stat().st_size < 10_000
    assert log.read_text().splitlines()[-2].isdigit()
    assert stack.end().phase is Phase.STOPPED


def test_a_long_log_for_whose_copy_the_disk_has_no_room_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_LOG_BYTES", 2000)
    with small_disk(tmp_path / "disk", "1m") as disk:
        log = disk.root / "wordy.log"
        log.write_bytes(b"x" * 300_000)
        disk.fill()
        child_process.rotate_logs(disk.root)
        assert log.stat().st_size == 0
        assert not log.with_name("wordy.log.1").exists()


def test_late_and_failed_starts_are_forgotten_once_a_service_is_ready(tmp_path: Path) -> None:
    """The next start has the time and the number of attempts of a first one again."""
    ready = threading.Event()
    service = Service(name="slow", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=lambda t: Readiness(ready=ready.is_set()))
    unit = Unit(service=service, log=tmp_path / "log", limits=Limits(start_timeout_s=0.2))

    def start_until(done: Callable[[str | None], bool]) -> None:
        unit.start(env=os.environ, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while not done(unit.look(executor)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            start_until(lambda trouble: trouble is not None)
            unit.fail()
            unit.end()
        assert (unit.late_starts, unit.failed_starts) == (2, 2)
        ready.set()
        start_until(lambda _: unit.state is ServiceState.UP)
        unit.end()
    assert (unit.late_starts, unit.failed_starts) == (0, 0)


@pytest.mark.slow
def test_an_expendable_service_that_keeps_dying_ends_nothing(tmp_path: Path, start: Callable[..., Running]) -> None:
    argv = (*PYTHON, "import sys; sys.exit(7)")
    dying = Service(name="dying", argv=argv, probe=file_written(tmp_path / "never"), expendable=True)
    stack = start(serving(tmp_path, "base"), dying)
    stack.ready()
    seen = stack.wait(lambda r: any(s.name == "dying" and s.restarts >= 4 for s in r.services))
    assert sum("dying ended" in m for m in stack.messages()) == 1, "one outage, one line"
    assert {s.name: s.state for s in seen.services}["base"] is ServiceState.UP
    assert stack.end().phase is Phase.STOPPED


def test_the_stack_is_ready_without_an_expendable_service_that_hangs(tmp_path: Path, start: Callable[..., Running]) -> None:
    hanging = Service(name="hanging", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=file_written(tmp_path / "never"), expendable=True)
    stack = start(serving(tmp_path, "base"), hanging, expendable_wait_s=0.3)
    assert {s.name: s.state for s in stack.ready().services} == {"base": ServiceState.UP, "hanging": ServiceState.STARTING}


def test_a_service_that_was_ready_is_restarted_alone_for_as_long_as_it_takes(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "fragile"), serving(tmp_path, "steady"), max_restart_pause_s=0.2)
    steady = pids(stack.ready())["steady"]
    for restart in range(1, 7):
        (tmp_path / "fragile.ready").unlink()
        os.kill(pids(stack.reports[-1])["fragile"], signal.SIGKILL)
        up = stack.wait(lambda r, n=restart: state_of(r, "fragile").restarts == n and state_of(r, "fragile").state is ServiceState.UP)  # type: ignore[misc]
        stack.wait(lambda r: r.phase is Phase.READY and r.services == up.services)  # noqa: B023
    ended = [m for m in stack.messages() if m.startswith("fragile ended while running (killed by signal 9)")]
    again = [m for m in stack.messages() if m.startswith("fragile is up again after")]
    assert (len(ended), len(again)) == (6, 6)
    assert all("\n" not in m for m in ended), "one line an outage"
    assert pids(stack.reports[-1])["steady"] == steady
    assert any(r.phase is Phase.DEGRADED for r in stack.reports)
    assert stack.end().phase is Phase.STOPPED


def test_a_slow_start_ends_nothing_else_and_gets_more_time(tmp_path: Path, start: Callable[..., Running]) -> None:
    go = tmp_path / "slow.ready.go"
    stack = start(serving(tmp_path, "steady"), serving(tmp_path, "slow", WHEN_TOLD), start_timeout_s=2.0)
    degraded = stack.wait(lambda r: r.phase is Phase.DEGRADED)
    assert state_of(degraded, "steady").state is ServiceState.UP
    served = json.loads((tmp_path / "endpoints.json").read_text())
    assert served["steady"] == "http://steady", "what serves can be found"
    assert "slow" not in served
    go.touch()
    ready = stack.ready()
    assert pids(ready)["steady"] == pids(degraded)["steady"]
    assert json.loads((tmp_path / "endpoints.json").read_text())["slow"] == "http://slow"
    assert any("slow was not ready after 2 s" in m for m in stack.messages())


def test_a_service_that_the_platform_can_start_without_leaves_it_degraded(tmp_path: Path, start: Callable[..., Running]) -> None:
    argv = (*PYTHON, "import sys; print('no such module'); sys.exit(7)")
    broken = Service(name="broken", argv=argv, probe=file_written(tmp_path / "never"), required=False)
    stack = start(serving(tmp_path, "steady"), broken, start_attempts=2)
    degraded = stack.wait(lambda r: r.phase is Phase.DEGRADED)
    assert state_of(degraded, "steady").state is ServiceState.UP
    assert any("no such module" in m for m in stack.messages())
    assert any(m.startswith("not ready: broken; the other services serve") for m in stack.messages())
    stack.wait(lambda r: state_of(r, "broken").restarts >= 3)
    assert stack.end().phase is Phase.STOPPED


def test_a_probe_that_fails_by_itself_is_a_service_that_is_not_ready_yet(tmp_path: Path, start: Callable[..., Running]) -> None:
    token = tmp_path / "token"
    other = serving(tmp_path, "other")

    def probe(_started_at: float) -> Readiness:
        if not token.exists():
            raise Unavailable("no token yet")
        return Readiness(ready=not json.loads(token.read_text())["missing"])  # KeyError at first

    stack = start(other, dataclasses.replace(serving(tmp_path, "guarded"), probe=probe))
    assert stack.wait(lambda r: state_of(r, "guarded").detail == "no token yet").phase is Phase.STARTING
    token.write_text("{}")
    stack.wait(lambda r: "KeyError" in state_of(r, "guarded").detail)
    token.write_text('{"missing": false}')
    assert state_of(stack.ready(), "guarded").restarts == 0
    token.unlink()
    time.sleep(0.5)
    stack.end()
    assert stack.messages() == ["ending: asked to end"]


@pytest.mark.parametrize("fault", ["env", "program"])
def test_a_start_that_fails_is_tried_again_and_ends_no_other(tmp_path: Path, start: Callable[..., Running], fault: str) -> None:
    program, known = tmp_path / "program", threading.Event()

    def env() -> dict[str, str]:
        if fault == "env" and not known.is_set():
            raise Unavailable("the database is not known yet")
        return {}

    later = serving(tmp_path, "later")
    if fault == "program":
        later = dataclasses.replace(later, argv=(str(program), *later.argv[1:]))
    other = serving(tmp_path, "other")
    stack = start(other, dataclasses.replace(later, env=env), start_attempts=8, max_restart_pause_s=0.2)
    failed = stack.wait(lambda r: state_of(r, "later").restarts >= 3)
    assert failed.phase is Phase.STARTING
    first = pids(failed)["other"]
    known.set()
    program.symlink_to(sys.executable)
    assert pids(stack.ready())["other"] == first
    assert sum("later could not be started" in m for m in stack.messages()) == 1


def test_a_start_that_never_succeeds_ends_the_stack_with_its_reason(tmp_path: Path, start: Callable[..., Running]) -> None:
    missing = dataclasses.replace(serving(tmp_path, "none"), argv=("/nonexistent/program",))
    ended = start(missing, start_attempts=2).ended()
    assert ended.phase is Phase.FAILED
    assert "none could not be started: FileNotFoundError" in str(ended.error) and "start 2 of 2" in str(ended.error)


def test_a_service_is_not_up_again_by_what_its_killed_process_has_touched(tmp_path: Path, start: Callable[..., Running]) -> None:
    beat, slow = tmp_path / "beat", tmp_path / "slow"
    code = f"import pathlib, time\ntime.sleep(3 * pathlib.Path({str(slow)!r}).exists())\n{BEAT}"
    stack = start(Service(name="beating", argv=(*PYTHON, code, str(beat)), probe=file_touched(beat)))
    first = pids(stack.ready())
    slow.touch()
    os.kill(first["beating"], signal.SIGKILL)
    stack.wait(lambda r: state_of(r, "beating").state is ServiceState.UP and pids(r) != first)
    assert beat.stat().st_mtime >= slow.stat().st_mtime + 3.0


@pytest.mark.slow
def test_a_service_that_hangs_is_replaced_and_no_other(tmp_path: Path, start: Callable[..., Running]) -> None:
    beating = Service(name="beating", argv=(*PYTHON, BEAT, str(tmp_path / "beat")), probe=file_touched(tmp_path / "beat"))
    web = dataclasses.replace(http_service("web", free_port()), grace_s=600.0)  # a service that hangs gets no such grace
    stack = start(web, beating, serving(tmp_path, "steady"), hung_after_s=6.0)
    first = pids(stack.ready())
    for name in ("web", "beating"):
        os.kill(first[name], signal.SIGSTOP)
        stack.wait(lambda r, n=name: state_of(r, n).state is ServiceState.REPLACING)  # type: ignore[misc]
        again = stack.wait(lambda r, n=name: r.phase is Phase.READY and pids(r)[n] != first[n])  # type: ignore[misc]
        assert not alive(first[name])
        assert any(f"{name} (pid {first[name]}) runs but has not answered its health probe" in m for m in stack.messages())
    assert pids(again)["steady"] == first["steady"]


@pytest.mark.slow
def test_a_service_is_not_blamed_for_the_silence_of_one_that_it_needs(tmp_path: Path, start: Callable[..., Running]) -> None:
    """Both stop answering at once; only the one below is replaced, and the one above answers again with it, also through a third."""
    below = Service(name="below", argv=(*PYTHON, BEAT, str(tmp_path / "beat")), probe=file_touched(tmp_path / "beat"))
    above = Service(name="above", argv=(*PYTHON, SERVE, str(tmp_path / "x")), probe=file_touched(tmp_path / "beat"), after=("middle",))
    stack = start(below, serving(tmp_path, "middle", after=("below",)), above, hung_after_s=6.0)
    first = pids(stack.ready())
    os.kill(first["below"], signal.SIGSTOP)
    again = stack.wait(lambda r: r.phase is Phase.READY and pids(r)["below"] != first["below"])
    time.sleep(3)
    assert pids(stack.reports[-1])["above"] == pids(again)["above"] == first["above"]


@pytest.mark.slow
def test_a_service_that_falls_silent_first_is_not_blamed_either(tmp_path: Path, start: Callable[..., Running]) -> None:
    silent_since: dict[str, float] = {}
    noticed = threading.Event()

    def below_answers(started_at: float) -> Readiness:
        return Readiness(ready="below" not in silent_since or started_at > silent_since["below"])

    def above_answers(started_at: float) -> Readiness:
        if "above" in silent_since:
            noticed.set()
        return Readiness(ready="above" not in silent_since)

    below = Service(name="below", argv=(*PYTHON, SERVE, str(tmp_path / "b")), probe=below_answers)
    above = Service(name="above", argv=(*PYTHON, SERVE, str(tmp_path / "a")), probe=above_answers, after=("below",))
    stack = start(below, above, hung_after_s=8.0)
    first = pids(stack.ready())
    silent_since["above"] = time.time()
    assert noticed.wait(60)
    silent_since["below"] = time.time()
    stack.wait(lambda r: state_of(r, "below").state is ServiceState.UP and pids(r)["below"] != first["below"])
    assert pids(stack.reports[-1])["above"] == first["above"]


def test_pauses_between_restarts_grow_from_none_to_the_limit_and_old_deaths_are_forgotten(tmp_path: Path) -> None:
    unit = Unit(service=serving(tmp_path, "fragile"), log=tmp_path / "log", limits=Limits(max_restart_pause_s=30.0))

    def pause() -> int:
        now = time.monotonic()
        unit.fail()
        return round(unit.restart_at - now)

    assert [pause() for _ in range(7)] == [0, 1, 3, 7, 15, 30, 30]
    unit.deaths = [t - RESTART_WINDOW_S for t in unit.deaths]
    assert (pause(), pause(), unit.report().restarts) == (0, 1, 2)


def test_a_service_that_was_ready_is_restarted_also_while_others_still_start(tmp_path: Path, start: Callable[..., Running]) -> None:
    stack = start(serving(tmp_path, "fragile"), serving(tmp_path, "waiting", WHEN_TOLD))
    up = stack.wait(lambda r: state_of(r, "fragile").state is ServiceState.UP)
    (tmp_path / "fragile.ready").unlink()
    os.kill(pids(up)["fragile"], signal.SIGKILL)
    stack.wait(lambda r: state_of(r, "fragile").restarts == 1 and state_of(r, "fragile").state is ServiceState.UP)
    (tmp_path / "waiting.ready.go").touch()
    stack.ready()


def test_an_answer_of_the_process_before_is_none_of_the_one_after(tmp_path: Path, start: Callable[..., Running]) -> None:
    """A probe is under way when the process dies, and is answered once the next one starts."""
    asked: dict[float, int] = {}
    under_way, answer = threading.Event(), threading.Event()

    def probe(started_at: float) -> Readiness:
        asked[started_at] = asked.get(started_at, 0) + 1
        if len(asked) == 1 and asked[started_at] > 1:
            under_way.set()
            assert answer.wait(60)
        return Readiness(ready=started_at == min(asked))

    argv = (*PYTHON, SERVE, str(tmp_path / "x"))
    stack = start(Service(name="fragile", argv=argv, probe=probe), serving(tmp_path, "steady"), hung_after_s=600.0)
    first = pids(stack.ready())["fragile"]
    assert under_way.wait(60)
    os.kill(first, signal.SIGKILL)
    second = pids(stack.wait(lambda r: pids(r).get("fragile", first) != first))["fragile"]
    until_asked(asked, times=2)
    answer.set()
    until_asked(asked, times=5)
    assert not any(pids(r).get("fragile") == second and state_of(r, "fragile").state is ServiceState.UP for r in stack.reports)


def test_a_full_disk_ends_neither_the_supervisor_nor_a_service(tmp_path: Path, start: Callable[..., Running]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        stack = start(serving(tmp_path, "web"), serving(tmp_path, "other"), home=disk.root)
        before = pids(stack.ready())
        disk.fill()
        os.kill(before["web"], signal.SIGKILL)
        stack.wait(lambda r: r.phase is Phase.DEGRADED)
        again = pids(stack.wait(lambda r: r.phase is Phase.READY and pids(r).get("web", 0) not in (0, before["web"])))
        assert again["other"] == before["other"]
        report = stack.supervisor.files.report
        assert str(again["web"]) not in report.read_text()
        disk.free()
        deadline = time.monotonic() + 60
        while str(again["web"]) not in report.read_text():
            assert time.monotonic() < deadline, "the report is not written once there is space"
            time.sleep(0.05)
        stack.end()


def test_lines_of_the_database_that_no_disk_takes_end_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"LOG:  checkpoint complete\n")
    with Path("/dev/full").open("wb", buffering=0) as full:
        assert postgres._copy(log, 0, full) == log.stat().st_size  # type: ignore[arg-type]


def test_a_long_log_of_the_database_is_begun_again_and_no_line_is_lost_or_copied_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "MAX_LOG_BYTES", 100)
    log, copied, offset, written = tmp_path / "log", io.BytesIO(), 0, b""
    sizes = set[int]()
    for number in range(20):
        lines = b"".join(b"LOG:  checkpoint %d.%d\n" % (number, part) for part in range(1 + number % 4))
        with log.open("ab") as out:
            out.write(lines)
        written += lines
        offset = postgres._copy(log, offset, copied)
        sizes.add(log.stat().st_size)
    assert copied.getvalue() == written
    assert 0 in sizes and max(sizes) < 100 < len(written)


def test_a_clock_that_was_set_back_makes_no_service_stale(tmp_path: Path) -> None:
    (tmp_path / "beat").touch()
    probe = file_touched(tmp_path / "beat")
    assert probe(time.time() + 600.0).ready, "the service was started when the clock was ten minutes ahead"
    assert not probe(time.time()).ready
