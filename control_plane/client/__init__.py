"""The Python client: the REST API as methods, and its errors as their original classes.

    with FtClient(base_url="http://127.0.0.1:8000", api_key="ft-sk-...") as client:
        file = client.files.create(Path("support.jsonl"))
        job = client.jobs.create(model="demo-llama-3m", training_file=file.id)
        print(client.jobs.wait(job.id).fine_tuned_model)
        client.jobs.metrics(job.id).frame().plot(x="step", y="train_loss")

Calls that are safe to repeat are retried on a broken connection or a 5xx, including submissions, because each carries an idempotency key.
Programs in asyncio use OpenAI's ``AsyncOpenAI`` for what the two have in common.
"""

from control_plane.client import webhooks
from control_plane.client.ft_client import FtClient
from control_plane.client.pages import Pages
from control_plane.client.record import Record

__all__ = ["FtClient", "Pages", "Record", "webhooks"]
