"""Calls of the control plane's internal endpoints with the attempt's token, which opens nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import httpx

from agent import messages
from agent.messages import (
    Commit,
    Completion,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    ReadGrants,
    ReadRequest,
    Reported,
    Restored,
    WriteGrant,
    WriteRequest,
)
from core.errors import Conflict, FtError, IntegrityError, InvalidRequest, Unauthenticated, Unavailable
from core.typed_json import from_json

PREFIX = "/internal/attempt"
UNREACHABLE = "api_unavailable"
"""Error code of a call that was not answered."""
TIMEOUT = httpx.Timeout(20.0, connect=5.0)
LOG_TIMEOUT = httpx.Timeout(10.0, connect=5.0)
"""Shorter, because heartbeats wait for it."""
COMPLETE_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""Longer, because a store may take several minutes to put the parts of a large object together (S3's CompleteMultipartUpload)."""
_R = TypeVar("_R")


class Fenced(Exception):
    """The attempt was released: its workload may do nothing more."""


class ApiClient:
    """One method per endpoint. Raises :class:`Fenced` once the attempt was released, and ``Unavailable`` where a retry can help."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        return self._call("heartbeat", beat, HeartbeatAnswer)

    def restored(self, restored: Restored) -> Reported:
        return self._call("restored", restored, Reported)

    def read_urls(self, keys: tuple[str, ...]) -> ReadGrants:
        return self._call("objects/read", ReadRequest(keys=keys), ReadGrants)

    def write_urls(self, request: WriteRequest) -> WriteGrant:
        return self._call("objects/write", request, WriteGrant)

    def complete(self, completion: Completion) -> None:
        self._call("objects/complete", completion, Done, COMPLETE_TIMEOUT)

    def commit(self, commit: Commit) -> None:
        """Commit what is stored; ``IntegrityError`` if the store has other objects than its manifest lists."""
        self._call("checkpoints", commit, Done, COMPLETE_TIMEOUT)

    def store_log(self, begins: int, data: bytes) -> None:
        """Replace the piece of the readable log that begins at byte `begins`."""
        self._checked(self._sent("PUT", f"log/{begins}", data, "application/octet-stream", LOG_TIMEOUT))

    def _call(self, path: str, body: Any, of: type[_R], timeout: httpx.Timeout = TIMEOUT) -> _R:
        answer = self._sent("POST", path, json.dumps(asdict(body)).encode(), "application/json", timeout)
        return from_json(of, self._checked(answer), ignore_unknown=True)

    def _sent(self, method: str, path: str, content: bytes, content_type: str, timeout: httpx.Timeout) -> httpx.Response:
        headers = {"content-type": content_type}
        try:
            return self._http.request(method, f"{PREFIX}/{path}", content=content, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unavailable(f"the control plane did not answer {path} ({type(error).__name__})", code=UNREACHABLE) from error

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = answer.json()
        except ValueError:
            body = {}
        if answer.is_success:
            return body
        raise _error(answer.status_code, body.get("error") or {})


def _error(status: int, error: dict[str, Any]) -> Exception:
    code, message = str(error.get("code")), str(error.get("message") or f"status {status}")
    if code == messages.FENCED:
        return Fenced(message)
    if status == 401:
        return Unauthenticated(message, code=code)
    kinds: dict[str, type[FtError]] = {"integrity_error": IntegrityError}
    if code in kinds:
        return kinds[code](message, code=code)
    if status >= 500 or status == 429:
        return Unavailable(message, code=code)
    return Conflict(message, code=code) if status == 409 else InvalidRequest(message, code=code)


def read_token(file: Path) -> str:
    return file.read_text().strip()
