"""Files are read by a process of their own: what it needs and how it dies is not the server's concern."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from control_plane.datasets import validation, validation_state
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.validation_state import Work
from control_plane.platform.context import Platform
from control_plane.sandbox.sandbox_parent import CRASHED, VALIDATOR, Limits, run_sandboxed, used_bytes, validate_sandboxed, wall_s
from control_plane.sandbox.task_validate import Order, carry_out
from control_plane.tenants.rules import Tenant
from core.durable_files import write_json
from core.errors import Conflict, FtError, Unavailable
from engine.data.blocks.pass_progress import PassProgress
from tests.support.platform.background_worker import working

LIMITS = Limits(wall_s=wall_s(1 << 30))
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed file over the limit, of text that compresses badly."""
    draw = random.Random(7)
    path = tmp_path_factory.mktemp("large") / "large.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as out:
        for i in range(3000):
            turns = [("user", f"{i} {draw.randbytes(600).hex()}"), ("assistant", f"It is {i}.")]
            out.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    assert path.stat().st_size > validation.LARGE_COMPRESSED_BYTES, "it would be validated at once"
    return path


def order(path: Path, directory: Path) -> Order:
    return Order(path=path, filename=path.name, output=directory / "rows.parquet")


def uploaded(platform: Platform, tenant: Tenant, path: Path) -> str:
    with path.open("rb") as stream:
        file = uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune")
    assert file.status == "uploaded"
    return str(file.id)


