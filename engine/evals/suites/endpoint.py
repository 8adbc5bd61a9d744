"""Client of a model behind OpenAI's chat completions, for the judge and a guard model.

Greedy, without a stream. Transient failures are retried with growing, jittered pauses; others are raised immediately. The key is read
from the environment at each call and is not stored.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from core.typed_json import JsonObject

JUDGE_KEY, SAFETY_KEY = "FT_JUDGE_API_KEY", "FT_SAFETY_API_KEY"
"""Environment variables with the bearer token, if the service requires one."""
TIMEOUT_S = 120.0
"""Seconds per request: a judge of 70B reads two answers and gives a short reason in well under a minute, unless it queues."""
CONNECT_S = 10.0
"""Seconds until a connection is there: an address that nothing listens on is noticed soon."""
ATTEMPTS = 5
"""Attempts, with pauses of about 0.5, 1, 2 and 4 s: bridges a rolling restart of one replica, not an outage."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
"""Longest ``Retry-After`` that is honored, in seconds."""
JITTER = 0.25
"""Random share of pauses, so that callers that failed together do not retry together."""
TEMPORARY = frozenset({408, 409, 425, 429})
NO_SCHEMA = frozenset({400, 404, 422, 501})
"""Statuses of servers that do not know ``response_format``; the request is then repeated without it."""
LASTING = frozenset({401, 403, 404})
"""Statuses of a wrong key or an unknown model. Others, such as 400 or 413, may be about one request: too long, or filtered."""


class EndpointFailed(Exception):
    """The endpoint did not answer. `lasting`: every other request would fail too (a wrong key, an unknown model)."""

    def __init__(self, why: str, *, attempts: int, lasting: bool = False) -> None:
        super().__init__(why)
        self.why, self.attempts, self.lasting = why, attempts, lasting


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    text: str
    tokens_in: int
    tokens_out: int
    """As counted by the endpoint; 0 if it does not count."""


class Endpoint:
    """One model at one address; thread-safe. A context that closes its connections at its end."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        key_variable: str = JUDGE_KEY,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._key_variable, self._attempts, self._first_pause_s = key_variable, attempts, first_pause_s
        self._client = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)))
        self._takes_schema = True
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def complete(self, messages: Sequence[JsonObject], *, max_tokens: int, schema: Mapping[str, Any] | None = None) -> Completion:
        """Returns the answer to a conversation; in the form of `schema` if the endpoint supports it. Raises ``EndpointFailed``."""
        body = {"model": self.model, "messages": [dict(m) for m in messages], "temperature": 0, "max_tokens": max_tokens}
        if schema is None or not self._takes_schema:
            return self._ask(body)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": dict(schema)}}
        try:
            return self._ask({**body, "response_format": form})
        except _Refused as refused:
            if refused.status not in NO_SCHEMA:
                raise
            found = self._ask(body)
            with self._lock:
                self._takes_schema = False
            return found

    def _ask(self, body: Mapping[str, Any]) -> Completion:
        why = ""
        for attempt in range(self._attempts):
            retry_after_s = 0.0
            try:
                answer = self._client.post(f"{self.url}/chat/completions", json=body, headers=self._headers())
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    return _read(answer, attempt + 1)
                why, retry_after_s = f"status {answer.status_code}: {answer.text[:200]}", _retry_after_s(answer.headers)
                if answer.status_code not in TEMPORARY and answer.status_code < 500:
                    raise _Refused(why, status=answer.status_code, attempts=attempt + 1)
            if attempt + 1 < self._attempts:
                time.sleep(max(self._first_pause_s * 2**attempt, retry_after_s) * random.uniform(1, 1 + JITTER))
        raise EndpointFailed(why, attempts=self._attempts)

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._key_variable)
        return {"Authorization": f"Bearer {key}"} if key else {}


class _Refused(EndpointFailed):
    def __init__(self, why: str, *, status: int, attempts: int) -> None:
        super().__init__(why, attempts=attempts, lasting=status in LASTING)
        self.status = status


def _read(answer: httpx.Response, attempts: int) -> Completion:
    try:
        body = answer.json()
        text = body["choices"][0]["message"]["content"]
        usage = body.get("usage") or {}
        return Completion(
            text="" if text is None else str(text),
            tokens_in=int(usage.get("prompt_tokens") or 0),
            tokens_out=int(usage.get("completion_tokens") or 0),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        why = f"the response is not a chat completion ({type(error).__name__}: {error})"
        raise EndpointFailed(why, attempts=attempts) from error


def _retry_after_s(headers: httpx.Headers) -> float:
    """Returns the seconds of a ``Retry-After`` header; None for a date or an invalid value."""
    given = headers.get("retry-after", "")
    return min(float(given), MAX_PAUSE_S) if given.replace(".", "", 1).isdigit() else 0.0
