"""The fleet over HTTP: replicas in step, and failures told apart by whether asking again can help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from control_plane.protocols import Fleet, ServedAdapter
from ft_assets.errors import Conflict, Unavailable
from resources.serving import HttpFleet


class Replicas(httpx.BaseTransport):
    """Two servers that speak vLLM's protocol, each with its own adapters; `fail` may answer instead."""

    def __init__(self, fail: Callable[[httpx.Request], httpx.Response | None] = lambda _: None) -> None:
        self.loaded: dict[str, dict[str, str]] = {"one": {}, "two": {}}
        self.calls: list[str] = []
        self._fail = fail

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(f"{request.url.host} {request.url.path}")
        failed = self._fail(request)
        return failed if failed is not None else self._answer(request, self.loaded[request.url.host])

    def _answer(self, request: httpx.Request, loaded: dict[str, str]) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        if request.url.path == "/v1/models":
            cards = [{"id": n, "root": p, "parent": "base"} for n, p in loaded.items()]
            return httpx.Response(200, json={"data": [{"id": "base", "root": "base", "parent": None}, *cards]})
        if request.url.path == "/v1/load_lora_adapter":
            loaded[body["lora_name"]] = body["lora_path"]
        elif request.url.path == "/v1/unload_lora_adapter" and loaded.pop(body["lora_name"], None) is None:
            return httpx.Response(404, json={"error": {"message": "cannot be found"}})
        return httpx.Response(200, json={})


def fleet(transport: httpx.BaseTransport) -> HttpFleet:
    return HttpFleet(["http://one", "http://two/"], transport=transport)


def test_it_is_a_fleet() -> None:
    as_protocol: Fleet = fleet(Replicas())
    assert as_protocol.served() == []


def test_every_replica_is_told_and_a_second_call_changes_nothing() -> None:
    replicas = Replicas()
    made = fleet(replicas)
    made.load("ft:a", Path("/a"))
    assert replicas.loaded == {"one": {"ft:a": "/a"}, "two": {"ft:a": "/a"}}
    made.load("ft:a", Path("/a"))
    assert sum("load_lora" in call for call in replicas.calls) == 2
    assert made.served() == [ServedAdapter(name="ft:a", path="/a", base="base")]
    assert made.probe("ft:a") >= 0.0
    made.unload("ft:a")
    made.unload("ft:a")
    assert made.served() == []


def test_an_adapter_that_one_replica_lacks_is_not_served_and_loading_repairs_it() -> None:
    replicas = Replicas()
    replicas.loaded["one"]["ft:a"] = "/a"
    assert fleet(replicas).served() == []
    fleet(replicas).load("ft:a", Path("/a"))
    assert len(fleet(replicas).served()) == 1


def test_a_name_that_is_served_from_another_directory_is_refused() -> None:
    replicas = Replicas()
    replicas.loaded["two"]["ft:a"] = "/old"
    with pytest.raises(Conflict, match="serves ft:a from /old already"):
        fleet(replicas).load("ft:a", Path("/a"))


def answering(status: int, *, healthy: bool = True) -> Callable[[httpx.Request], httpx.Response | None]:
    def fail(request: httpx.Request) -> httpx.Response | None:
        if request.url.path == "/health":
            return httpx.Response(200 if healthy else 503)
        return httpx.Response(status, json={"error": {"message": "rank 300"}}) if "load_lora" in request.url.path else None

    return fail


@pytest.mark.parametrize(
    ("status", "healthy", "error"),
    [
        (400, True, Conflict),
        (404, True, Conflict),
        (500, True, Conflict),
        (500, False, Unavailable),
        (429, True, Unavailable),
        (503, True, Unavailable),
        (504, True, Unavailable),
    ],
)
def test_refusals_for_good_and_for_now_are_told_apart(status: int, healthy: bool, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"refused to load ft:a: {status} rank 300"):
        fleet(Replicas(answering(status, healthy=healthy))).load("ft:a", Path("/a"))


@pytest.mark.parametrize("trouble", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut")])
def test_a_replica_that_does_not_answer_makes_the_fleet_unavailable(trouble: Exception) -> None:
    def fail(request: httpx.Request) -> httpx.Response | None:
        if request.url.host == "two":
            raise trouble
        return None

    calls: list[Callable[[HttpFleet], object]] = [
        lambda f: f.served(),
        lambda f: f.load("a", Path("/a")),
        lambda f: f.unload("a"),
        lambda f: f.probe("a"),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="http://two did not answer"):
            call(fleet(Replicas(fail)))
