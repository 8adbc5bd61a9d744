"""The API process: settings from the environment, then uvicorn with limits on requests."""

from __future__ import annotations

from control_plane.api.app import create_app
from control_plane.composition import open_platform
from control_plane.platform.settings import load
from ft_assets.telemetry import logs, spans
from resources import http_server

SERVICE = "ft-api"
GRACEFUL_SHUTDOWN_S = 5
"""Event streams never end by themselves; after this long they are cut off, and clients reconnect."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load()
    logs.configure(SERVICE)
    spans.configure(SERVICE)
    http_server.run(
        create_app(open_platform(settings)),
        host=settings.api_host,
        port=settings.api_port,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        log_config=None,
    )
