"""A delivery is part of the trace of the job that it speaks of."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.notifications import dispatch
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.telemetry import spans
from tests.support.servers.span_collector import collecting

ROOT = Path(__file__).resolve().parents[3]
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"
DELIVERED = """
import sys
from control_plane.notifications import dispatch as traces
from control_plane.platform.settings import load
from core.telemetry import spans as tracing
from control_plane.composition import open_platform
tracing.configure("ft-worker")
platform = open_platform(load())
now = platform.clock()
attempt = traces.Attempt(
    id="dlv_1", tenant_id="t", channel="webhook", target="we_1", subject=sys.argv[1], attempts=1, last_attempt_at=now, event_id="evt_1",
    type="fine_tuning.job.succeeded", data={}, happened_at=now,
)
with traces.delivery(platform, attempt) as span:
    span.fail("503")
tracing.flush()
"""


def test_it_is_found_by_the_id_of_the_job(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    with spans.span("request", parent=CALLER):
        job = jobs.submit(fresh_platform, owner.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job
    assert dispatch.of_job(fresh_platform, job.id) == CALLER
    assert dispatch.of_job(fresh_platform, "ftjob-none") is None
    url = fresh_platform.engine.url.render_as_string(hide_password=False)
    with collecting() as collector:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "OTEL_", "TRACEPARENT"))}
        env = {**kept, "FT_DATABASE_URL": url, "FT_OTLP_ENDPOINT": collector.url, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", DELIVERED, job.id], env=env, cwd=ROOT, check=True, timeout=120)
        span = collector.named("deliver webhook")
    assert (span.trace_id, span.parent_id, span.failed) == ("a" * 32, "b" * 16, True)
    assert (span.attributes["ft.job"], span.attributes["ft.event"]) == (job.id, "evt_1")
