"""Health probes: HTTP, touched files, gRPC, PostgreSQL, and Dagster's code locations and daemons as its webserver reports them."""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.local.supervisor.service_spec import Probe, Readiness

TIMEOUT_S = 5.0
"""Time limit of one probe: longer than a busy webserver's first GraphQL answer, which takes about 2 s."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies from the environment, which must not see the tokens."""

DAGSTER_QUERY = """{
  workspaceOrError { __typename
    ... on PythonError { message }
    ... on Workspace { locationEntries { name loadStatus
      locationOrLoadError { __typename ... on PythonError { message causes { message } } } } } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy lastHeartbeatTime
    lastHeartbeatErrors { message } } } }
}"""


def http_ok(url: str, *, token: Callable[[], str] | None = None) -> Probe:
    """Ready when `url` answers 200 to a request with `token`."""

    def probe(_started_at: float) -> Readiness:
        try:
            with _OPENER.open(_request(url, token), timeout=TIMEOUT_S) as answer:
                return Readiness(ready=answer.status == 200, detail=f"{url} answers {answer.status}")
        except urllib.error.HTTPError as e:
            return Readiness(ready=False, detail=f"{url} answers {e.code}")
        except (OSError, http.client.HTTPException):
            return Readiness(ready=False, detail="starting")

    return probe


def _request(url: str, token: Callable[[], str] | None, *, body: bytes | None = None) -> urllib.request.Request:
    headers = {"Authorization": f"Bearer {token()}"} if token else {}
    return urllib.request.Request(url, data=body, headers={**headers, "Content-Type": "application/json"})


def file_written(path: Path) -> Probe:
    """Ready when `path` was written by this start."""
    return file_touched(path, within_s=math.inf)


def file_touched(path: Path, *, within_s: float = TIMEOUT_S) -> Probe:
    """Ready while `path` is touched every second or so, as :mod:`deploy.local.supervisor.file_heartbeat` does; what the process before
    touched until its death does not count."""

    def probe(started_at: float) -> Readiness:
        try:
            touched_at = path.stat().st_mtime
        except FileNotFoundError:
            return Readiness(ready=False, detail="starting")
        return Readiness(ready=touched_at > _since(started_at) and time.time() - touched_at < within_s, detail=f"{path} is stale")

    return probe


def _since(started_at: float) -> float:
    """Return the start by this machine's clock; 0 if the clock was set back to before it, so that no time tells old from new."""
    return started_at if started_at <= time.time() else 0.0


def grpc_serving(address: str, service: str) -> Probe:
    """Ready when the standard gRPC health service at `address` reports `service` as serving."""

    def probe(_started_at: float) -> Readiness:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
            except grpc.RpcError:
                return Readiness(ready=False, detail="starting")
        return Readiness(ready=answer.status == health_pb2.HealthCheckResponse.SERVING, detail=f"health status {answer.status}")

    return probe


def postgres_answers(directory: Path) -> Probe:
    """Ready when the embedded server of `directory` answers a client."""

    def probe(_started_at: float) -> Readiness:
        from resources.database import embedded

        return Readiness(ready=embedded.answers(directory), detail="no answer")

    return probe


def every(*probes: Probe) -> Probe:
    """Ready when all of `probes` are."""

    def probe(started_at: float) -> Readiness:
        answer = Readiness(ready=True)
        for one in probes:
            answer = one(started_at)
            if not answer.ready:
                break
        return answer

    return probe


def code_loaded(base_url: str, *, token: Callable[[], str]) -> Probe:
    """Ready when Dagster's webserver has every code location."""
    return _dagster(base_url, token, lambda data, _started_at: code_state(data))


def daemons_alive(base_url: str, *, token: Callable[[], str]) -> Probe:
    """Ready when Dagster's webserver reports a heartbeat of every required daemon since the start."""
    return _dagster(base_url, token, daemon_state)


def _dagster(base_url: str, token: Callable[[], str], state: Callable[[dict[str, Any], float], Readiness]) -> Probe:
    def probe(started_at: float) -> Readiness:
        try:
            data = dagster_state(base_url, token=token)
        except (OSError, http.client.HTTPException, ValueError):
            return Readiness(ready=False, detail="webserver starting")
        return state(data, started_at)

    return probe


def code_state(data: dict[str, Any]) -> Readiness:
    """Read the readiness of the code locations from the answer to `DAGSTER_QUERY`."""
    workspace = data["workspaceOrError"]
    if workspace["__typename"] == "PythonError":
        return Readiness(ready=False, broken=True, detail=f"the workspace does not load: {workspace['message']}")
    entries = workspace["locationEntries"]
    for entry in entries:
        error = entry["locationOrLoadError"] or {}
        if error.get("__typename") == "PythonError":
            chain = [error["message"], *(c["message"] for c in error.get("causes") or [])]
            why = "\n  caused by: ".join(m.strip() for m in chain)
            return Readiness(ready=False, detail=f"code location {entry['name']} does not load: {why}")
    loading = [e["name"] for e in entries if e["loadStatus"] != "LOADED" or not e["locationOrLoadError"]]
    if loading or not entries:
        return Readiness(ready=False, detail="code location loading")
    return Readiness(ready=True)


def daemon_state(data: dict[str, Any], started_at: float) -> Readiness:
    """Read the readiness of daemons started at `started_at` from the answer to `DAGSTER_QUERY`."""
    daemons = [d for d in data["instance"]["daemonHealth"]["allDaemonStatuses"] if d["required"]]
    asleep = [d["daemonType"] for d in daemons if not d["healthy"] or (d["lastHeartbeatTime"] or 0.0) < _since(started_at)]
    if asleep or not daemons:
        return Readiness(ready=False, detail=f"daemons starting ({len(daemons) - len(asleep)}/{len(daemons)})")
    return Readiness(ready=True)


def dagster_state(base_url: str, *, token: Callable[[], str]) -> dict[str, Any]:
    """Return the answer of Dagster's webserver to `DAGSTER_QUERY`; ``OSError`` or ``ValueError`` if there is none."""
    body = json.dumps({"query": DAGSTER_QUERY}).encode()
    with _OPENER.open(_request(f"{base_url}/graphql", token, body=body), timeout=TIMEOUT_S) as answer:
        data: dict[str, Any] = json.load(answer)["data"]
    if not data:
        raise ValueError("GraphQL answered without data")
    return data
