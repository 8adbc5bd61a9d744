"""The API process: settings from the environment, then uvicorn with limits on requests."""

from __future__ import annotations

import sys

from control_plane.api.app import create_app
from control_plane.composition import open_platform
from control_plane.platform.settings import load
from core.telemetry import logs, spans
from resources import http_server

SERVICE = "ft-api"
GRACEFUL_SHUTDOWN_S = 20
"""Time for requests in progress, which may wait for a model's answer: the chart's 30 s from the pod's end, less 5 s before SIGTERM and 5 s
to spare. Event streams end at once, and their clients reconnect."""
SWITCH_S = 0.0005
"""Python's default is ten times that: so long the event loop may wait for each thread that computes, at each of a request's dozen steps."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_S)
    settings = load()
    logs.configure(SERVICE)
    spans.configure(SERVICE)
    app = create_app(open_platform(settings))
    http_server.run(
        app,
        on_stop=app.state.streams.end,
        host=settings.api_host,
        port=settings.api_port,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        log_config=None,
    )
