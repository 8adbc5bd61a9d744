"""``python -m deploy.local.dagster_web WORKSPACE [HOST]``: Dagster's webserver with access control, in one process and on one port."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dagster import DagsterInstance, __version__
from dagster_webserver.app import create_app_from_workspace_process_context
from starlette.types import ASGIApp

from control_plane.composition import open_platform
from control_plane.http.rate_limits import RateLimitHeaders
from control_plane.platform import secrets
from control_plane.platform.settings import Settings, load
from core.telemetry import logs
from deploy.local.dagster_web.access_control import AccessControl, allowed_hosts
from resources import http_server
from resources.dagster.private_api import WorkspaceFileTarget, WorkspaceProcessContext

DATABASE_LIMITS = (15_000, 3_600, 20)
"""Statement timeout (ms), maximum age of a pooled connection (s) and pool size: the defaults of ``dagster-webserver``."""
POLL_MS = 2_000
"""Interval at which the UI polls for asset updates: the default of ``dagster dev``."""
GRACEFUL_SHUTDOWN_S = 3
"""Websockets of the UI never end by themselves."""


def serve(instance: DagsterInstance, workspace: str, settings: Settings, *, host: str = "127.0.0.1") -> None:
    """Serve the code locations in the file `workspace` at `host` until SIGINT or SIGTERM."""
    instance.optimize_for_webserver(*DATABASE_LIMITS)
    target = WorkspaceFileTarget([workspace])
    with WorkspaceProcessContext(instance, version=__version__, read_only=False, workspace_load_target=target) as context:
        app = protect(create_app_from_workspace_process_context(context, live_data_poll_rate=POLL_MS), settings)
        port, grace = settings.dagster_port, GRACEFUL_SHUTDOWN_S
        http_server.run(app, host=host, port=port, ws="auto", log_level="warning", timeout_graceful_shutdown=grace)


def protect(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Restrict `app` to operators of the platform that `settings` describe, and to its own processes."""
    hosts = allowed_hosts(settings.dagster_port, settings.dagster_hosts)
    return RateLimitHeaders(AccessControl(app, platform=open_platform(settings), token=secrets.dagster_token(settings), hosts=hosts))


def main(argv: Sequence[str] | None = None) -> None:
    workspace, *host = sys.argv[1:] if argv is None else argv
    logs.configure("ft-dagster")
    with DagsterInstance.get() as instance:
        serve(instance, workspace, load(), host=host[0] if host else "127.0.0.1")


if __name__ == "__main__":
    main()
