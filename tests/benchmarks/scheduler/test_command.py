"""The simulator as a command: what it prints, what it refuses, and how."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scheduler import campaign
from benchmarks.scheduler.simulation import report, synthetic, trace
from benchmarks.scheduler.simulation.policies import easy, fifo, shortest_first
from benchmarks.scheduler_sim import cluster, main
from engine.scheduler.simulation.cluster_simulation import Simulation

KEYS = [
    "avg_completion_s",
    "mean_wait_s",
    "p99_wait_s",
    "max_wait_s",
    "utilisation",
    "broken_reservations",
    "preemptions",
    "lost_gpu_s",
    "jobs",
]
HEAD = "job_id,submit_time_s,num_gpus,duration_s\n"
PHILLY = Path("../shared/data/traces/philly_vc_ee9e8c.csv")


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_json_is_one_object_with_the_nine_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, HEAD + "1,0,8,100\n2,10,8,50\n")
    assert main(["--trace", str(path), "--gpus", "8", "--gpus-per-node", "8", "--policy", "fifo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert found == {
        "avg_completion_s": 120.0,
        "mean_wait_s": 45.0,
        "p99_wait_s": 90.0,
        "max_wait_s": 90.0,
        "utilisation": 1.0,
        "broken_reservations": 0,
        "preemptions": 0,
        "lost_gpu_s": 0.0,
        "jobs": 2,
    }


def test_it_runs_as_a_script_and_as_a_module(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + "1,0,8,100\n")
    for command in (["benchmarks/scheduler_sim.py"], ["-m", "benchmarks.scheduler_sim"]):
        done = subprocess.run(
            [sys.executable, *command, "--trace", str(path), "--gpus", "8", "--json"], capture_output=True, text=True, check=True
        )
        assert list(json.loads(done.stdout)) == KEYS


@pytest.mark.slow
def test_all_policies_stand_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    trace.write(synthetic.three_tiers(1)[:30], path)
    args = [
        "--trace",
        str(path),
        "--gpus",
        "32",
        "--policy",
        "all",
        "--reserved",
        "4",
        "--estimate-error",
        "2",
    ]
    assert main(args) == 0
    table = capsys.readouterr().out
    for words in ("ours", "shortest-first", "longest wait, h", "fragmentation", "premium: mean / p99 / longest wait, h", "over 8 GPUs"):
        assert words in table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: column job_id is missing"),
        ("job_id,num_gpus,duration_s\n1,1,1\n", "line 1: column submit_time_s is missing"),
        (HEAD, "no job"),
        (HEAD + "1,0,1,100\n2,x,1,100\n", "line 3: column submit_time_s: 'x' is not a number"),
        (HEAD + "1,-5,1,100\n", "line 2: column submit_time_s: '-5' is negative"),
        (HEAD + "1,0,1,-1\n", "line 2: column duration_s: '-1' is negative"),
        (HEAD + "1,0,0,100\n", "line 2: column num_gpus: '0' is no whole number"),
        (HEAD + "1,0,1.5,100\n", "line 2: column num_gpus: '1.5' is no whole number"),
        (HEAD + "1,0,9,100\n", "line 2: column num_gpus: the job needs 9 GPUs at once, the cluster has 8"),
        (HEAD + "1,0,1,inf\n", "line 2: column duration_s: 'inf' is not a finite number"),
        (HEAD + "1,0,1,\n", "line 2: column duration_s: is empty"),
        (HEAD + "1,0,1,2,3\n", "line 2: more values than columns"),
        (HEAD + "1,0,1,2\n1,0,1,2\n", "column job_id: '1' is there twice"),
        ("job_id,submit_time_s,num_gpus,duration_s,tier\n1,0,1,2,gold\n", "line 2: column tier: 'gold' is none of premium, standard, free"),
        ("job_id,submit_time_s,num_gpus,duration_s,checkpoint_s\n1,0,1,2,-1\n", "line 2: column checkpoint_s: '-1' is negative"),
    ],
)
def test_a_bad_trace_is_refused_with_line_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = written(tmp_path, text)
    assert main(["--trace", str(path), "--gpus", "8", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert str(path) in err


def test_a_missing_and_a_binary_file_are_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(tmp_path / "none.csv"), "--gpus", "8"]) == 2
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    assert main(["--trace", str(tmp_path / "binary.csv"), "--gpus", "8"]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2


def test_a_trace_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.encode() + b"1,0,1,100\n")
    assert [j.job_id for j in trace.read(path, num_gpus=8)] == ["1"]


def test_a_job_that_the_kept_gpus_leave_no_room_for_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, HEAD + "1,0,8,100\nwide,0,12,100\n")
    assert main(["--trace", str(path), "--gpus", "16", "--reserved", "8"]) == 2
    assert "job 'wide' of tier standard needs 12 GPUs at once, the empty cluster can give it 8" in capsys.readouterr().err
    assert main(["--trace", str(path), "--gpus", "16", "--reserved", "4", "--json"]) == 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--gpus", "0", "0 is no whole number of at least 1"),
        ("--gpus-per-node", "eight", "eight is no whole number of at least 1"),
        ("--reserved", "-1", "no whole number of at least 0"),
        ("--reserved", "8", "8 of 8 GPUs; at least one must be left"),
        ("--save-s", "-1", "-1 are no seconds"),
        ("--checkpoint-every", "nan", "nan are no seconds"),
        ("--node-mtbf-days", "0", "less than the hour that a repair takes"),
        ("--estimate-error", "0.5", "no factor of at least 1"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    path = written(tmp_path, HEAD + "1,0,8,100\n")
    with pytest.raises(SystemExit, match="2"):
        main(["--trace", str(path), "--gpus", "8", f"{option}={value}"])
    err = capsys.readouterr().err
    assert option in err
    assert words.replace("no factor", "not a factor") in err


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    jobs = [replace(job, kind="") for job in synthetic.planned_mix(1, days=0.2)]  # a trace names no kinds
    trace.write(jobs, tmp_path / "mix.csv")
    assert trace.read(tmp_path / "mix.csv", num_gpus=32) == sorted(jobs, key=lambda j: (j.submit_s, j.job_id))


def test_the_planned_mix_asks_for_what_was_planned() -> None:
    jobs = [j for seed in range(30) for j in synthetic.planned_mix(seed)]
    hours = sum(j.num_gpus * j.duration_s for j in jobs) / 3600
    assert len(jobs) / 210 == pytest.approx(500, rel=0.02)
    assert hours / len(jobs) == pytest.approx(10.3, rel=0.07)
    for made, _ in synthetic.MADE.values():
        assert made(3) == made(3) != made(4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "completion", "longest"),
    [(fifo, 55.8, 98.0), (easy, 47.5, 85.0), (shortest_first, 39.9, 390.0)],
)
def test_counting_gpus_gives_the_published_figures_of_the_philly_trace(policy: object, completion: float, longest: float) -> None:
    if not PHILLY.exists():
        pytest.skip(f"{PHILLY} is missing: the trace does not ship with the project")
    jobs = trace.read(PHILLY, num_gpus=144)
    outcome = Simulation(jobs, [cluster(144, placement="count")], policy, tick_s=0).run()  # type: ignore[arg-type]
    found = report.summary(outcome)
    assert found["avg_completion_s"] / 3600 == pytest.approx(completion, abs=0.1)
    assert found["max_wait_s"] / 3600 == pytest.approx(longest, abs=1.0)


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    trace.write(synthetic.wide_gangs(2)[:10], path)
    command = ["philly", "--trace", str(path), "--out", str(tmp_path)]
    assert campaign.main(command) == 0
    first = capsys.readouterr().out.splitlines()
    result = tmp_path / "scheduler_philly_202611.json"
    found = json.loads(result.read_text())
    assert len(first) == len(found) == 16
    result.write_text(json.dumps({key: one for key, one in found.items() if not key.endswith("/ fifo")}))
    assert campaign.main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert "## nodes of 8\n" in result.with_suffix(".md").read_text()


def test_two_processes_find_what_one_does_and_no_seed_is_hidden(tmp_path: Path) -> None:
    found = []
    for processes in ("1", "2"):
        out = tmp_path / processes
        out.mkdir()
        assert campaign.main(["mix", "--seeds", "2", "--days", "0.1", "--jobs", processes, "--out", str(out)]) == 0
        numbers = json.loads((out / "scheduler_mix_202611.json").read_text())
        found.append({key: {**one, "cpu_s": 0} for key, one in numbers.items()})
    assert list(found[0].items()) == list(found[1].items())
    assert len(found[0]) == 2 * 2 * 3 * 5


def test_ratios_stand_seed_by_seed_with_their_mean_and_the_worst() -> None:
    waits = {"ours": (10.0, 30.0), "easy": (20.0, 20.0), "shortest-first": (40.0, 10.0)}
    runs = {name: {f"seed {i}": {"max_wait_s": wait, "avg_completion_s": wait} for i, wait in enumerate(of)} for name, of in waits.items()}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in campaign.ratios(runs).splitlines()]
    assert rows[0] == ["", "mean", "worst", "seed 0", "seed 1"]
    assert rows[2] == ["longest wait of ours over that of EASY", "1.000", "1.500", "0.500", "1.500"]
    assert rows[3] == ["average completion of ours over that of shortest-first", "1.625", "3.000", "0.250", "3.000"]
