"""The fleet over HTTP: the same adapter on every replica, through vLLM's load and unload endpoints.

Answers are told apart by whether asking again can help: no connection, a time-out, 429, 502, 503 and 504 are
``Unavailable``; every other refusal is for good (``Conflict``). vLLM answers permanent refusals (rank, DoRA, ...) with a
plain 500, so a 500 of an engine that is still healthy counts as for good too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from control_plane.protocols import ServedAdapter
from ft_assets.errors import Conflict, FtError, Unavailable

TRANSIENT = frozenset({408, 425, 429, 502, 503, 504})
TIMEOUT = httpx.Timeout(30.0, connect=2.0)
"""A load reads a few hundred MB at most; a replica that does not accept in 2 s is down."""


class HttpFleet:
    """Replicas by URL. Calls go to each in turn; the first that fails ends the call, and a repeated call is harmless."""

    def __init__(self, urls: Sequence[str], *, transport: httpx.BaseTransport | None = None) -> None:
        self._replicas = [httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT, transport=transport) for url in urls]

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    def served(self) -> Sequence[ServedAdapter]:
        """What every replica serves from the same directory; an adapter that one of them lacks is not served."""
        common: set[tuple[str, str, str]] | None = None
        for replica in self._replicas:
            here = set(_adapters(replica))
            common = here if common is None else common & here
        return [ServedAdapter(name=name, path=path, base=base) for name, path, base in sorted(common or set())]

    def load(self, name: str, directory: Path) -> None:
        for replica in self._replicas:
            path = str(directory)
            here = {n: p for n, p, _ in _adapters(replica)}
            if here.get(name) == path:
                continue
            if name in here:
                raise Conflict(
                    f"{replica.base_url} serves {name} from {here[name]} already; a name stands for one directory: unload it first",
                    code="adapter_refused",
                )
            _check(replica, _post(replica, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}), f"load {name}")

    def unload(self, name: str) -> None:
        """Unload everywhere; a replica that does not have it is fine."""
        for replica in self._replicas:
            answer = _post(replica, "/v1/unload_lora_adapter", {"lora_name": name})
            if answer.status_code != 404:
                _check(replica, answer, f"unload {name}")

    def probe(self, name: str) -> float:
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
        slowest = 0.0
        for replica in self._replicas:
            started = time.monotonic()
            _check(replica, _post(replica, "/v1/chat/completions", body), f"probe {name}")
            slowest = max(slowest, time.monotonic() - started)
        return slowest


def _adapters(replica: httpx.Client) -> list[tuple[str, str, str]]:
    answer = _send(replica, "GET", "/v1/models", None)
    _check(replica, answer, "list models")
    return [(m["id"], m["root"], m["parent"]) for m in answer.json()["data"] if m.get("parent")]


def _post(replica: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return _send(replica, "POST", path, body)


def _send(replica: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    try:
        return replica.request(method, path, json=body)
    except httpx.HTTPError as e:
        raise Unavailable(f"inference server {replica.base_url} did not answer {path}: {type(e).__name__}; is it running?") from e


def _check(replica: httpx.Client, answer: httpx.Response, what: str) -> None:
    if answer.is_success:
        return
    said = _message(answer)
    message = f"inference server {replica.base_url} refused to {what}: {answer.status_code} {said}"
    if answer.status_code in TRANSIENT or (answer.status_code == 500 and not _healthy(replica)):
        raise Unavailable(message)
    raise Conflict(message, code="adapter_refused")


def _healthy(replica: httpx.Client) -> bool:
    try:
        return _send(replica, "GET", "/health", None).is_success
    except FtError:
        return False


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
