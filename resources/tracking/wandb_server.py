"""Sends runs to Weights & Biases, or to a server of one's own, with the requests that its client makes.

A run is made with the GraphQL mutation ``upsertBucket``; its history is a file, to which ``file_stream`` appends lines at an offset, so
that lines that are sent twice are stored once. Decision 0058 says why the client itself is not used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from control_plane.platform.protocols import WandbRun
from core.errors import Unavailable
from core.storable_text import printable

PUBLIC, PUBLIC_APP = "https://api.wandb.ai", "https://wandb.ai"
"""The service's API, and where its users look; a server of one's own has one address for both."""
TIMEOUT_S = 10.0
SHOWN_CHARS = 200
"""Characters of an answer that the tenant sees."""
UPSERT = """
mutation UpsertBucket($name: String, $project: String, $entity: String, $displayName: String, $config: JSONString, $tags: [String!]) {
  upsertBucket(input: {
    name: $name, modelName: $project, entityName: $entity, displayName: $displayName, config: $config, tags: $tags
  }) {
    bucket { name project { name entity { name } } }
  }
}
"""
STEP_AXIS: Mapping[str, Any] = {"m": [{"1": "step", "6": [], "7": []}, {"2": "*", "5": 1, "6": [1], "7": []}]}
"""``define_metric("*", step_metric="step")`` as the client writes it into a run's config: charts are over the optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpWandb:
    url: str
    """Address of the API."""
    timeout_s: float = TIMEOUT_S

    def open(self, run: WandbRun, *, key: str) -> str:
        """See :class:`control_plane.platform.protocols.Wandb`."""
        config = {name: {"value": value} for name, value in run.config.items()} | {"_wandb": {"value": STEP_AXIS}}
        variables = {
            "name": run.id, "project": run.project, "entity": run.entity, "displayName": run.name, "config": json.dumps(config),
            "tags": list(run.tags) or None,
        }  # fmt: skip
        answer = self._post("/graphql", {"operationName": "UpsertBucket", "query": UPSERT, "variables": variables}, key=key)
        if errors := answer.get("errors"):
            raise _unavailable(f"W&B refuses the run: {_shown(json.dumps(errors))}")
        try:
            return str(answer["data"]["upsertBucket"]["bucket"]["project"]["entity"]["name"])
        except (KeyError, TypeError) as e:
            raise _unavailable(f"{self.url} answers without a run") from e

    def append(
        self, run: WandbRun, lines: Sequence[Mapping[str, Any]], *, entity: str, offset: int, summary: Mapping[str, Any],
        exit_code: int | None, key: str,
    ) -> None:  # fmt: skip
        """See :class:`control_plane.platform.protocols.Wandb`."""
        files: dict[str, Any] = {"wandb-summary.json": {"offset": 0, "content": [json.dumps(summary)]}}
        if lines:
            files["wandb-history.jsonl"] = {"offset": offset, "content": [json.dumps(line) for line in lines]}
        ended = {} if exit_code is None else {"complete": True, "exitcode": exit_code}
        self._post(f"/files/{quote(entity)}/{quote(run.project)}/{quote(run.id)}/file_stream", {"files": files, **ended}, key=key)

    def address(self, run: WandbRun, *, entity: str) -> str:
        """See :class:`control_plane.platform.protocols.Wandb`."""
        app = PUBLIC_APP if self.url == PUBLIC else self.url
        return f"{app}/{quote(entity)}/{quote(run.project)}/runs/{quote(run.id)}"

    def _post(self, path: str, body: Mapping[str, Any], *, key: str) -> Mapping[str, Any]:
        """Send a request of a few hundred kilobytes and return its answer. Proxies of the environment are used, redirects are not."""
        try:
            answer = httpx.post(f"{self.url}{path}", json=body, auth=("api", key), timeout=self.timeout_s)
            found = answer.json() if answer.is_success else None
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise _unavailable(f"{self.url} does not answer ({type(e).__name__})") from e
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise _unavailable(f"{self.url} answers with status {answer.status_code}: {_shown(answer.text)}".rstrip(": "))
        return found


def _unavailable(why: str) -> Unavailable:
    return Unavailable(why, code="wandb_unavailable")


def _shown(text: str) -> str:
    return printable(" ".join(text.split()))[:SHOWN_CHARS]
