"""What the benchmark kills is what the running stack says it consists of."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soak.processes import Processes
from deploy.local.readiness import file_touched
from deploy.local.supervisor.service_spec import Service
from deploy.local.supervisor.stack_supervisor import Supervisor
from resources.launcher.process_identity import identity

BEAT = "import sys, time\nwhile True: open(sys.argv[1], 'w').write('x'); time.sleep(0.2)"


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_service_of_the_running_stack_is_found_and_its_replacement_seen(tmp_path: Path) -> None:
    def service(name: str) -> Service:
        file = tmp_path / f"{name}.beat"
        return Service(name=name, argv=(sys.executable, "-S", "-E", "-c", BEAT, str(file)), probe=file_touched(file))

    processes = Processes(home=tmp_path)
    assert processes.services() == {}
    supervisor = Supervisor(home=tmp_path, services=[service("one"), service("a-later-one")], env=os.environ, cwd=tmp_path)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        wait(processes.is_ready)
        before = processes.services()
        assert list(before) == ["supervisor", "one", "a-later-one"]
        assert before["supervisor"] == os.getpid()
        os.kill(before["one"], signal.SIGKILL)
        wait(lambda: processes.is_ready() and processes.services().get("one", before["one"]) != before["one"])
        assert processes.services()["a-later-one"] == before["a-later-one"]
        assert processes.service_of("one")["restarts"] == 1
    finally:
        supervisor.stop()
        thread.join(30)


def test_a_record_whose_pid_another_process_or_thread_has_by_now_names_nobody(tmp_path: Path) -> None:
    """A signal to a thread's id reaches the whole process: the benchmark has frozen itself that way."""
    own, workloads = os.getpid(), tmp_path / "work" / "launcher"
    records = {
        "lives-a1": {"pid": own, "identity": identity(own)},
        "gone-a1": {"pid": threading.get_native_id(), "identity": "1@another boot"},
    }
    for name, record in records.items():
        (workloads / name).mkdir(parents=True)
        (workloads / name / "process.json").write_text(json.dumps(record))
    assert Processes(home=tmp_path).of_jobs()["agent"] == {own: "lives-a1"}


def test_the_file_of_a_dead_database_server_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n")
    assert Processes(home=tmp_path).services() == {}
