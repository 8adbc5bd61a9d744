"""Two tenants of one platform, and what each of them has."""

from __future__ import annotations

from dataclasses import dataclass

import httpx


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    url: str
    """The API's."""
    loud_key: str
    quiet_key: str
    loud_file: str
    """Id of a file of the loud tenant, validated."""
    quiet_file: str
    loud_job: str
    """Id of a job that has not ended."""
    quiet_job: str
    loud_session: str
    """Cookie of a session of the console."""
    quiet_session: str
    loud_endpoint: str
    """Id of a webhook endpoint that never answers."""
    quiet_endpoint: str
    answer: str
    """What the base model answers to the quiet tenant's question."""
    answer_json: str
    """What it answers to the question that asks for JSON."""


def wrong(answer: httpx.Response) -> str:
    """Return what is wrong with an answer to a flood: a 5xx, or a refusal that does not say what to do; empty if nothing is."""
    status = answer.status_code
    if status >= 500:
        return f"{answer.request.url.path}: {status} {answer.text[:200]}"
    if status == 429 and "retry-after" not in answer.headers and answer.headers.get("x-should-retry") != "false":
        return f"{answer.request.url.path}: 429 without Retry-After, {answer.text[:200]}"
    if status >= 400 and answer.headers.get("content-type", "").startswith("application/json") and not answer.json()["error"]["code"]:
        return f"{answer.request.url.path}: {status} without a code, {answer.text[:200]}"
    return ""
