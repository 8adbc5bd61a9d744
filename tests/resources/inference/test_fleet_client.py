"""The fleet over HTTP: each replica on its own, and failures told apart by whether asking again can help."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import httpx
import pytest

from control_plane.composition import adapters_volume
from control_plane.platform.protocols import Fleet, Replica
from control_plane.platform.settings import load
from core.errors import Conflict, Unavailable
from resources.inference.fleet_client import SILENT_S, HttpFleet, VolumeMount

ONE, TWO = "http://one", "http://two"


class Replicas(httpx.BaseTransport):
    """Two servers that speak vLLM's protocol, each with its own adapters; `fail` may answer instead."""

    def __init__(
        self, fail: Callable[[httpx.Request], httpx.Response | None] = lambda _: None, *, names: tuple[str, ...] = ("base",)
    ) -> None:
        self.loaded: dict[str, dict[str, str]] = {"one": {}, "two": {}}
        self._fail, self._names = fail, names

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        failed = self._fail(request)
        return failed if failed is not None else self._answer(request, self.loaded[request.url.host])

    def _answer(self, request: httpx.Request, loaded: dict[str, str]) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        if request.url.path == "/v1/models":
            cards = [{"id": n, "root": p, "parent": "base"} for n, p in loaded.items()]
            return httpx.Response(200, json={"data": [*({"id": n, "root": "/m", "parent": None} for n in self._names), *cards]})
        if request.url.path == "/v1/load_lora_adapter":
            if body["lora_name"] in loaded:
                return httpx.Response(400, json={"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}})
            loaded[body["lora_name"]] = body["lora_path"]
        elif request.url.path == "/v1/unload_lora_adapter" and loaded.pop(body["lora_name"], None) is None:
            return httpx.Response(404, json={"error": {"message": "cannot be found"}})
        return httpx.Response(200, json={})


def fleet(transport: httpx.BaseTransport) -> HttpFleet:
    return HttpFleet([ONE, f"{TWO}/", ONE], token="t", transport=transport)


def test_every_call_carries_the_token_of_the_installation() -> None:
    sent = list[str]()
    made = fleet(Replicas(lambda request: sent.append(request.headers.get("authorization", ""))))
    made.load(TWO, "ft:a", Path("/a"))
    list(made.replicas())
    made.unload(TWO, "ft:a")
    assert len(sent) >= 4 and set(sent) == {"Bearer t"}


def test_each_replica_is_loaded_and_listed_on_its_own() -> None:
    replicas = Replicas()
    made: Fleet = fleet(replicas)
    made.load(TWO, "ft:a", Path("/a"))
    made.load(TWO, "ft:a", Path("/a"))
    assert replicas.loaded == {"one": {}, "two": {"ft:a": "/a"}}
    assert list(made.replicas()) == [
        Replica(url=ONE, ready=True, base="base"),
        Replica(url=TWO, ready=True, base="base", adapters={"ft:a": "/a"}),
    ]
    assert made.probe(TWO, "ft:a") >= 0.0
    made.unload(TWO, "ft:a")
    made.unload(TWO, "ft:a")
    assert replicas.loaded == {"one": {}, "two": {}}


def test_the_digest_of_the_base_is_told_by_its_second_name() -> None:
    digest = "ab" * 32
    found = fleet(Replicas(names=("org/base", f"org/base@sha256:{digest}"))).replicas()
    assert {(r.base, r.base_digest) for r in found} == {("org/base", digest)}


def test_a_name_that_is_served_from_another_directory_is_refused_until_it_is_unloaded_there() -> None:
    replicas = Replicas()
    replicas.loaded["two"]["ft:a"] = "/old"
    with pytest.raises(Conflict, match="already serves ft:a from /old") as refused:
        fleet(replicas).load(TWO, "ft:a", Path("/a"))
    assert refused.value.code == "served_elsewhere"


def test_a_server_is_told_its_own_path_of_a_directory_and_everybody_else_the_platforms() -> None:
    replicas = Replicas()
    volume = VolumeMount(here=PurePosixPath("/ft/work/adapters"), there=PurePosixPath("/adapters"))
    made = HttpFleet([ONE], token="t", volume=volume, transport=replicas)
    made.load(ONE, "ft:a", Path("/ft/work/adapters/adp-1@0123"))
    made.load(ONE, "ft:a", Path("/ft/work/adapters/adp-1@0123"))
    assert replicas.loaded["one"] == {"ft:a": "/adapters/adp-1@0123"}
    replicas.loaded["one"]["ft:b"] = "/adapters-of-others/adp-2"  # no part of the volume, though it begins alike
    (told,) = made.replicas()
    assert told.adapters == {"ft:a": "/ft/work/adapters/adp-1@0123", "ft:b": "/adapters-of-others/adp-2"}
    with pytest.raises(Conflict, match="already serves ft:a from /adapters/adp-1@0123"):
        made.load(ONE, "ft:a", Path("/ft/work/adapters/adp-3"))


def test_the_platforms_fleet_knows_where_servers_mount_the_adapters(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'adapters' is not absolute"):
        load({"FT_SERVED_ADAPTERS_DIR": "adapters"})
    settings = load({"FT_HOME": str(tmp_path), "FT_SERVED_ADAPTERS_DIR": "/adapters", "FT_MLFLOW_URI": "off"})
    assert adapters_volume(settings).to_server(f"{tmp_path}/work/adapters/adp-1") == "/adapters/adp-1"
    assert (
        adapters_volume(load({"FT_HOME": str(tmp_path)})).to_server(f"{tmp_path}/work/adapters/adp-1") == f"{tmp_path}/work/adapters/adp-1"
    )


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
        fleet(Replicas(answering(status, healthy=healthy))).load(ONE, "ft:a", Path("/a"))


@pytest.mark.parametrize("trouble", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut")])
def test_a_replica_that_does_not_answer_is_told_and_harms_no_other(trouble: Exception) -> None:
    away = False

    def fail(request: httpx.Request) -> httpx.Response | None:
        if away and request.url.host == "two":
            raise trouble
        return None

    made = fleet(Replicas(fail))
    made.replicas()
    away = True
    one, two = made.replicas()
    assert (one.ready, two.ready, two.base) == (True, False, "base"), "what it served is remembered"
    assert "http://two did not answer" in str(two.error)
    calls: list[Callable[[str], object]] = [
        lambda url: made.load(url, "a", Path("/a")),
        lambda url: made.unload(url, "a"),
        lambda url: made.probe(url, "a"),
    ]
    for call in calls:
        call(ONE)
        with pytest.raises(Unavailable, match="http://two did not answer"):
            call(TWO)


@pytest.mark.parametrize(
    ("trouble", "silent"),
    [
        (httpx.ReadTimeout("slow"), True),
        (httpx.ConnectTimeout("slow"), True),
        (httpx.Response(503, text="overloaded"), True),
        (httpx.ConnectError("refused"), False),
        (httpx.Response(200, text="<html>"), False),
    ],
)
def test_a_replica_that_lists_nothing_for_a_moment_is_silent_and_one_that_is_gone_is_not(
    trouble: Exception | httpx.Response, silent: bool
) -> None:
    away, now = False, 100.0

    def fail(request: httpx.Request) -> httpx.Response | None:
        if not away or request.url.host == "one":
            return None
        if isinstance(trouble, Exception):
            raise trouble
        return trouble

    made = HttpFleet([ONE, TWO], token="t", transport=Replicas(fail), clock=lambda: now)
    now += 60
    made.replicas()
    away = True
    now += SILENT_S - 1
    assert [(r.ready, r.silent) for r in made.replicas()] == [(True, False), (False, silent)]
    now += 2
    assert [(r.ready, r.silent) for r in made.replicas()] == [(True, False), (False, False)]


def test_no_call_keeps_a_round_waiting_for_more_than_ten_seconds() -> None:
    asked: list[dict[str, float]] = []
    made = fleet(Replicas(lambda request: asked.append(request.extensions["timeout"])))
    made.load(ONE, "ft:a", Path("/a"))
    made.probe(ONE, "ft:a")
    made.unload(ONE, "ft:a")
    assert len(asked) == 3
    assert max(max(timeouts.values()) for timeouts in asked) <= 10.0


def test_replicas_are_asked_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)

    def meet(_: httpx.Request) -> None:
        both.wait()

    assert [r.ready for r in fleet(Replicas(meet)).replicas()] == [True, True]


def test_a_server_that_is_something_else_is_not_ready() -> None:
    found = fleet(Replicas(lambda _: httpx.Response(200, text="<html>"))).replicas()
    assert [r.ready for r in found] == [False, False]
    assert "does not answer /v1/models as an inference server does" in str(found[0].error)
