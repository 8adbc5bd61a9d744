"""The Python client: the REST API as typed methods, and its errors as the family they came from.

    with FtClient(base_url="http://127.0.0.1:8000", api_key="ft-sk-...") as client:
        file = client.files.create(Path("support.jsonl"))
        job = client.jobs.create(model="demo-llama-3m", training_file=file["id"])
        print(client.jobs.wait(job["id"])["fine_tuned_model"])

``AsyncFtClient`` has the same methods to be awaited; its modules are the source that ``python -m tools.client`` makes
``FtClient`` from. Calls that change nothing twice are repeated on a broken connection or a 5xx, submissions among them, for
each names itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from control_plane.client import webhooks
from control_plane.client.synchronous.client import FtClient
from control_plane.client.synchronous.pages import Pages

if TYPE_CHECKING:
    from control_plane.client.asynchronous.client import AsyncFtClient
    from control_plane.client.asynchronous.pages import AsyncPages

__all__ = ["AsyncFtClient", "AsyncPages", "FtClient", "Pages", "webhooks"]
LAZY = {"AsyncFtClient": "control_plane.client.asynchronous.client", "AsyncPages": "control_plane.client.asynchronous.pages"}


def __getattr__(name: str) -> Any:
    """The asynchronous half, when it is first asked for: a command line needs none of it."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(LAZY[name]), name)
