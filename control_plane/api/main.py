"""The API as a process: settings from the environment, then uvicorn."""

from __future__ import annotations

import logging
import os

import uvicorn

from control_plane.api.app import create_app
from control_plane.settings import load
from resources.platform import open_platform

GRACEFUL_SHUTDOWN_S = 5
"""Streams of events never end by themselves; after this they are cut off, and their clients connect again."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load()
    logging.basicConfig(
        level=os.environ.get("FT_LOG_LEVEL", "INFO").upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it reports each look at the schema's revision
    uvicorn.run(
        create_app(open_platform(settings)),
        host=settings.api_host,
        port=settings.api_port,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        log_config=None,
        access_log=False,
    )
