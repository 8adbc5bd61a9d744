"""Spans: nothing where no collector is named, one trace across processes where one is, and never a wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.telemetry import correlation, spans
from tests.support.servers.span_collector import collecting

ROOT = Path(__file__).resolve().parents[2]
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


def run(code: str, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "OTEL_", "TRACEPARENT"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**clean, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SPANS = """
import random, sys
from core.telemetry import correlation as context, logs, spans as tracing
logs.configure("a-service")
tracing.configure("a-service")
random.seed(1); before = random.getstate()
with context.scope(tenant="t-1", job="ftjob-1", attempt=2):
    with tracing.span("outer", ft__step=3):
        with tracing.span("inner") as inner:
            inner.set(ft__kept=True)
    try:
        with tracing.span("failed"):
            raise ValueError("somebody's data")
    except ValueError:
        pass
assert random.getstate() == before, "what a training draws does not depend on who watches it"
print("opentelemetry.sdk" in sys.modules, tracing.flush())
"""


def test_without_a_collector_nothing_is_imported_and_a_callers_trace_is_carried_on() -> None:
    assert run(SPANS) == "False True"
    with spans.span("x", parent=CALLER) as span:
        assert (spans.current(), span.recorded) == (CALLER, False)
        assert spans.environment() == {"TRACEPARENT": CALLER}
    assert spans.current() is None


@pytest.mark.parametrize("header", ["", "x", CALLER[:-1], CALLER.upper(), f"00-{'0' * 32}-{'b' * 16}-01", "ff" + CALLER[2:], CALLER + "\n"])
def test_what_is_no_trace_parent_is_not_taken_for_one(header: str) -> None:
    assert spans.valid(header) is None
    with spans.span("x", parent=header):
        assert spans.current() is None


def test_spans_of_a_process_arrive_with_whose_they_are_below_the_span_that_started_it() -> None:
    with collecting() as collector:
        assert run(SPANS, FT_OTLP_ENDPOINT=collector.url, TRACEPARENT=CALLER) == "True True"
    assert collector.paths[0] == "/v1/traces"
    outer, inner, failed = (collector.named(n) for n in ("outer", "inner", "failed"))
    assert {s.trace_id for s in collector.spans} == {"a" * 32}
    assert (outer.parent_id, inner.parent_id, outer.service) == ("b" * 16, outer.span_id, "a-service")
    assert outer.attributes == {"ft.step": 3, "ft.tenant": "t-1", "ft.job": "ftjob-1", "ft.attempt": 2}
    assert inner.attributes["ft.kept"] is True
    assert (failed.failed, outer.failed) == (True, False)
    assert "data" not in str(failed)


def test_a_caller_that_does_not_sample_is_not_sampled() -> None:
    with collecting() as collector:
        run(SPANS, FT_OTLP_ENDPOINT=collector.url, TRACEPARENT=CALLER[:-2] + "00")
    assert collector.spans == []


ENDS_AT_ONCE = """
import os, threading
from core.telemetry import spans as tracing
tracing.configure("training")
with tracing.span("training"), tracing.span("train"):
    leaving = threading.Thread(target=lambda: (tracing.close(failure="oom", ft__outcome="oom"), os._exit(3 - 3)))
    leaving.start()
    leaving.join()
"""


def test_a_process_that_ends_at_once_ends_its_open_spans_first() -> None:
    with collecting() as collector:
        run(ENDS_AT_ONCE, FT_OTLP_ENDPOINT=collector.url)
    assert collector.names() == ["train", "training"]
    assert all(s.failed and s.attributes["ft.outcome"] == "oom" for s in collector.spans)


MANY = """
from core.telemetry import logs; from core.telemetry import spans as tracing
logs.configure("x")
tracing.configure("x")
for number in range(10_000):
    with tracing.span("one"):
        pass
first, second = tracing.flush(timeout_s=0.2), tracing.flush(timeout_s=1000.0)
print(first, second)
"""


def test_a_collector_that_hangs_or_is_not_there_is_waited_for_no_longer_than_said() -> None:
    with collecting(hanging=True) as collector:
        assert run(MANY, FT_OTLP_ENDPOINT=collector.url) == "False False", "who asks again while one waits does not wait as well"
        assert collector.paths, "it was asked"
    assert run(MANY.replace("1000.0", "0.2"), FT_OTLP_ENDPOINT="http://127.0.0.1:9") != ""


def test_a_workload_is_told_what_it_is_of_and_within_which_span() -> None:
    env = run(
        "import json\nfrom core.telemetry import correlation as context, logs, spans as tracing\ntracing.configure('x')\n"
        "with context.scope(tenant='t', job='j', attempt=1), tracing.span('step'):\n print(json.dumps(logs.environment()))",
        FT_OTLP_ENDPOINT="http://127.0.0.1:9/",
        FT_LOG_FORMAT="json",
    )
    for part in ('"FT_OTLP_ENDPOINT": "http://127.0.0.1:9"', '"FT_LOG_FORMAT": "json"', '"TRACEPARENT": "00-', '\\"attempt\\": 1'):
        assert part in env


def test_a_scope_ends_and_what_is_bound_in_it_ends_with_it() -> None:
    with correlation.scope(tenant="t"):
        with correlation.scope(job="j"):
            correlation.bind(attempt=1)
            assert correlation.fields() == {"tenant": "t", "job": "j", "attempt": 1}
        assert correlation.fields() == {"tenant": "t"}
    correlation.bind(tenant="nobody's")
    assert correlation.fields() == {}
