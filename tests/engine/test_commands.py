"""Each package of the engine can be tried alone, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.adapters.__main__ import main as adapters
from engine.data.__main__ import main as data
from engine.evals.__main__ import main as evals
from engine.scheduler.__main__ import main as scheduler
from engine.training.__main__ import main as training


def test_a_file_of_rows_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Line {n}?"}, {"role": "assistant", "content": f"Stop {n}."}]} for n in range(12)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad.write_text(good.read_text() + "{no JSON\n")
    assert data(["check", str(good)]) == 0
    assert "12 rows, 12 kept" in capsys.readouterr().out
    assert data(["check", str(bad)]) == 1
    assert "row 13: " in capsys.readouterr().out
    assert data(["check", "--json", str(good)]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True


def test_answers_of_two_models_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"expected": "a", "base": "b", "adapter": "a"}) + "\n" for _ in range(8)))
    assert evals(["score", str(file)]) == 0
    out = capsys.readouterr().out
    assert "base 0.000, adapter 1.000" in out and "p better 0.0039" in out, "one chance in 256"


def test_jobs_run_through_a_virtual_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submit_s,num_gpus,duration_s\nfirst,0,8,600\nnext,1,8,60\n")
    assert scheduler([str(file), "--gpus", "8"]) == 0
    first, following = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[:2] == ["first", "0"] and float(following.split()[1]) >= 600
    file.write_text("job_id,submit_s,num_gpus,duration_s\nwide,0,16,600\n")
    with pytest.raises(SystemExit):
        scheduler([str(file), "--gpus", "8"])
    assert "16 GPUs never fit on 8" in capsys.readouterr().err


def test_a_plan_that_fits_no_gpu_names_a_smaller_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert training(["plan", "llama-3.1-8b"]) == 0
    assert "1 x h100-80gb" in capsys.readouterr().out
    assert training(["plan", "llama-3.1-70b", "--adapter", "full", "--max-gpus", "4"]) == 1
    assert "use adapter lora" in capsys.readouterr().out


def test_an_adapter_is_checked_against_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = Path(__file__).parents[2] / "examples" / "demo" / "base_model"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapters(["check", str(tmp_path), "--base", str(base)]) == 1
    assert capsys.readouterr().out.startswith("unreadable: ")
