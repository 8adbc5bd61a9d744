"""Python client of the REST API: typed methods, and API errors as exceptions of ``ft_assets.errors``.

    with FtClient(base_url="http://127.0.0.1:8000", api_key="ft-sk-...") as client:
        file = client.files.create(Path("support.jsonl"))
        job = client.jobs.create(model="demo-llama-3m", training_file=file["id"])
        print(client.jobs.wait(job["id"])["fine_tuned_model"])

``AsyncFtClient`` has the same methods as coroutines; ``python -m tools.client`` generates ``FtClient`` from its modules.
Idempotent requests are retried after a broken connection or a 5xx, and so are submissions, which carry an idempotency key.
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
    """Imports the asynchronous client on first access, because the CLI does not need it."""
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(LAZY[name]), name)
