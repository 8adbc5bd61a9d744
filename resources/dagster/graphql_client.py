"""Launches runs through Dagster's GraphQL API, as its UI does, so that they pass its run queue and its access control."""

from __future__ import annotations

import httpx
from dagster import RunRequest

from core.errors import FtError, Unavailable

LOCATION, REPOSITORY = "ft", "__repository__"
"""Code location in ``workspace.yaml``, and Dagster's name for the repository of a ``Definitions``."""
TIMEOUT_S = 20.0
"""A launch takes 0.1 s; several at once took 5 s on a busy two-core machine."""
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
  ... on LaunchRunSuccess { run { runId status } }
  ... on RunConfigValidationInvalid { errors { message } }
  ... on PythonError { message }
  ... on UnauthorizedError { message }
  ... on PipelineNotFoundError { message }
  ... on NoModeProvidedError { message }
  ... on PresetNotFoundError { message }
  ... on ConflictingExecutionParamsError { message }
  ... on InvalidSubsetError { message }
  ... on InvalidOutputError { __typename }
  ... on RunConflict { message } } }"""


class DagsterLaunches:
    """A client of one webserver; threads may share it."""

    def __init__(self, url: str, *, token: str) -> None:
        self._url = f"{url}/graphql"
        headers = {"authorization": f"Bearer {token}"}
        self._client = httpx.Client(timeout=TIMEOUT_S, headers=headers, trust_env=False)  # no proxy from the environment may see the token

    def close(self) -> None:
        self._client.close()

    def launch(self, request: RunRequest) -> str:
        """Launch a run and return its id. Raises ``Unavailable`` if the webserver does not answer, ``FtError`` if it refuses."""
        tags = {**request.tags, **({"dagster/partition": request.partition_key} if request.partition_key else {})}
        params = {
            "selector": {"repositoryLocationName": LOCATION, "repositoryName": REPOSITORY, "jobName": request.job_name},
            "runConfigData": request.run_config,
            "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in tags.items()]},
        }
        try:
            answer = self._client.post(self._url, json={"query": LAUNCH, "variables": {"params": params}})
            answer.raise_for_status()
            body = answer.json()
            result = (body.get("data") or {}).get("launchRun") or {}
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"Dagster's webserver at {self._url} did not launch the run: {type(error).__name__}: {error}") from error
        if result.get("__typename") != "LaunchRunSuccess":
            raise FtError(f"Dagster refused to launch run {request.run_key}: {result or body.get('errors')}")
        return str(result["run"]["runId"])
