"""A classifier behind HTTP: any service that implements OpenAI's ``POST /v1/moderations``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Self

import httpx

from core.errors import Unavailable
from core.typed_json import JsonObject

BATCH = 32
"""Texts per request; OpenAI's own endpoint accepts this many and more, and self-hosted ones handle it well."""
TIMEOUT_S = 30.0
"""Seconds per request; a guard model of 8B on one GPU reads 32 rows of 1 KB in a few seconds."""
ATTEMPTS = 4
"""Attempts, with pauses of 0.5, 1 and 2 s: bridges a rolling restart of one replica, not an outage."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
"""Longest ``Retry-After`` that is honored, in seconds."""
KEY_VARIABLE = "FT_MODERATION_API_KEY"
"""Environment variable with the bearer token, if the service requires one."""


class ModerationClassifier:
    """Scores are the highest of a result's `category_scores`, or 1 for a flagged result without scores.

    Connection failures, 408, 429 and 5xx are retried; after that, and for any other refusal, raises ``Unavailable``: rows are never passed
    as harmless without a score. Pickles, without its connections.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attempts: int = ATTEMPTS,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.url, self.model = url, model
        self.timeout_s, self.attempts, self.first_pause_s = timeout_s, attempts, first_pause_s
        self.name = f"{url}#{model}" if model else url
        self._client: httpx.Client | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_client": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; a later call opens new ones."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def scores(self, texts: Sequence[str]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(texts), BATCH):
            found += self._ask(list(texts[start : start + BATCH]))
        return found

    def _ask(self, texts: list[str]) -> list[float]:
        body = {"input": texts} if self.model is None else {"input": texts, "model": self.model}
        why = ""
        for attempt in range(self.attempts):
            try:
                answer = self._connected().post(self.url, json=body)
            except httpx.TransportError as error:
                why, retry_after_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if answer.status_code == 200:
                    return self._read(answer, len(texts))
                why, retry_after_s = f"status {answer.status_code}: {answer.text[:200]}", _retry_after_s(answer.headers)
                if answer.status_code not in (408, 429) and answer.status_code < 500:
                    raise self._unavailable(why, attempt + 1)
            if attempt + 1 < self.attempts:
                time.sleep(max(self.first_pause_s * 2**attempt, retry_after_s))
        raise self._unavailable(why, self.attempts)

    def _connected(self) -> httpx.Client:
        if self._client is None:
            key = os.environ.get(KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._client = httpx.Client(timeout=self.timeout_s, headers=headers)
        return self._client

    def _read(self, answer: httpx.Response, count: int) -> list[float]:
        try:
            results = answer.json()["results"]
            scores = [_score(result) for result in results]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unavailable(f"the response is not a moderation result ({type(error).__name__}: {error})", 1) from error
        if len(scores) != count:
            raise self._unavailable(f"{len(scores)} results for {count} texts", 1)
        return scores

    def _unavailable(self, why: str, attempts: int) -> Unavailable:
        return Unavailable(
            f"the toxicity classifier at {self.url} gave no answer after {attempts} of {self.attempts} attempts ({why}); "
            "see that it runs and accepts the key, or set the policy toxicity to off",
            code="classifier_unavailable",
        )


def _score(result: JsonObject) -> float:
    scores = [float(score) for score in (result.get("category_scores") or {}).values() if score is not None]
    highest = max(scores) if scores else float(bool(result["flagged"]))
    if not 0.0 <= highest <= 1.0:
        raise ValueError(f"score {highest} is outside of 0 to 1")
    return highest


def _retry_after_s(headers: httpx.Headers) -> float:
    """Returns the seconds of a ``Retry-After`` header; None for a date or an invalid value."""
    given = headers.get("retry-after", "")
    return min(float(given), MAX_PAUSE_S) if given.replace(".", "", 1).isdigit() else 0.0