def validator_of(process: psutil.Process, *, within_s: float = 60) -> psutil.Process:
    """The validating child of `process`, as soon as there is one."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if VALIDATOR in child.cmdline():
                    return child
        time.sleep(0.01)
    raise AssertionError("no validator was started")


def ended(directory: Path, code: str, limits: Limits = LIMITS) -> None:
    """A child of Python `code`, which ends as the test says."""
    run_sandboxed("", {}, directory, limits=limits, what="x.jsonl", command=(sys.executable, "-c", code))


def test_a_validator_imports_nothing_that_it_does_not_use(tmp_path: Path, write_chat_rows: Callable[..., Path]) -> None:
    """Half a second of each file went into pandas and scipy, which pyarrow and numba import where they find them."""
    command = (sys.executable, "-X", "importtime", "-m", VALIDATOR)
    rows = write_chat_rows(20)
    assert run_sandboxed(VALIDATOR, order(rows, tmp_path).to_dict(), tmp_path, limits=LIMITS, what="x", command=command)["num_rows"] == 20
    imported = {line.rpartition("|")[2].strip() for line in (tmp_path / "log").read_text().splitlines()}
    assert "pyarrow" in imported and "numba" in imported
    assert not {name for name in imported if name.startswith(("pandas.", "scipy._"))}


def test_a_file_says_by_its_size_and_first_bytes_whether_it_is_large() -> None:
    mib = 1 << 20
    assert [validation.is_large(n * mib, b'{"a"') for n in (2, 31, 32)] == [False, False, True]
    for head in (b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", b"PAR1"):
        assert [validation.is_large(n, head) for n in (2 * mib - 1, 2 * mib)] == [False, True]


def test_an_order_survives_the_way_to_the_child(tmp_path: Path) -> None:
    given = Order(
        path=tmp_path / "a",
        filename="a.csv",
        output=tmp_path / "b",
        column_map={"x": "prompt"},
        max_seq_len=9,
        suites=tmp_path,
        max_workers=3,
    )
    write_json(tmp_path / "order.json", given.to_dict())
    assert Order.from_dict(json.loads((tmp_path / "order.json").read_text())) == given


def test_the_child_finds_what_the_parent_would(large: Path, tmp_path: Path) -> None:
    seen: list[PassProgress] = []
    apart, here = tmp_path / "apart", tmp_path / "here"
    apart.mkdir()
    found = validate_sandboxed(order(large, apart), apart, limits=LIMITS, progress=seen.append)
    own = carry_out(order(large, here))
    assert (found.report.valid, found.num_rows, found.content_sha256) == (True, 3000, own.content_sha256)
    assert (apart / "rows.parquet").read_bytes() == (here / "rows.parquet").read_bytes()
    assert seen, "it told how far it was"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL, as when memory runs out"),
        ("import os; os.abort()", "SIGABRT"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise MemoryError('all of it')", "exit code 1"),
        ("pass", "exit code 0"),
    ],
)
def test_a_child_that_dies_is_a_failure_of_the_platform_with_a_name(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(FtError, match=says) as died:
        ended(tmp_path, code)
    assert (died.value.code, died.value.fault) == (CRASHED, "platform")


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '86399']); time.sleep(86399)"
    with pytest.raises(FtError, match="made no progress") as hung:
        ended(tmp_path, code, Limits(wall_s=600, silent_for_s=1.0))
    assert hung.value.code == CRASHED
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "86399"] and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("of", ["the child", "what the child started"])
def test_a_child_that_takes_too_much_memory_is_ended_and_the_limit_named(tmp_path: Path, of: str) -> None:
    code = "import time; taken = bytearray(b'x') * (256 << 20); time.sleep(86399)"
    if of != "the child":
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with pytest.raises(FtError, match=r"x.jsonl needed 0\.\d+ GiB, more than the 0\.125 GiB of memory") as refused:
        ended(tmp_path, code, Limits(wall_s=600, memory_bytes=128 << 20))
    assert refused.value.code == CRASHED


def test_memory_that_is_only_reserved_is_not_counted(tmp_path: Path) -> None:
    code = "import mmap; held = mmap.mmap(-1, 1 << 34); held[:4096] = b'x' * 4096; print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert 0 < used_bytes(child.pid, at_least=1 << 40) < 100 << 20
    assert 0 < used_bytes(child.pid, at_least=0) < 100 << 20
    child.communicate(b"\n")
    assert used_bytes(child.pid, at_least=0) == 0


def test_a_child_that_is_never_done_is_ended_however_much_it_tells(tmp_path: Path) -> None:
    code = (
        "import itertools, sys, pathlib\n"
        "for i in itertools.count(): pathlib.Path(sys.argv[1], 'progress.json').write_text("
        '\'{"stage": "reading", "rows": %d, "bytes": 0, "total_bytes": 0}\' % i)'
    )
    with pytest.raises(FtError, match="not read within the 1 s that a file of its size may take") as refused:
        run_sandboxed("", {}, tmp_path, limits=Limits(wall_s=1.0), what="x.jsonl", command=(sys.executable, "-c", code))
    assert refused.value.code == CRASHED
    assert wall_s(0) == 120 < wall_s(10 << 30) < 7 * 3600


def test_an_error_of_ours_comes_back_as_itself_and_a_secret_is_in_no_file(tmp_path: Path) -> None:
    code = (
        "from control_plane.sandbox.sandbox_child import main\nfrom core.errors import *\n"
        "def work(order, secret, progress): raise Unavailable(f'{order[\"who\"]} {secret[::-1]}', code='away')\nmain(work)"
    )
    with pytest.raises(Unavailable, match="the hub terces") as raised:
        run_sandboxed("", {"who": "the hub"}, tmp_path, limits=LIMITS, what="x", secret="secret", command=(sys.executable, "-c", code))
    assert raised.value.code == "away"
    written = [p.read_text() for p in tmp_path.iterdir()]
    assert any("terces" in text for text in written), "it was used"
    assert not any("secret" in text for text in written)


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    pipe = tmp_path / "never-written"
    os.mkfifo(pipe)  # to open it waits for ever
    code = (
        "from pathlib import Path; from control_plane.sandbox.sandbox_parent import *; "
        f"validate_sandboxed(Order(path=Path({str(pipe)!r}), filename='x.jsonl', output=Path('rows')), Path({str(tmp_path)!r}), "
        "limits=Limits(wall_s=600))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    try:
        child = validator_of(psutil.Process(parent.pid))
        time.sleep(1.0)
        assert child.is_running()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_file_whose_validator_is_killed_is_refused_and_can_be_validated_again(platform: Platform, tenant: Tenant, large: Path) -> None:
    file_id = uploaded(platform, tenant, large)

    def kill() -> None:
        validator_of(psutil.Process()).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    refused = uploaded_files.validate(platform, file_id)
    killer.join()
    assert (refused.status, refused.status_code, refused.report, refused.progress) == (
        "error",
        CRASHED,
        None,
        None,
    )
    assert f"POST /v1/files/{file_id}/validate" in refused.status_details
    assert uploaded_files.validate_again(platform, tenant.id, file_id).status == "uploaded"
    assert uploaded_files.validate(platform, file_id).status == "processed"
    with pytest.raises(Conflict, match="gives the same"):
        uploaded_files.validate_again(platform, tenant.id, file_id)


def test_who_waits_for_a_large_file_hears_how_far_it_is(platform: Platform, tenant: Tenant, large: Path) -> None:
    file_id = uploaded(platform, tenant, large)
    heard: list[PassProgress] = []
    work = Work(platform, file_id)
    work.begin()
    work(PassProgress(stage="reading", rows=7, bytes=8, total_bytes=9))
    waiting = threading.Thread(target=lambda: uploaded_files.wait_until_validated(platform, file_id, progress=heard.append))
    waiting.start()
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    assert heard[0].rows == 7
    uploaded_files.validate(platform, file_id)
    waiting.join(60)
    assert not waiting.is_alive() and uploaded_files.get(platform, tenant.id, file_id).status == "processed"


def test_a_run_that_was_given_up_neither_writes_over_the_next_ones_progress_nor_clears_it(
    platform: Platform, tenant: Tenant, large: Path
) -> None:
    file_id = uploaded(platform, tenant, large)
    stalled, new = Work(platform, file_id), Work(platform, file_id)
    stalled.begin()
    new.begin()
    held = uploaded_files.find(platform, file_id)
    assert new.is_current(held) and not stalled.is_current(held)
    stalled(PassProgress(stage="reading", rows=7, bytes=8, total_bytes=9))
    stalled.end()
    assert uploaded_files.find(platform, file_id).progress == held.progress
    new(PassProgress(stage="reading", rows=8, bytes=8, total_bytes=9))
    assert uploaded_files.find(platform, file_id).progress["rows"] == 8
    new.end()
    assert uploaded_files.find(platform, file_id).progress is None


def test_what_a_stalled_process_makes_of_a_file_is_not_recorded_over_the_new_ones_work(
    platform: Platform, tenant: Tenant, large: Path
) -> None:
    file_id = uploaded(platform, tenant, large)
    stalled, new = Work(platform, file_id), Work(platform, file_id)
    stalled.begin()
    new.begin()
    short = replace(platform, settings=replace(platform.settings, validation_memory_bytes=1))
    assert validation_state.settle(short, uploaded_files.find(platform, file_id), stalled).status == "uploaded", "its child was ended"
    assert validation_state.settle(platform, uploaded_files.find(platform, file_id), new).status == "processed"


def test_a_job_hears_of_its_dataset_at_most_every_five_seconds(platform: Platform, tenant: Tenant, job_id: str) -> None:
    from control_plane.jobs import service as jobs
    from ft_assets.datasets import step

    said: list[str] = []
    tell = step.announcer(platform, job_id, say=said.append)
    for rows in range(100):
        tell(PassProgress(stage="reading", rows=rows, bytes=rows, total_bytes=200))
    tell(PassProgress(stage="writing", rows=1000, bytes=0, total_bytes=0))
    events = [e for e in jobs.list_events(platform, tenant.id, job_id).items if e.code == "dataset_progress"]
    assert [e.message for e in events[::-1]] == said == ["Dataset: reading, 0 rows, 0 %.", "Dataset: writing, 1,000 rows."]


def test_a_job_of_a_large_file_prepares_it_and_tells_of_it(
    platform: Platform, tenant: Tenant, large: Path, write_chat_rows: Callable[..., Path]
) -> None:
    from control_plane.jobs import service as jobs
    from control_plane.jobs.submission import JobRequest
    from ft_assets.datasets import step

    file_id = uploaded(platform, tenant, large)
    job = jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": file_id})).job.id
    said: list[str] = []
    with working(platform):
        pinned = step.pin_dataset(platform, tenant.id, job, progress=step.announcer(platform, job, say=said.append))
    assert pinned.row_count == 3000
    assert said
