"""The local launcher: a workload outlives its caller, starts once, and its end is known to whoever asks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.platform.protocols import WorkloadPhase
from core.errors import InvalidRequest, Unavailable
from core.telemetry import spans
from core.workload import NODE_DIR, TOKEN_FILE, VARIABLE, Input, InputFile, Kind, NodeShare, StoredCheckpoint, Workload
from resources.launcher import LocalLauncher
from resources.launcher.local_processes import REPOSITORY, START_TIMEOUT_S
from resources.launcher.process_identity import alive, group_alive, identity
from tests.support.processes.workload_logs import log_of

SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
do = json.loads(Path(sys.argv[1]).read_text())
work = Path(do["work"])
with (work / "starts").open("a") as f:
    f.write(f"{os.getpid()}\\n")
(work / "environment.json").write_text(json.dumps(dict(os.environ)))
print("hello from", do["name"], flush=True)
if do.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if do.get("leaves_child"):
    subprocess.Popen(["sleep", "300"])
(work / "ready").write_text(os.getcwd())
time.sleep(do["sleep_s"])
sys.exit(do["exit_code"])
"""


class Bench:
    """A launcher and the workloads that a test started with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.launcher = LocalLauncher(root / "launcher")
        self.names: set[str] = set()
        (root / "modules").mkdir()
        (root / "modules" / "sleeper.py").write_text(SCRIPT)

    def workload(self, name: str = "job-a1", *, sleep_s: float = 60, exit_code: int = 0, **does: bool) -> Workload:
        self.names.add(name)
        run_file = self.root / f"{name}.json"
        self.work(name).mkdir(parents=True, exist_ok=True)
        run_file.write_text(json.dumps({"name": name, "work": str(self.work(name)), "sleep_s": sleep_s, "exit_code": exit_code, **does}))
        path = {"PYTHONPATH": f"{self.root / 'modules'}{os.pathsep}{REPOSITORY}"}
        return Workload(name=name, kind=Kind.TRAIN, command=("sleeper", str(run_file)), tenant="acme", job="job", env=path)

    def work(self, name: str) -> Path:
        """Directory that the workload writes to."""
        return self.root / "work" / name

    def files(self, name: str) -> Path:
        """Directory of the workload in the launcher."""
        return self.root / "launcher" / name

    def log(self, name: str) -> bytes:
        return log_of(self.root / "launcher", name)

    def starts(self, name: str) -> int:
        return len((self.work(name) / "starts").read_text().split())

    def environment(self, name: str) -> dict[str, str]:
        """Environment as the workload found it."""
        found: dict[str, str] = json.loads((self.work(name) / "environment.json").read_text())
        return found

    def wait_for(self, name: str, phase: WorkloadPhase, *, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while self.launcher.get(name).phase is not phase:
            assert time.monotonic() < deadline, f"{name} is {self.launcher.get(name)}, not {phase}"
            time.sleep(0.02)

    def wait_ready(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.work(name) / "ready").exists():
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.02)

    def recorded(self, name: str, what: str) -> int:
        pid: int = json.loads((self.files(name) / what).read_text())["pid"]
        return pid

    def close(self) -> None:
        for name in self.names:
            self.launcher.stop(name, grace_s=0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_workload_runs_to_its_end_and_its_exit_code_is_kept(bench: Bench) -> None:
    before = time.time()
    started = bench.launcher.start_or_adopt(bench.workload(sleep_s=0, exit_code=75))
    assert started.phase in (WorkloadPhase.RUNNING, WorkloadPhase.EXITED)
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    status = bench.launcher.get("job-a1")
    assert status.exit_code == 75
    assert status.started_at is not None and status.ended_at is not None
    assert before <= status.started_at <= status.ended_at <= time.time()
    assert bench.log("job-a1") == b"hello from job-a1\n"
    assert (bench.work("job-a1") / "ready").read_text() == str(bench.files("job-a1")), "it runs in its own directory"


def test_the_collectors_headers_reach_the_workload_and_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spans.HEADERS, "a-secret-value")
    monkeypatch.setenv("FT_SECRET", "another-secret")
    bench.launcher.start_or_adopt(bench.workload(sleep_s=0))
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    seen = bench.environment("job-a1")
    assert seen[spans.HEADERS] == "a-secret-value" and "FT_SECRET" not in seen
    assert not [f for f in (bench.root / "launcher").rglob("*") if f.is_file() and b"a-secret-value" in f.read_bytes()]


def test_an_unknown_workload_is_absent_and_stopping_it_is_fine(bench: Bench) -> None:
    assert bench.launcher.get("job-a9").phase is WorkloadPhase.ABSENT
    assert bench.launcher.stop("job-a9", grace_s=0).phase is WorkloadPhase.ABSENT


def test_many_callers_at_once_start_one_workload(bench: Bench) -> None:
    workload = bench.workload()
    launchers = [LocalLauncher(bench.root / "launcher") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda each: each.start_or_adopt(workload), launchers))
    assert {s.phase for s in statuses} == {WorkloadPhase.RUNNING}
    assert len({s.started_at for s in statuses}) == 1
    bench.wait_ready("job-a1")
    assert bench.starts("job-a1") == 1


def test_a_finished_name_is_not_started_again(bench: Bench) -> None:
    workload = bench.workload(sleep_s=0)
    bench.launcher.start_or_adopt(workload)
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    assert bench.launcher.start_or_adopt(workload).phase is WorkloadPhase.EXITED
    assert bench.starts("job-a1") == 1


def test_a_workload_outlives_its_caller_and_is_adopted(bench: Bench) -> None:
    workload = bench.workload()
    code = (
        "import sys, os, signal; from pathlib import Path; from core.workload import Workload;"
        "from resources.launcher import LocalLauncher; root, workload = sys.argv[1:];"
        "LocalLauncher(Path(root)).start_or_adopt(Workload.from_json(workload)); os.killpg(0, signal.SIGKILL)"
    )
    arguments = [str(bench.root / "launcher"), workload.to_json()]
    caller = subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, start_new_session=True, timeout=30, check=False)
    assert caller.returncode == -signal.SIGKILL
    adopted = bench.launcher.start_or_adopt(workload)
    assert adopted.phase is WorkloadPhase.RUNNING
    bench.wait_ready("job-a1")
    assert bench.starts("job-a1") == 1
    assert bench.launcher.stop("job-a1", grace_s=5).exit_code == -signal.SIGTERM


def test_stop_kills_what_does_not_listen(bench: Bench) -> None:
    bench.launcher.start_or_adopt(bench.workload(ignore_sigterm=True))
    bench.wait_ready("job-a1")
    began = time.monotonic()
    status = bench.launcher.stop("job-a1", grace_s=0.5)
    assert (status.phase, status.exit_code) == (WorkloadPhase.EXITED, -signal.SIGKILL)
    assert time.monotonic() - began >= 0.5


def test_a_trainer_that_is_killed_is_exited_with_its_signal(bench: Bench) -> None:
    bench.launcher.start_or_adopt(bench.workload())
    os.kill(bench.recorded("job-a1", "process.json"), signal.SIGKILL)
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    assert bench.launcher.get("job-a1").exit_code == -signal.SIGKILL


def test_what_a_workload_leaves_behind_ends_with_it(bench: Bench) -> None:
    bench.launcher.start_or_adopt(bench.workload(leaves_child=True))
    bench.wait_ready("job-a1")
    leader = bench.recorded("job-a1", "process.json")
    os.kill(leader, signal.SIGKILL)
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    try:
        deadline = time.monotonic() + 60  # a killed process takes a moment to go
        while group_alive(leader):
            assert time.monotonic() < deadline, "a data worker or a rank would go on holding the memory of its GPU"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def test_without_its_watcher_a_workload_runs_on_and_is_lost_once_it_ends(bench: Bench) -> None:
    bench.launcher.start_or_adopt(bench.workload())
    bench.wait_ready("job-a1")
    os.kill(bench.recorded("job-a1", "watcher.json"), signal.SIGKILL)
    time.sleep(0.2)
    assert bench.launcher.get("job-a1").phase is WorkloadPhase.RUNNING
    status = bench.launcher.stop("job-a1", grace_s=5)
    assert (status.phase, status.exit_code) == (WorkloadPhase.LOST, None)
    assert bench.launcher.start_or_adopt(bench.workload()).phase is WorkloadPhase.LOST


def test_a_pid_that_was_used_again_is_not_taken_for_the_workload(bench: Bench) -> None:
    directory = bench.files("job-a1")
    directory.mkdir(parents=True)
    (directory / "launched").touch()
    stranger = {"pid": os.getpid(), "identity": "1@another-boot", "started_at": 1.0}
    for name in ("process.json", "watcher.json"):
        (directory / name).write_text(json.dumps(stranger))
    assert bench.launcher.get("job-a1").phase is WorkloadPhase.LOST
    assert bench.launcher.stop("job-a1", grace_s=0).phase is WorkloadPhase.LOST


def test_an_identity_belongs_to_one_process() -> None:
    own = identity(os.getpid())
    assert own is not None and alive(os.getpid(), own)
    assert not alive(1, own)  # the parent may have started in the same clock tick
    assert not alive(2**22 + 1, None)


def test_secrets_of_the_caller_do_not_reach_the_workload(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", "postgresql://user:hunter2@host/db")
    monkeypatch.setenv("FT_API_KEY", "hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    workload = bench.workload()
    bench.launcher.start_or_adopt(workload)
    bench.wait_ready("job-a1")
    seen = bench.environment("job-a1")
    assert "hunter2" not in json.dumps(seen)
    assert seen["OMP_NUM_THREADS"] == "1"


def test_a_module_that_does_not_exist_exits_with_its_reason_in_the_log(bench: Bench) -> None:
    bench.launcher.start_or_adopt(replace(bench.workload(), command=("no_such_module",)))
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    assert bench.launcher.get("job-a1").exit_code == 1
    assert b"no_such_module" in bench.log("job-a1")


def test_a_name_that_is_no_path_segment_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="not valid"):
        bench.launcher.get("../escape")


def on_gpus(workload: Workload, *numbers: int) -> Workload:
    return replace(workload, placement=(NodeShare(node="local-1", devices=numbers),))


def test_a_workload_sees_the_gpus_of_its_reservation_and_without_one_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    bench.launcher.start_or_adopt(on_gpus(bench.workload("pair"), 1, 2))
    bench.launcher.start_or_adopt(on_gpus(bench.workload("single"), 0))
    bench.launcher.start_or_adopt(bench.workload("none"))
    for name in ("pair", "single", "none"):
        bench.wait_ready(name)
    assert [bench.environment(name)["CUDA_VISIBLE_DEVICES"] for name in ("pair", "single", "none")] == ["5,6", "4", ""]


def test_what_cannot_start_is_not_listed_and_its_name_is_not_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    workload = bench.workload(sleep_s=0)
    with pytest.raises(Unavailable, match="2 ranks"):
        bench.launcher.start_or_adopt(on_gpus(workload, 0, 1))
    assert bench.launcher.list() == []
    bench.launcher.start_or_adopt(workload)
    bench.wait_for("job-a1", WorkloadPhase.EXITED)


def test_whoever_shares_the_directory_lists_what_was_started(bench: Bench) -> None:
    another = LocalLauncher(bench.root / "launcher")
    assert another.list() == []
    bench.launcher.start_or_adopt(bench.workload("running"))
    bench.launcher.start_or_adopt(bench.workload("ended", sleep_s=0, exit_code=3))
    bench.wait_for("ended", WorkloadPhase.EXITED)
    ended, running = another.list()
    assert (ended.name, ended.phase, ended.exit_code) == ("ended", WorkloadPhase.EXITED, 3)
    assert (running.name, running.phase) == ("running", WorkloadPhase.RUNNING)
    assert [ended, running] == [another.get("ended"), another.get("running")]


def test_a_forgotten_name_stays_used(bench: Bench) -> None:
    workload = bench.workload(sleep_s=0)
    bench.launcher.start_or_adopt(workload, token="an-attempts-token")
    bench.wait_for("job-a1", WorkloadPhase.EXITED)
    (bench.files("job-a1") / "scratch").mkdir()
    (bench.files("job-a1") / "scratch" / "left").touch()
    for _ in range(2):
        bench.launcher.forget("job-a1")
        assert bench.launcher.list() == []
        for status in (bench.launcher.get("job-a1"), bench.launcher.stop("job-a1", grace_s=0), bench.launcher.start_or_adopt(workload)):
            assert (status.phase, status.exit_code) == (WorkloadPhase.LOST, None)
    assert bench.log("job-a1") == b""
    assert bench.starts("job-a1") == 1
    assert not [f for f in bench.files("job-a1").rglob("*") if f.stat().st_size], "only empty marks are left"


def test_what_is_lost_can_be_forgotten_and_what_runs_or_never_did_cannot(bench: Bench) -> None:
    bench.launcher.forget("job-a9")
    assert bench.launcher.get("job-a9").phase is WorkloadPhase.ABSENT
    bench.launcher.start_or_adopt(bench.workload())
    bench.launcher.forget("job-a1")
    assert [(s.name, s.phase) for s in bench.launcher.list()] == [("job-a1", WorkloadPhase.RUNNING)]
    for what in ("watcher.json", "process.json"):
        os.kill(bench.recorded("job-a1", what), signal.SIGKILL)
    bench.wait_for("job-a1", WorkloadPhase.LOST)
    bench.launcher.forget("job-a1")
    assert bench.launcher.list() == []
    assert bench.launcher.get("job-a1").phase is WorkloadPhase.LOST


def test_a_start_that_was_interrupted_is_lost_once_its_time_is_over(bench: Bench) -> None:
    launched = bench.files("job-a1") / "launched"
    launched.parent.mkdir(parents=True)
    launched.touch()
    assert bench.launcher.get("job-a1").phase is WorkloadPhase.PENDING
    os.utime(launched, (time.time() - START_TIMEOUT_S - 1,) * 2)
    assert bench.launcher.get("job-a1").phase is WorkloadPhase.LOST


def test_the_token_is_in_one_file_that_only_its_owner_reads(bench: Bench) -> None:
    bench.launcher.start_or_adopt(bench.workload(), token="an-attempts-token")
    bench.wait_ready("job-a1")
    token = bench.files("job-a1") / "token"
    assert token.read_text() == "an-attempts-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert [f for f in bench.root.rglob("*") if f.is_file() and b"an-attempts-token" in f.read_bytes()] == [token]
    for what in ("process.json", "watcher.json"):
        process = Path(f"/proc/{bench.recorded('job-a1', what)}")
        assert b"an-attempts-token" not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    assert bench.environment("job-a1")[TOKEN_FILE] == str(token)


def test_a_workload_finds_its_whole_description(bench: Bench) -> None:
    described = replace(
        on_gpus(bench.workload(), 0),
        attempt=1,
        module="engine.training.runtime",
        processes=(2,),
        run={"spec": {"seed": 1, "lr": 1e-4, "layers": [1, 2], "adapter": None}, "attempt": 1},
        inputs=(Input(name="pack_dir", files=(InputFile(path="a/b", key="packs/a/b", sha256="0" * 64),)), Input(name="none", files=())),
        checkpoints=(StoredCheckpoint(step=7, attempt=1, prefix="checkpoints/a1/7", manifest_sha256="1" * 64),),
        checkpoint_prefix="checkpoints/a1",
        report_to="http://127.0.0.1:1",
        grace_s=1.5,
        labels={"pool": "local"},
    )
    bench.launcher.start_or_adopt(described)
    bench.wait_ready("job-a1")
    seen = bench.environment("job-a1")
    assert Workload.from_json(Path(seen[VARIABLE]).read_text()) == described
    assert seen[VARIABLE] == str(bench.files("job-a1") / "workload.json")
    assert seen[NODE_DIR] == str(bench.root), "it outlives the workload, and others share it"
