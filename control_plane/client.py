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
from urllib.parse import quote

import httpx

from ft_assets.errors import (
    Conflict,
    Forbidden,
    FtError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    from_dict,
)

Json = dict[str, Any]

FINAL = frozenset({"succeeded", "failed", "cancelled"})
TIMEOUT = httpx.Timeout(60.0, connect=5.0, write=300.0)
GENERATION_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""Between two bytes of a stream of events; the server says something at least every 15 s."""
NUM_RETRIES = 2
BY_STATUS: Mapping[int, type[FtError]] = {
    400: InvalidRequest, 401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: Conflict, 429: QuotaExceeded, 502: Unavailable,
    503: Unavailable, 504: Unavailable,
}  # fmt: skip


class FtClient:
    """One tenant's view of a platform. Thread-safe; closed by ``close`` or as a context."""

    def __init__(self, *, base_url: str, api_key: str, transport: httpx.BaseTransport | None = None, backoff_s: float = 0.5) -> None:
        self._backoff_s = backoff_s
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers={"authorization": f"Bearer {api_key}"}, timeout=TIMEOUT, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

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
        data = {"purpose": purpose} | _json_fields(column_map=column_map, policies=policies) | ({"model": model} if model else {})
        return self._send_file("/v1/files", path, data)

    def import_dataset(self, hub_id: str, **fields: Any) -> Json:
        """A file that is fetched from the Hub, then validated; `fields`: ``column_map``, ``policies``, ``model``, ``hub_token``."""
        body = {"hub_id": hub_id} | {k: v for k, v in fields.items() if v is not None}
        return self._json("POST", "/v1/datasets/import", json=body)

    def file_events(self, file_id: str) -> Iterator[Json]:
        """Changes of a file as they happen, until it is validated; the last one tells how it ended."""
        with self._http.stream("GET", _path("/v1/files", file_id, "events"), timeout=STREAM_TIMEOUT) as answer:
            _raise_for_error(answer)
            for _, data in _server_sent(answer):
                if data == "[DONE]":
                    return
                yield json.loads(data)

    def validate_again(self, file_id: str) -> Json:
        """Have a file that the platform failed on validated once more."""
        return self._json("POST", _path("/v1/files", file_id, "validate"))

    def files(self, *, limit: int = 100) -> list[Json]:
        return self._list("/v1/files", limit=limit)

    def file(self, file_id: str) -> Json:
        return self._json("GET", _path("/v1/files", file_id))

    def delete_file(self, file_id: str) -> Json:
        return self._json("DELETE", _path("/v1/files", file_id))

    def dataset_report(self, dataset_or_file_id: str) -> Json:
        """The validation report; a refused file has one, too."""
        return self._json("GET", _path("/v1/datasets", dataset_or_file_id, "report"))

    def datasets(self, *, limit: int = 20) -> list[Json]:
        """The newest dataset versions."""
        return self._list("/v1/datasets", limit=limit)

    def dataset(self, dataset_id: str) -> Json:
        return self._json("GET", _path("/v1/datasets", dataset_id))

    def approve_dataset(self, dataset_id: str) -> Json:
        """Let jobs train on a dataset that waits for review."""
        return self._json("POST", _path("/v1/datasets", dataset_id, "approve"), repeatable=True)

    def preview(self, dataset_or_file_id: str, *, model: str, num_examples: int = 5, max_seq_len: int | None = None) -> Json:
        """The first examples exactly as they are trained."""
        params = {"model": model, "num_examples": num_examples} | ({"max_seq_len": max_seq_len} if max_seq_len else {})
        return self._json("GET", _path("/v1/datasets", dataset_or_file_id, "preview"), params=params)

    def suites(self) -> list[Json]:
        """The evaluation suites that uploads are held against: the operator's, then the tenant's own."""
        return list(self._json("GET", "/v1/suites")["data"])

    def add_suite(self, name: str, path: Path, *, field: str, column_map: Mapping[str, str] | None = None) -> Json:
        return self._send_file("/v1/suites", path, {"name": name, "field": field} | _json_fields(column_map=column_map))

    def remove_suite(self, name: str) -> Json:
        return self._json("DELETE", _path("/v1/suites", name))

    def estimate(self, *, model: str, training_file: str, **fields: Any) -> Json:
        """What a job with this body would take and cost; see its ``assumptions``."""
        return self._json("POST", "/v1/fine_tuning/jobs/estimate", json={"model": model, "training_file": training_file, **fields})

    def create_job(self, *, model: str, training_file: str, idempotency_key: str | None = None, **fields: Any) -> Json:
        """Submit a job; `fields` are those of the API's body."""
        body = {"model": model, "training_file": training_file, **fields}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._json("POST", "/v1/fine_tuning/jobs", json=body, headers=headers, repeatable=True)

    def jobs(self, *, limit: int = 20, metadata: Mapping[str, str] | None = None) -> list[Json]:
        """The newest jobs."""
        return self._list("/v1/fine_tuning/jobs", limit=limit, **{f"metadata[{k}]": v for k, v in (metadata or {}).items()})

    def job(self, job_id: str) -> Json:
        return self._json("GET", _path("/v1/fine_tuning/jobs", job_id))

    def cancel_job(self, job_id: str) -> Json:
        return self._json("POST", _path("/v1/fine_tuning/jobs", job_id, "cancel"), repeatable=True)

    def pause_job(self, job_id: str) -> Json:
        return self._json("POST", _path("/v1/fine_tuning/jobs", job_id, "pause"), repeatable=True)

    def resume_job(self, job_id: str) -> Json:
        return self._json("POST", _path("/v1/fine_tuning/jobs", job_id, "resume"))

    def compare_jobs(self, job_ids: Sequence[str]) -> Json:
        """2 to 100 jobs side by side."""
        return self._json("GET", "/v1/fine_tuning/jobs/compare", params={"ids": ",".join(job_ids)})

    def create_sweep(
        self, *, model: str, training_file: str, sweep: Mapping[str, Any], idempotency_key: str | None = None, **fields: Any
    ) -> Json:
        """Submit a job for each combination that `sweep` asks for; `fields` are those of a job."""
        body = {"model": model, "training_file": training_file, "sweep": dict(sweep), **fields}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return self._json("POST", "/v1/fine_tuning/sweeps", json=body, headers=headers, repeatable=True)

    def sweeps(self, *, limit: int = 20) -> list[Json]:
        """The newest sweeps."""
        return self._list("/v1/fine_tuning/sweeps", limit=limit)

    def sweep(self, sweep_id: str) -> Json:
        return self._json("GET", _path("/v1/fine_tuning/sweeps", sweep_id))

    def cancel_sweep(self, sweep_id: str) -> Json:
        return self._json("POST", _path("/v1/fine_tuning/sweeps", sweep_id, "cancel"), repeatable=True)

    def checkpoints(self, job_id: str) -> list[Json]:
        return self._list(_path("/v1/fine_tuning/jobs", job_id, "checkpoints"), limit=100)

    def metrics(self, job_id: str) -> list[Json]:
        """What was measured at each step, in order."""
        return list(self._json("GET", _path("/v1/fine_tuning/jobs", job_id, "metrics"))["data"])

    def metrics_csv(self, job_id: str) -> bytes:
        """The same as a table: one row per step."""
        answer = self._http.get(_path("/v1/fine_tuning/jobs", job_id, "metrics.csv"))
        _raise_for_error(answer)
        return answer.content

    def events(self, job_id: str) -> Iterator[Json]:
        """Events so far, newest first, page after page."""
        path = _path("/v1/fine_tuning/jobs", job_id, "events")
        after: dict[str, str] = {}
        while True:
            page = self._json("GET", path, params={"limit": 100, **after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["data"][-1]["id"]}

    def follow(self, job_id: str) -> Iterator[Json]:
        """Events as they happen, oldest first, until the job has ended; a stream that breaks off is taken up where it broke."""
        path, last, failures = _path("/v1/fine_tuning/jobs", job_id, "events"), "", 0
        while True:
            try:
                headers = {"last-event-id": last} if last else {}
                with self._http.stream("GET", path, params={"stream": "true"}, headers=headers, timeout=STREAM_TIMEOUT) as answer:
                    _raise_for_error(answer)
                    for seq, data in _server_sent(answer):
                        if data == "[DONE]":
                            return
                        last, failures = seq, 0
                        yield json.loads(data)
            except (httpx.TransportError, Unavailable):
                failures += 1
                if failures > NUM_RETRIES:
                    raise
            time.sleep(self._backoff_s)

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
        return list(self._json("GET", "/v1/models")["data"])

    def recipes(self, *, method: str = "sft") -> list[Json]:
        """Recipes with their defaults for `method`, each with its source."""
        return list(self._json("GET", "/v1/recipes", params={"method": method})["data"])

    def recipe(self, name: str, *, method: str = "sft") -> Json:
        return self._json("GET", _path("/v1/recipes", name), params={"method": method})

    def adapters(self, *, limit: int = 100) -> list[Json]:
        return self._list("/v1/adapters", limit=limit)

    def adapter(self, adapter: str) -> Json:
        """By id or by model name."""
        return self._json("GET", _path("/v1/adapters", adapter))

    def promote(self, adapter: str) -> Json:
        return self._json("POST", _path("/v1/adapters", adapter, "promote"), repeatable=True)

    def rollback(self, adapter: str) -> Json:
        """``{"withdrawn": adapter, "serving": adapter}``."""
        return self._json("POST", _path("/v1/adapters", adapter, "rollback"), repeatable=True)

    def deprecate(self, adapter: str) -> Json:
        return self._json("POST", _path("/v1/adapters", adapter, "deprecate"), repeatable=True)

    def export(self, adapter: str, *, format: str, precision: str | None = None) -> Json:
        """Have an adapter made into files to take along; the same request again gives the same export."""
        body = {"format": format} | ({"precision": precision} if precision else {})
        return self._json("POST", _path("/v1/adapters", adapter, "exports"), json=body, repeatable=True)

    def exports(self, adapter: str) -> list[Json]:
        return self._list(_path("/v1/adapters", adapter, "exports"))

    def wait_for_export(self, adapter: str, export_id: str, *, poll_s: float = 0.5) -> Json:
        """The export, once it is ready or has failed."""
        while (found := self._json("GET", _path("/v1/adapters", adapter, "exports", export_id)))["status"] in ("queued", "running"):
            time.sleep(poll_s)
        return found

    def delete_export(self, adapter: str, export_id: str) -> None:
        self._json("DELETE", _path("/v1/adapters", adapter, "exports", export_id))

    def download_export(self, adapter: str, export_id: str, target: Path) -> str:
        """Write the archive to `target`; its sha256."""
        digest = hashlib.sha256()
        with self._http.stream("GET", _path("/v1/adapters", adapter, "exports", export_id, "content")) as answer:
            _raise_for_error(answer)
            with target.open("wb") as out:
                for chunk in answer.iter_bytes():
                    digest.update(chunk)
                    out.write(chunk)
        return digest.hexdigest()

    def chat(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Json:
        """A whole chat completion."""
        body = {"model": model, "messages": list(messages), **options}
        return self._json("POST", "/v1/chat/completions", json=body, timeout=GENERATION_TIMEOUT)

    def chat_stream(self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[str]:
        """The answer's text, piece by piece."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        with self._http.stream("POST", "/v1/chat/completions", json=body, timeout=GENERATION_TIMEOUT) as answer:
            _raise_for_error(answer)
            for _, data in _server_sent(answer):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise _error(chunk, status=500)
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    def _list(self, path: str, **params: Any) -> list[Json]:
        return list(self._json("GET", path, params=params)["data"])

    def _send_file(self, path: str, file: Path, data: Mapping[str, str]) -> Json:
        with file.open("rb") as stream:
            return self._json("POST", path, data=dict(data), files={"file": (file.name, stream, "application/octet-stream")})

    def _json(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> Json:
        """The answer's body. A call that may be repeated is, twice, with a pause before each."""
        num_retries = NUM_RETRIES if repeatable or method == "GET" else 0
        for retry in range(num_retries + 1):
            if retry:
                time.sleep(self._backoff_s * 2 ** (retry - 1))
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError:
                if retry == num_retries:
                    raise
                continue
            if answer.status_code < 500 or retry == num_retries:
                break
        _raise_for_error(answer)
        body: Json = answer.json()
        return body


def _json_fields(**objects: Mapping[str, Any] | None) -> dict[str, str]:
    """Form fields of the objects that are given."""
    return {name: json.dumps(value) for name, value in objects.items() if value}


def _path(root: str, *segments: str) -> str:
    return "/".join((root, *(quote(s, safe=":") for s in segments)))


def _raise_for_error(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    answer.read()
    try:
        body = answer.json()
    except ValueError:
        body = None
    raise _error(body, status=answer.status_code)


def _error(body: Any, *, status: int) -> FtError:
    """The error that the body tells of; whatever stands before the API may answer in another form."""
    kind = BY_STATUS.get(status, FtError)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return kind(f"the API answered with status {status} and no explanation; is something else listening there?")
    return from_dict({"code": error.get("code") or kind.default_code, "message": error["message"], "param": error.get("param")}, kind)


def _server_sent(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    """Id and data of each event of a stream; comments are passed over."""
    seq = ""
    for line in answer.iter_lines():
        name, _, value = line.partition(":")
        if name == "id":
            seq = value.strip()
        elif name == "data":
            yield seq, value.removeprefix(" ")
