"""The Python client: the REST API as methods that return its JSON objects, and its errors as the family they came from.

    with FtClient(base_url="http://127.0.0.1:8000", api_key="ft-sk-...") as client:
        file = client.upload_file(Path("support.jsonl"))
        job = client.wait(client.create_job(model="demo-llama-3m", training_file=file["id"])["id"])

Calls that change nothing twice are repeated on a broken connection or a 5xx; ``create_job`` is one of them, for it names
its submission. ``httpx.TransportError`` is raised when the API cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from control_plane.connection import NUM_RETRIES, Connection, Json, error_of, json_fields, path_of, server_sent
from ft_assets.errors import Unavailable

FINAL = frozenset({"succeeded", "failed", "cancelled"})
GENERATION_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""Between two bytes of a stream of events; the server says something at least every 15 s."""


class FtClient:
    """One tenant's view of a platform. Thread-safe; closed by ``close`` or as a context."""

    def __init__(self, *, base_url: str, api_key: str, transport: httpx.BaseTransport | None = None, backoff_s: float = 0.5) -> None:
        self._api = Connection(base_url=base_url, api_key=api_key, transport=transport, backoff_s=backoff_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._api.close()

    def upload_file(
        self,
        path: Path,
        *,
        column_map: Mapping[str, str] | None = None,
        policies: Mapping[str, Any] | None = None,
        model: str | None = None,
        purpose: str = "fine-tune",
    ) -> Json:
        """Upload a dataset; a small one comes back validated, with status ``processed`` or ``error``."""
        data = {"purpose": purpose} | json_fields(column_map=column_map, policies=policies) | ({"model": model} if model else {})
        return self._api.send_file("/v1/files", path, data)

    def import_dataset(self, hub_id: str, **fields: Any) -> Json:
        """A file that is fetched from the Hub, then validated; `fields`: ``column_map``, ``policies``, ``model``, ``hub_token``."""
        body = {"hub_id": hub_id} | {k: v for k, v in fields.items() if v is not None}
        return self._api.json("POST", "/v1/datasets/import", json=body)

    def file_events(self, file_id: str) -> Iterator[Json]:
        """Changes of a file as they happen, until it is validated; the last one tells how it ended."""
        with self._api.stream("GET", path_of("/v1/files", file_id, "events"), timeout=STREAM_TIMEOUT) as answer:
            for _, data in server_sent(answer):
                if data == "[DONE]":
                    return
                yield json.loads(data)

    def validate_again(self, file_id: str) -> Json:
        """Have a file that the platform failed on validated once more."""
        return self._api.json("POST", path_of("/v1/files", file_id, "validate"))

    def files(self, *, limit: int = 100) -> list[Json]:
        return self._api.list("/v1/files", limit=limit)

    def file(self, file_id: str) -> Json:
        return self._api.json("GET", path_of("/v1/files", file_id))

    def delete_file(self, file_id: str) -> Json:
        return self._api.json("DELETE", path_of("/v1/files", file_id))

    def dataset_report(self, dataset_or_file_id: str) -> Json:
        """The validation report; a refused file has one, too."""
        return self._api.json("GET", path_of("/v1/datasets", dataset_or_file_id, "report"))

    def datasets(self, *, limit: int = 20) -> list[Json]:
        """The newest dataset versions."""
        return self._api.list("/v1/datasets", limit=limit)

    def dataset(self, dataset_id: str) -> Json:
        return self._api.json("GET", path_of("/v1/datasets", dataset_id))

    def approve_dataset(self, dataset_id: str) -> Json:
        """Let jobs train on a dataset that waits for review."""
        return self._api.json("POST", path_of("/v1/datasets", dataset_id, "approve"), repeatable=True)

    def preview(self, dataset_or_file_id: str, *, model: str, num_examples: int = 5, max_seq_len: int | None = None) -> Json:
        """The first examples exactly as they are trained."""
        params = {"model": model, "num_examples": num_examples} | ({"max_seq_len": max_seq_len} if max_seq_len else {})
        return self._api.json("GET", path_of("/v1/datasets", dataset_or_file_id, "preview"), params=params)

    def suites(self) -> list[Json]:
        """The evaluation suites that uploads are held against: the operator's, then the tenant's own."""
        return list(self._api.json("GET", "/v1/suites")["data"])

    def capability_suites(self) -> list[Json]:
        """General tasks that a job's ``eval_config.capability`` may name."""
        return list(self._api.json("GET", "/v1/capability_suites")["data"])

    def add_suite(self, name: str, path: Path, *, field: str, column_map: Mapping[str, str] | None = None) -> Json:
        return self._api.send_file("/v1/suites", path, {"name": name, "field": field} | json_fields(column_map=column_map))

    def remove_suite(self, name: str) -> Json:
        return self._api.json("DELETE", path_of("/v1/suites", name))

    def estimate(self, *, model: str, training_file: str, **fields: Any) -> Json:
        """What a job with this body would take and cost; see its ``assumptions``."""
        return self._api.json("POST", "/v1/fine_tuning/jobs/estimate", json={"model": model, "training_file": training_file, **fields})

    def create_job(self, *, model: str, training_file: str, idempotency_key: str | None = None, **fields: Any) -> Json:
        """Submit a job; `fields` are those of the API's body."""
        body = {"model": model, "training_file": training_file, **fields}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._api.json("POST", "/v1/fine_tuning/jobs", json=body, headers=headers, repeatable=True)

    def jobs(self, *, limit: int = 20, metadata: Mapping[str, str] | None = None) -> list[Json]:
        """The newest jobs."""
        return self._api.list("/v1/fine_tuning/jobs", limit=limit, **{f"metadata[{k}]": v for k, v in (metadata or {}).items()})

    def job(self, job_id: str) -> Json:
        return self._api.json("GET", path_of("/v1/fine_tuning/jobs", job_id))

    def cancel_job(self, job_id: str) -> Json:
        return self._api.json("POST", path_of("/v1/fine_tuning/jobs", job_id, "cancel"), repeatable=True)

    def pause_job(self, job_id: str) -> Json:
        return self._api.json("POST", path_of("/v1/fine_tuning/jobs", job_id, "pause"), repeatable=True)

    def resume_job(self, job_id: str) -> Json:
        return self._api.json("POST", path_of("/v1/fine_tuning/jobs", job_id, "resume"))

    def compare_jobs(self, job_ids: Sequence[str]) -> Json:
        """2 to 100 jobs side by side."""
        return self._api.json("GET", "/v1/fine_tuning/jobs/compare", params={"ids": ",".join(job_ids)})

    def create_sweep(
        self, *, model: str, training_file: str, sweep: Mapping[str, Any], idempotency_key: str | None = None, **fields: Any
    ) -> Json:
        """Submit a job for each combination that `sweep` asks for; `fields` are those of a job."""
        body = {"model": model, "training_file": training_file, "sweep": dict(sweep), **fields}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._api.json("POST", "/v1/fine_tuning/sweeps", json=body, headers=headers, repeatable=True)

    def sweeps(self, *, limit: int = 20) -> list[Json]:
        """The newest sweeps."""
        return self._api.list("/v1/fine_tuning/sweeps", limit=limit)

    def sweep(self, sweep_id: str) -> Json:
        return self._api.json("GET", path_of("/v1/fine_tuning/sweeps", sweep_id))

    def cancel_sweep(self, sweep_id: str) -> Json:
        return self._api.json("POST", path_of("/v1/fine_tuning/sweeps", sweep_id, "cancel"), repeatable=True)

    def checkpoints(self, job_id: str) -> list[Json]:
        return self._api.list(path_of("/v1/fine_tuning/jobs", job_id, "checkpoints"), limit=100)

    def metrics(self, job_id: str) -> list[Json]:
        """What was measured at each step, in order."""
        return list(self._api.json("GET", path_of("/v1/fine_tuning/jobs", job_id, "metrics"))["data"])

    def metrics_csv(self, job_id: str) -> bytes:
        """The same as a table: one row per step."""
        return self._api.content(path_of("/v1/fine_tuning/jobs", job_id, "metrics.csv"))

    def evaluation(self, job_id: str) -> Json:
        """The evaluation of a job's adapter: ``report``, ``verdict``, ``advice``, and ``next_run``, the hyperparameters advised."""
        return self._api.json("GET", path_of("/v1/fine_tuning/jobs", job_id, "evaluation"))

    def evaluation_page(self, job_id: str) -> bytes:
        """The same as an HTML page that needs nothing else."""
        return self._api.content(path_of("/v1/fine_tuning/jobs", job_id, "evaluation"), accept="text/html")

    def evaluation_samples(self, job_id: str, *, suite: str | None = None, only: str | None = None, page_size: int = 100) -> Iterator[Json]:
        """Every item as each model answered it, page after page; `only`: ``changed``, ``worse`` or ``better``."""
        path = path_of("/v1/fine_tuning/jobs", job_id, "evaluation", "samples")
        asked = {"limit": page_size} | {k: v for k, v in (("suite", suite), ("only", only)) if v is not None}
        yield from self._api.pages(path, **asked)

    def events(self, job_id: str) -> Iterator[Json]:
        """Events so far, newest first, page after page."""
        path = path_of("/v1/fine_tuning/jobs", job_id, "events")
        yield from self._api.pages(path, limit=100)

    def follow(self, job_id: str) -> Iterator[Json]:
        """Events as they happen, oldest first, until the job has ended; a stream that breaks off is taken up where it broke."""
        path, last, failures = path_of("/v1/fine_tuning/jobs", job_id, "events"), "", 0
        while True:
            try:
                headers = {"last-event-id": last} if last else {}
                with self._api.stream("GET", path, params={"stream": "true"}, headers=headers, timeout=STREAM_TIMEOUT) as answer:
                    for seq, data in server_sent(answer):
                        if data == "[DONE]":
                            return
                        last, failures = seq, 0
                        yield json.loads(data)
            except (httpx.TransportError, Unavailable):
                failures += 1
                if failures > NUM_RETRIES:
                    raise
            time.sleep(self._api.backoff_s)

    def wait(self, job_id: str, *, timeout_s: float | None = None, poll_s: float = 1.0) -> Json:
        """The job, once it has ended; ``TimeoutError`` if it has not within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := self.job(job_id))["status"] not in FINAL:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} is {job['state']} after {timeout_s:g} s; it goes on")
            time.sleep(poll_s)
        return job

    def models(self) -> list[Json]:
        """Base models, then the tenant's adapters."""
        return list(self._api.json("GET", "/v1/models")["data"])

    def recipes(self, *, method: str = "sft") -> list[Json]:
        """Recipes with their defaults for `method`, each with its source."""
        return list(self._api.json("GET", "/v1/recipes", params={"method": method})["data"])

    def recipe(self, name: str, *, method: str = "sft") -> Json:
        return self._api.json("GET", path_of("/v1/recipes", name), params={"method": method})

    def adapters(self, *, limit: int = 100) -> list[Json]:
        return self._api.list("/v1/adapters", limit=limit)

    def adapter(self, adapter: str) -> Json:
        """By id or by model name."""
        return self._api.json("GET", path_of("/v1/adapters", adapter))

    def promote(self, adapter: str) -> Json:
        return self._api.json("POST", path_of("/v1/adapters", adapter, "promote"), repeatable=True)

    def rollback(self, adapter: str) -> Json:
        """``{"withdrawn": adapter, "serving": adapter}``."""
        return self._api.json("POST", path_of("/v1/adapters", adapter, "rollback"), repeatable=True)

    def server_manifest(self, model: str) -> str:
        """YAML of a whole model's own server on a cluster."""
        return self._api.content(path_of("/v1/adapters", model, "server")).decode()

    def route_manifest(self, name: str) -> str:
        """YAML of a route between versions, for llm-d."""
        return self._api.content(path_of("/v1/model_routes", name, "rewrite")).decode()

    def deprecate(self, adapter: str) -> Json:
        return self._api.json("POST", path_of("/v1/adapters", adapter, "deprecate"), repeatable=True)

    def pending_adapters(self) -> list[Json]:
        """Adapters that wait for a person's approval, newest first."""
        return self._api.list("/v1/adapters", limit=100, approval="pending")

    def approve(self, adapter: str, *, note: str | None = None, promote: bool = False) -> Json:
        """Let an adapter be promoted whose job asked for approval; `promote` does that at once."""
        body = {"note": note, "promote": promote}
        return self._api.json("POST", path_of("/v1/adapters", adapter, "approve"), json=body, repeatable=True)

    def reject(self, adapter: str, *, note: str | None = None) -> Json:
        return self._api.json("POST", path_of("/v1/adapters", adapter, "reject"), json={"note": note}, repeatable=True)

    def lineage(self, model: str, *, verify: bool = False) -> Json:
        """Where a model comes from, by whatever name a request or an answer gives it, back to the uploaded files."""
        params = {"verify": "true"} if verify else {}
        return self._api.json("GET", path_of("/v1/models", model, "lineage"), params=params, timeout=GENERATION_TIMEOUT)

    def delete_data(self, *, confirm: str, reason: str) -> Json:
        """Delete everything that the tenant stored, for good; `confirm` is its id. The deletion is carried out behind the answer."""
        return self._api.json("POST", "/v1/data_deletions", json={"confirm": confirm, "reason": reason}, repeatable=True)

    def deletions(self) -> list[Json]:
        return self._api.list("/v1/deletions", limit=100)

    def deletion(self, deletion_id: str) -> Json:
        """A deletion, with its proof once it is done."""
        return self._api.json("GET", path_of("/v1/deletions", deletion_id))

    def evaluate_adapter(self, adapter: str, *, eval_config: Mapping[str, Any] | None = None) -> Json:
        """Have an adapter judged once more, on the present bytes of its base; one that waits already is returned."""
        body = {} if eval_config is None else {"eval_config": dict(eval_config)}
        return self._api.json("POST", path_of("/v1/adapters", adapter, "evaluations"), json=body, repeatable=True)

    def adapter_evaluations(self, adapter: str, *, limit: int = 20) -> list[Json]:
        """Verdicts on an adapter and those that it waits for, newest first."""
        return self._api.list(path_of("/v1/adapters", adapter, "evaluations"), limit=limit)

    def wait_for_evaluation(self, adapter: str, evaluation_id: str, *, poll_s: float = 1.0) -> Json:
        """The evaluation, once there is a verdict or it has failed."""
        path = path_of("/v1/adapters", adapter, "evaluations", evaluation_id)
        while (found := self._api.json("GET", path))["state"] in ("queued", "running"):
            time.sleep(poll_s)
        return found

    def adapter_evaluation(self, adapter: str, evaluation_id: str) -> Json:
        """The report of a finished evaluation, as :meth:`evaluation` gives a job's own."""
        return self._api.json("GET", path_of("/v1/adapters", adapter, "evaluations", evaluation_id, "report"))

    def adapter_evaluation_page(self, adapter: str, evaluation_id: str) -> bytes:
        """The same as an HTML page that needs nothing else."""
        return self._api.content(path_of("/v1/adapters", adapter, "evaluations", evaluation_id, "report"), accept="text/html")

    def adapter_evaluation_samples(
        self, adapter: str, evaluation_id: str, *, suite: str | None = None, only: str | None = None, page_size: int = 100
    ) -> Iterator[Json]:
        """Every item of it as each model answered it, page after page."""
        path = path_of("/v1/adapters", adapter, "evaluations", evaluation_id, "samples")
        asked = {"limit": page_size} | {k: v for k, v in (("suite", suite), ("only", only)) if v is not None}
        yield from self._api.pages(path, **asked)

    def routes(self) -> list[Json]:
        return self._api.list("/v1/model_routes")

    def route(self, name: str) -> Json:
        return self._api.json("GET", path_of("/v1/model_routes", name))

    def set_route(self, name: str, targets: Mapping[str, int]) -> Json:
        """Make `name` stand for weighted targets: adapters in production (id or model name) or base models."""
        body = {"targets": [{"model": model, "weight": weight} for model, weight in targets.items()]}
        return self._api.json("PUT", path_of("/v1/model_routes", name), json=body, repeatable=True)

    def delete_route(self, name: str) -> Json:
        return self._api.json("DELETE", path_of("/v1/model_routes", name))

    def export(self, adapter: str, *, format: str, precision: str | None = None) -> Json:
        """Have an adapter made into files to take along; the same request again gives the same export."""
        body = {"format": format} | ({"precision": precision} if precision else {})
        return self._api.json("POST", path_of("/v1/adapters", adapter, "exports"), json=body, repeatable=True)

    def exports(self, adapter: str) -> list[Json]:
        return self._api.list(path_of("/v1/adapters", adapter, "exports"))

    def wait_for_export(self, adapter: str, export_id: str, *, poll_s: float = 0.5) -> Json:
        """The export, once it is ready or has failed."""
        while (found := self._api.json("GET", path_of("/v1/adapters", adapter, "exports", export_id)))["status"] in ("queued", "running"):
            time.sleep(poll_s)
        return found

    def delete_export(self, adapter: str, export_id: str) -> None:
        self._api.json("DELETE", path_of("/v1/adapters", adapter, "exports", export_id))

    def download_export(self, adapter: str, export_id: str, target: Path) -> str:
        """Write the archive to `target`; its sha256."""
        digest = hashlib.sha256()
        path = path_of("/v1/adapters", adapter, "exports", export_id, "content")
        with self._api.stream("GET", path) as answer, target.open("wb") as out:
            for chunk in answer.iter_bytes():
                digest.update(chunk)
                out.write(chunk)
        return digest.hexdigest()

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Json:
        """A whole chat completion."""
        body = {"model": model, "messages": list(messages), **options}
        return self._api.json("POST", "/v1/chat/completions", json=body, timeout=GENERATION_TIMEOUT)

    def chat_stream(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """The answer's text, piece by piece."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        with self._api.stream("POST", "/v1/chat/completions", json=body, timeout=GENERATION_TIMEOUT) as answer:
            for _, data in server_sent(answer):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise error_of(chunk, status=500)
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
