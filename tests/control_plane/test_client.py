"""The Python client: retries, streams that break, errors rebuilt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from control_plane.client import FtClient
from ft_assets.errors import Conflict, FtError, InvalidDataset, InvalidRequest, NotFound, QuotaExceeded, Unauthenticated, Unavailable

Answer = Callable[[httpx.Request], httpx.Response]


def client(*answers: httpx.Response | Exception) -> tuple[FtClient, list[httpx.Request]]:
    """A client of a server that gives `answers` in turn, and the requests that it got."""
    seen: list[httpx.Request] = []
    left: Iterator[httpx.Response | Exception] = iter(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return FtClient(base_url="http://api", api_key="k", transport=httpx.MockTransport(handle), backoff_s=0.0), seen


def error(status: int, code: str | None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": "why", "type": "t", "param": "p", "code": code}})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_seed", InvalidRequest),
        (400, "invalid_training_file", InvalidDataset),
        (401, "missing_api_key", Unauthenticated),
        (404, "file_not_found", NotFound),
        (409, "file_in_use", Conflict),
        (429, "exceeded_quota", QuotaExceeded),
        (503, "database_unavailable", Unavailable),
        (500, "server_error", FtError),
        (418, None, FtError),
    ],
)
def test_an_error_comes_back_as_the_class_it_was(status: int, code: str | None, kind: type[FtError]) -> None:
    ft, _ = client(*[error(status, code)] * 3)
    with pytest.raises(kind, match="why") as raised:
        ft.job("j")
    assert raised.value.code == (code or kind.default_code)
    assert raised.value.param == "p"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"detail": []}'])
def test_an_answer_in_another_form_is_an_error_too(body: bytes) -> None:
    ft, _ = client(*[httpx.Response(502, content=body)] * 3)
    with pytest.raises(Unavailable, match="status 502"):
        ft.job("j")


def test_a_submission_is_repeated_under_the_same_key() -> None:
    ft, seen = client(httpx.ReadTimeout("slow"), httpx.Response(502), httpx.Response(200, json={"id": "ftjob-1"}))
    assert ft.create_job(model="m", training_file="f")["id"] == "ftjob-1"
    assert len({r.headers["idempotency-key"] for r in seen}) == 1
    assert len({r.content for r in seen}) == 1
    ft, again = client(httpx.Response(200, json={}))
    ft.create_job(model="m", training_file="f")
    assert again[0].headers["idempotency-key"] != seen[0].headers["idempotency-key"]


def test_a_call_that_may_not_be_repeated_is_not() -> None:
    ft, seen = client(httpx.ReadTimeout("slow"))
    with pytest.raises(httpx.ReadTimeout):
        ft.resume_job("j")
    assert len(seen) == 1


def test_a_refusal_is_not_repeated() -> None:
    ft, seen = client(error(429, "exceeded_quota"))
    with pytest.raises(QuotaExceeded):
        ft.create_job(model="m", training_file="f")
    assert len(seen) == 1


def test_an_unreachable_api_is_a_transport_error_after_three_tries() -> None:
    ft, seen = client(*[httpx.ConnectError("no")] * 3)
    with pytest.raises(httpx.TransportError):
        ft.models()
    assert len(seen) == 3


class BreaksOff(httpx.SyncByteStream):
    """A stream whose connection is lost after `data`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        raise httpx.ReadError("lost")


def test_events_go_on_where_a_stream_broke_off() -> None:
    def said(*seqs: int) -> bytes:
        return b"".join(f"id: {n}\ndata: {json.dumps({'n': n})}\n\n".encode() for n in seqs)

    ft, seen = client(
        httpx.Response(200, stream=BreaksOff(said(1, 2))),
        httpx.Response(503, json={}),
        httpx.Response(200, content=said(3)),
        httpx.Response(200, content=said(4) + b": waiting\n\ndata: [DONE]\n\n"),
    )
    assert [e["n"] for e in ft.follow("j")] == [1, 2, 3, 4]
    assert [r.headers.get("last-event-id") for r in seen] == [None, "2", "2", "3"]


def test_pages_of_events_are_one_list() -> None:
    ft, seen = client(
        httpx.Response(200, json={"data": [{"id": "b"}, {"id": "a"}], "has_more": True}),
        httpx.Response(200, json={"data": [{"id": "0"}], "has_more": False}),
    )
    assert [e["id"] for e in ft.events("j")] == ["b", "a", "0"]
    assert seen[1].url.params["after"] == "a"


def test_waiting_ends_with_the_job_or_with_the_time() -> None:
    running, done = ({"id": "j", "status": s, "state": s} for s in ("running", "failed"))
    ft, _ = client(httpx.Response(200, json=running), httpx.Response(200, json=done))
    assert ft.wait("j", poll_s=0) == done
    ft, _ = client(httpx.Response(200, json=running))
    with pytest.raises(TimeoutError, match="it goes on"):
        ft.wait("j", timeout_s=0)


def test_an_id_cannot_change_the_path() -> None:
    ft, seen = client(httpx.Response(200, json={}))
    ft.job("../../api_keys?x=1")
    assert seen[0].url.raw_path == b"/v1/fine_tuning/jobs/..%2F..%2Fapi_keys%3Fx%3D1"
