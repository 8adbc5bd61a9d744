"""What a person sees of a training that goes on: lines where there is no terminal, bars where there is one."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import httpx
import pytest

from control_plane.platform.job_events import as_reported, metrics_event
from control_plane.tenants.rules import TIERS
from core.errors import Unavailable
from ft_client.cli.job_progress import POLL_S, JobView, follow, follow_validation, job_view
from ft_client.cli.output import Exit, exit_code
from tests.ft_client.scripted import client, error, ok


def event(line: dict[str, Any]) -> dict[str, Any]:
    said = metrics_event(as_reported(line))
    return {"type": said.type, "message": said.message, "data": dict(said.data or {}), "created_at": 0.0}


def step(number: int, **measured: float) -> dict[str, Any]:
    return event({"step": number, "total_steps": 100, "loss": 1.0 / number, **measured})


def test_lines_thin_the_steps_and_keep_every_validation(capsys: pytest.CaptureFixture[str]) -> None:
    with job_view() as view:
        for number in range(1, 101):
            view.event(step(number, **{"rewards/margins": 0.5}))
            if number in (33, 66):
                view.event(event({"step": number, "eval_loss": 0.25, "perplexity": 1.284}))
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "Step 1/100: training loss=1.0000, reward margin=0.5000"
    assert [line for line in lines if "validation" in line] == [f"Step {n}: validation loss=0.2500, perplexity=1.2840" for n in (33, 66)]
    assert lines[-1].startswith("Step 100/100")
    assert 10 <= len(lines) <= 14


def test_a_bar_shows_margin_and_validation_loss_once_they_were_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    job = {"status": "running", "state": "running", "step": 2, "total_steps": 9, "loss": 0.5, "tokens_per_s": 1200.0}
    with job_view() as view:
        view.event(step(1))
        view.job(job)
        first = news_of(view)
        view.event(step(2, **{"rewards/margins": 0.75}))
        view.event(event({"step": 2, "eval_loss": 0.25}))
        view.job(job)
        second = news_of(view)
    assert first == "loss 0.5000  1,200 tokens/s"
    assert second == "loss 0.5000  1,200 tokens/s  margin 0.7500  validation loss 0.2500"


def test_a_stage_that_is_not_counted_shows_no_count_and_an_evaluation_shows_its_total_from_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    setup = {"phase": "setup", "subject": None, "suite": None, "done": 0, "total": 84, "eta_s": None}
    with job_view() as view:
        shown = []
        for state, evaluation in (("provisioning", None), ("evaluating", None), ("evaluating", setup)):
            view.job({"status": "running", "state": state, "evaluation": evaluation})  # type: ignore[typeddict-item]
            assert view._bars is not None
            shown.append(view._bars.tasks[-1].fields["count"])
    assert shown == ["", "", "0/84"]
    assert "/?" not in capsys.readouterr().err


def news_of(view: JobView) -> str:
    assert view._bars is not None
    return str(view._bars.tasks[-1].fields["news"])


RUNNING, DONE = ({"id": "j", "status": status, "state": status} for status in ("running", "succeeded"))
AWAY = [httpx.ConnectError("restarting"), error(503, None), error(429, "rate_limit_exceeded")]


def test_following_a_job_survives_an_outage_and_a_rate_limit(capsys: pytest.CaptureFixture[str]) -> None:
    said = {"id": "e", "type": "message", "message": "hello", "created_at": 0.0}
    listed = ok(data=[said], has_more=False)
    ft, seen = client(ok(**RUNNING), *AWAY, ok(**RUNNING), listed, *AWAY, ok(**DONE), *AWAY, ok(**DONE), listed, max_retries=0)
    assert follow(ft, "j", poll_s=0)["status"] == "succeeded"
    assert capsys.readouterr().err.count("hello") == 1
    assert len(seen) == 15


def test_following_a_validation_survives_an_outage() -> None:
    waiting, done = ({"id": "f", "status": status} for status in ("uploaded", "processed"))
    ft, _ = client(ok(**waiting), error(503, None), *AWAY, ok(**waiting), httpx.ConnectError("gone"), ok(**done), max_retries=0)
    assert follow_validation(ft, "f", poll_s=0)["status"] == "processed"


@pytest.mark.parametrize("answer", [error(503, None), error(429, "rate_limit_exceeded")])
def test_an_outage_that_lasts_is_no_failure_of_the_job(answer: httpx.Response) -> None:
    ft, _ = client(answer, max_retries=0)
    with pytest.raises(Unavailable, match="the job j cannot be followed now") as raised:
        follow(ft, "j", poll_s=0)
    assert exit_code(raised.value) is Exit.UNREACHABLE


def test_two_that_follow_with_one_key_of_the_free_tier_stay_below_its_limit() -> None:
    ft, seen = client(*itertools.chain(*((ok(**job), ok(data=[], has_more=False)) for job in (RUNNING, RUNNING, DONE))))
    follow(ft, "j", poll_s=0)
    requests_per_look = len(seen) / 3
    assert 2 * requests_per_look * 60 / POLL_S < TIERS["free"].requests_per_minute
