"""Lines of logs: whose they are, in JSON or for people, and without what must not be in them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from core.telemetry import correlation, logs, spans
from core.telemetry.redaction import without_data, without_secrets

CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
SECRETS = ("ft-sk-Zm9vYmFyYmF6cXV4MTIz", "ft-op-Zm9vYmFyYmF6cXV4MTIz", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "hf_abcdefghijklmnop")


def record(message: str, *args: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("control_plane.x", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_json_line_says_when_what_and_of_what() -> None:
    with correlation.scope(tenant="t-1", job="ftjob-1", attempt=2, request_id="req_1"), spans.span("x", parent=CALLER):
        line = json.loads(logs.JsonLines("ft-api").format(record("%d things", 3, fields={"status": 200})))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "control_plane.x",
        "message": "3 things",
        "service": "ft-api",
        "tenant": "t-1",
        "job": "ftjob-1",
        "attempt": 2,
        "request_id": "req_1",
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "status": 200,
    }
    assert set(line) - {"status"} | {"time", "exception"} == set(logs.FIELDS)


def test_a_line_for_people_names_what_it_is_of_behind_its_message() -> None:
    with correlation.scope(tenant="t-1", job="ftjob-1"):
        text = logs.TextLines(plain=False).format(record("done"))
        plain = logs.TextLines(plain=True).format(record("done"))
    assert text.endswith(" WARNING control_plane.x: done tenant=t-1 job=ftjob-1")
    assert plain.endswith(" done")
    assert "WARNING" not in plain


def test_a_line_break_makes_no_second_json_line() -> None:
    assert "\n" not in logs.JsonLines("x").format(record('one\n{"time": "forged"}'))


@pytest.mark.parametrize("formatter", [logs.JsonLines("x"), logs.TextLines(plain=False)])
def test_what_looks_like_a_key_is_in_no_line(formatter: logging.Formatter) -> None:
    text = formatter.format(record("%s and Authorization: Bearer %s", " ".join(SECRETS), "abcdefgh12345678"))
    assert not [s for s in (*SECRETS, "abcdefgh12345678") if s in text]
    assert "***" in text


def test_an_error_does_not_repeat_the_data_that_it_quotes() -> None:
    said = "(x) bad [SQL: SELECT 1]\n[parameters: {'a': 'PROMPT (very] secret'}]\n(Background on this error at: https://sqlalche.me)"
    assert "PROMPT" not in without_data(said)
    assert "SELECT 1" in without_data(said)
    assert "PROMPT" not in without_data("duplicate key\nDETAIL:  Key (name)=(PROMPT) already exists.")
    assert "PROMPT" not in without_data("1 validation error [type=int, input_value='PROMPT', input_type=str]")
    assert without_secrets("ft-sk-...abcd is the hint of a key") == "ft-sk-...abcd is the hint of a key"


def test_an_exception_in_a_line_is_cleaned() -> None:
    try:
        raise ValueError(f"refused {SECRETS[0]}")
    except ValueError:
        made = record("it failed")
        made.exc_info = sys.exc_info()
    for formatter in (logs.JsonLines("x"), logs.TextLines(plain=False)):
        made.exc_text = None
        text = formatter.format(made)
        assert "ValueError: refused ft-sk-***" in text


def test_threads_of_a_process_that_does_one_thing_speak_of_it_too() -> None:
    seen: list[Any] = []
    with correlation.scope(whole_process=True, tenant="t", job="j"):
        correlation.bind(attempt=3)
        thread = threading.Thread(target=lambda: seen.append(dict(correlation.fields())))
        thread.start()
        thread.join()
    assert seen == [{"tenant": "t", "job": "j", "attempt": 3}]
    assert correlation.fields() == {}


def test_a_tenant_reads_json_lines_as_text_and_other_lines_as_they_are() -> None:
    with correlation.scope(tenant="t"):
        line = logs.JsonLines("ft-training").format(record("step 1/2 loss 3.1"))
    assert logs.readable(line).endswith(" step 1/2 loss 3.1")
    assert "tenant" not in logs.readable(line)
    assert [logs.readable(x) for x in ("plain", '{"time": "torn', "")] == ["plain", '{"time": "torn', ""]


def test_a_collector_that_is_away_is_a_line_a_minute() -> None:
    filter_ = logs._Seldom()
    about = logging.LogRecord("opentelemetry.exporter", logging.WARNING, "", 1, "failed", (), None)
    assert [bool(filter_.filter(about)) for _ in range(3)] == [True, False, False]
    assert filter_.filter(record("ours"))


def test_a_service_forked_from_a_process_with_dagsters_logs_writes_each_line_once_and_as_itself() -> None:
    code = (
        "import logging; from core.telemetry import logs\n"
        "logs.configure_packages('ft-dagster'); logs.configure('ft-api')\n"
        "for name in ('control_plane.x', 'another'): logging.getLogger(name).info('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, logs.FORMAT: "json"}, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["service"], line["logger"]) for line in lines] == [("ft-api", "control_plane.x"), ("ft-api", "another")]
