"""The Python client: the REST API as methods, and its errors as their original classes.

    with FtClient(base_url="http://127.0.0.1:8000", api_key="ft-sk-...") as client:
        file = client.files.create(Path("support.jsonl"))
        job = client.jobs.create(model="demo-llama-3m", training_file=file.id)
        print(client.jobs.wait(job.id).fine_tuned_model)
        client.jobs.metrics(job.id).frame().plot(x="step", y="train_loss")

Calls that are safe to repeat are retried on a broken connection or a 5xx, including submissions, because each carries an idempotency key.
Programs in asyncio use OpenAI's ``AsyncOpenAI`` for what the two have in common.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ft_client import webhooks
    from ft_client.client import FtClient
    from ft_client.pages import Pages
    from ft_client.record import Record

__all__ = ["FtClient", "Pages", "Record", "webhooks"]
MODULES = {"FtClient": "client", "Pages": "pages", "Record": "record", "webhooks": "webhooks"}


def __getattr__(name: str) -> Any:
    """Import a module when it is first used: most commands of ``ft`` start without httpx."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{MODULES[name]}")
    return module if name == MODULES[name] else getattr(module, name)
