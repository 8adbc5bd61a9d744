"""The Python client: retries, streams that break, errors rebuilt."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import (
    Conflict,
    FtError,
    IntegrityError,
    InvalidDataset,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from ft_client import FtClient
from ft_client.retries import MAX_BACKOFF_S, retry_pause
from tests.ft_client.scripted import BreaksOff, client, error, ok


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_seed", InvalidRequest),
        (400, "invalid_training_file", InvalidDataset),
        (401, "missing_api_key", Unauthenticated),
        (404, "file_not_found", NotFound),
        (409, "file_in_use", Conflict),
        (422, None, InvalidRequest),
        (429, "exceeded_quota", QuotaExceeded),
        (429, RateLimited.default_code, RateLimited),
        (503, "database_unavailable", Unavailable),
        (500, "server_error", FtError),
    ],
)
def test_an_error_comes_back_as_the_class_it_was(status: int, code: str | None, kind: type[FtError]) -> None:
    ft, _ = client(*[error(status, code, **{"x-request-id": "req_1"}) for _ in range(3)])
    with pytest.raises(kind, match="why") as raised:
        ft.jobs.retrieve("j")
    assert (raised.value.code, raised.value.param, raised.value.request_id) == (code or kind.default_code, "p", "req_1")
    assert pickle.loads(pickle.dumps(raised.value)).request_id == "req_1"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"error": {}}', b'{"detail": []}'])
def test_an_answer_in_another_form_is_an_error_too(body: bytes) -> None:
    ft, _ = client(*[httpx.Response(502, content=body) for _ in range(3)])
    with pytest.raises(Unavailable, match="status 502"):
        ft.jobs.retrieve("j")


def test_a_page_of_a_proxy_is_no_answer() -> None:
    ft, _ = client(httpx.Response(200, html="<h1>Log in</h1>"))
    with pytest.raises(Unavailable, match="text/html"):
        ft.jobs.retrieve("j")


def test_fields_of_a_newer_server_and_fields_that_are_missing_break_nothing() -> None:
    ft, _ = client(ok(id="j", status="running", fine_tuned_model=None, quantum={"deep": [1]}), ok(data=[{"id": "e"}]))
    job = ft.jobs.retrieve("j")
    assert (job["status"], job["fine_tuned_model"], job.get("error")) == ("running", None, None)
    assert [e["id"] for e in ft.jobs.events("j")] == ["e"], "an old server says nothing of further pages"


def test_a_submission_is_repeated_under_the_same_key() -> None:
    ft, seen = client(httpx.ReadTimeout("slow"), httpx.Response(502), ok(id="ftjob-1"))
    assert ft.jobs.create(model="m", training_file="f")["id"] == "ftjob-1"
    assert len({r.headers["idempotency-key"] for r in seen}) == 1
    assert len({r.content for r in seen}) == 1
    ft, again = client(ok(), ok())
    ft.jobs.create(model="m", training_file="f")
    ft.jobs.create(model="m", training_file="f", idempotency_key="mine")
    assert again[0].headers["idempotency-key"] != seen[0].headers["idempotency-key"]
    assert (again[1].headers["idempotency-key"], "idempotency_key" in json.loads(again[1].content)) == ("mine", False)


def test_a_call_that_may_not_be_repeated_is_not() -> None:
    ft, seen = client(httpx.ReadTimeout("slow"))
    with pytest.raises(httpx.ReadTimeout):
        ft.jobs.resume("j")
    assert len(seen) == 1
    ft, seen = client(httpx.ConnectError("refused"), ok(id="j"))
    assert ft.jobs.resume("j")["id"] == "j", "what never left is sent again all the same"


def test_a_refusal_that_says_so_is_not_repeated() -> None:
    ft, seen = client(error(429, "exceeded_quota", **{"x-should-retry": "false"}))
    with pytest.raises(QuotaExceeded):
        ft.jobs.create(model="m", training_file="f")
    assert len(seen) == 1


def test_an_unreachable_api_is_a_transport_error_after_three_tries() -> None:
    ft, seen = client(*[httpx.ConnectError("no") for _ in range(4)])
    with pytest.raises(httpx.TransportError):
        ft.models.list().all()
    assert len(seen) == 3
    with pytest.raises(httpx.TransportError):
        ft.with_options(max_retries=0).models.list().all()
    assert len(seen) == 4


NOW = datetime(2026, 1, 1, tzinfo=UTC)
RESPONSES: list[tuple[str, Any, bool, float | None]] = [
    ("a limit of requests is waited for", httpx.Response(429, headers={"retry-after": "7"}), False, 7.0),
    ("milliseconds are finer than seconds", httpx.Response(429, headers={"retry-after": "1", "retry-after-ms": "250"}), False, 0.25),
    ("a date is a time", httpx.Response(503, headers={"retry-after": format_datetime(NOW + timedelta(seconds=9))}), True, 9.0),
    ("a date that is over is now", httpx.Response(503, headers={"retry-after": format_datetime(NOW - timedelta(1))}), True, 0.0),
    ("an hour is not waited for", httpx.Response(429, headers={"retry-after": "3600"}), True, None),
    ("the server forbids", httpx.Response(503, headers={"x-should-retry": "false"}), True, None),
    ("the server asks for it", httpx.Response(409, headers={"x-should-retry": "true"}), True, 2.0),
    ("the server asks for it, and it could be done twice", httpx.Response(500, headers={"x-should-retry": "true"}), False, None),
    ("a server error that may be repeated", httpx.Response(500), True, 2.0),
    ("a server error that may not", httpx.Response(500), False, None),
    ("the server gave up waiting for us", httpx.Response(408), False, 2.0),
    ("a refusal", httpx.Response(400), True, None),
    ("a broken connection", httpx.ReadError("lost"), True, 2.0),
    ("a broken connection, and it may have been done", httpx.ReadError("lost"), False, None),
    ("never connected", httpx.ConnectTimeout("no"), False, 2.0),
    ("words that nobody knows", httpx.Response(503, headers={"retry-after": "soon"}), True, 2.0),
    ("a date of no calendar", httpx.Response(503, headers={"retry-after": "Mon, 01 Jan 2024 00:00:00 +9999999999999"}), True, 2.0),
]


@pytest.mark.parametrize(("claim", "outcome", "repeatable", "pause_s"), RESPONSES, ids=[r[0] for r in RESPONSES])
def test_when_a_call_is_sent_again(claim: str, outcome: Any, repeatable: bool, pause_s: float | None) -> None:
    found = retry_pause(outcome, repeatable=repeatable, retry=2, backoff_s=0.5, jitter=lambda: 0.0, now=lambda: NOW)
    assert found == pause_s


def test_the_pause_grows_to_a_bound_and_is_shortened_by_chance() -> None:
    lost = httpx.ReadError("lost")
    pauses = [retry_pause(lost, repeatable=True, retry=n, jitter=lambda: 0.0) for n in range(8)]
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, MAX_BACKOFF_S]
    assert pauses[-1] == MAX_BACKOFF_S
    assert retry_pause(lost, repeatable=True, retry=1, jitter=lambda: 1.0) == 0.75


def said(*seqs: int) -> bytes:
    return b"".join(f"id: {n}\ndata: {json.dumps({'n': n})}\n\n".encode() for n in seqs)


def broken_stream() -> list[httpx.Response]:
    return [
        httpx.Response(200, stream=BreaksOff(said(1, 2) + b"id: 3\ndata: {")),
        httpx.Response(503, json={}),
        httpx.Response(200, content=said(3)),
        httpx.Response(200, content=said(4) + b": waiting\n\ndata: [DONE]\n\n"),
    ]


def test_events_go_on_where_a_stream_broke_off() -> None:
    ft, seen = client(*broken_stream())
    assert [e["n"] for e in ft.jobs.follow("j")] == [1, 2, 3, 4]
    assert [r.headers.get("last-event-id") for r in seen] == [None, "2", "2", "3"]


def test_a_log_goes_on_at_the_byte_and_in_the_attempt_where_it_broke_off() -> None:
    told = {"x-log-attempt": "2", "x-log-offset": "100"}
    whole = "schr\u00e4g\n".encode()
    ft, seen = client(
        httpx.Response(200, stream=BreaksOff(whole[:5]), headers=told),
        httpx.ConnectError("restarting"),
        httpx.Response(200, content=whole[5:] + b"end\n", headers={**told, "x-log-offset": "105"}),
    )
    assert "".join(ft.jobs.follow_logs("j")) == "schr\u00e4g\nend\n", "a letter was cut in two"
    assert [(r.url.params["offset"], r.url.params.get("attempt")) for r in seen] == [("0", None), ("105", "2"), ("105", "2")]


def test_a_log_that_is_silent_is_asked_for_again_where_it_was() -> None:
    silent = httpx.Response(200, headers={"x-log-offset": "0", "x-log-attempt": "1"}, stream=BreaksOff(b"ab", httpx.ReadTimeout("silent")))
    ft, seen = client(silent, httpx.Response(200, headers={"x-log-offset": "2"}, content=b"cd"), max_retries=0)
    with ft:
        assert "".join(ft.jobs.follow_logs("j")) == "abcd"
    assert seen[1].url.params["offset"] == "2"


def test_a_stream_that_says_nothing_and_ends_is_not_asked_for_for_ever() -> None:
    ft, seen = client(*(httpx.Response(200, content=b"") for _ in range(9)), max_retries=2)
    with ft, pytest.raises(Unavailable, match="proxy"):
        list(ft.jobs.follow("j"))
    assert len(seen) == 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line_of_a_stream(end: str) -> None:
    text = "a\u2028b\u2029c\u0085de\u00e4"
    chunk = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    sent = f"data: {chunk}{end}{end}data: [DONE]{end}{end}".encode()
    in_bytes = httpx.Response(200, content=(sent[i : i + 1] for i in range(len(sent))))
    ft, _ = client(in_bytes)
    assert list(ft.chat.stream(model="m", messages=[])) == [text]


def test_a_stream_without_news_survives_a_restart_as_one_with_news_does() -> None:
    quiet = httpx.Response(200, stream=BreaksOff(b": waiting\n\n"))
    ft, seen = client(
        quiet, *[httpx.ConnectError("restarting")] * 5, httpx.Response(200, content=said(1) + b"data: [DONE]\n\n"), max_retries=0
    )
    assert [e["n"] for e in ft.jobs.follow("j")] == [1]
    assert len(seen) == 7


def test_a_page_of_a_proxy_is_no_output_of_a_stream() -> None:
    ft, seen = client(*(httpx.Response(200, html="<h1>\nLog in\n</h1>\n") for _ in range(9)), max_retries=2)
    with pytest.raises(Unavailable, match="proxy"):
        list(ft.jobs.follow("j"))
    assert len(seen) == 3


def test_an_api_that_is_not_there_ends_a_stream_that_never_began() -> None:
    ft, seen = client(*[httpx.ConnectError("no") for _ in range(3)])
    with pytest.raises(httpx.ConnectError):
        list(ft.jobs.follow("j"))
    assert len(seen) == 3


def test_pages_are_one_list_and_are_asked_for_as_they_are_read() -> None:
    pages = [ok(data=[{"id": "b"}, {"id": "a"}], has_more=True), ok(data=[{"id": "0"}], has_more=False)]
    ft, seen = client(*pages)
    listed = ft.jobs.events("j")
    assert seen == []
    assert [e["id"] for e in listed.take(2)] == ["b", "a"]
    assert len(seen) == 1, "the second page was not needed"
    ft, seen = client(*pages)
    assert [e["id"] for e in ft.jobs.events("j")] == ["b", "a", "0"]
    assert seen[1].url.params["after"] == "a"


def test_waiting_ends_with_the_job_or_with_the_time_and_outlives_a_restart() -> None:
    running, done = ({"id": "j", "status": s, "state": s} for s in ("running", "failed"))
    away = [httpx.ConnectError("restarting") for _ in range(5)]
    ft, seen = client(ok(**running), *away, error(503, None), ok(**done))
    assert ft.jobs.wait("j", poll_s=0) == done
    assert len(seen) == 8
    ft, _ = client(ok(**running))
    with pytest.raises(TimeoutError, match="still running"):
        ft.jobs.wait("j", timeout_s=0)
    ft, _ = client(*[httpx.ConnectError("nobody") for _ in range(3)])
    with pytest.raises(httpx.ConnectError):
        ft.jobs.wait("j", poll_s=0)


def test_an_id_cannot_change_the_path() -> None:
    ft, seen = client(ok())
    ft.jobs.retrieve("../../api_keys?x=1")
    assert seen[0].url.raw_path == b"/v1/fine_tuning/jobs/..%2F..%2Fapi_keys%3Fx%3D1"
    with pytest.raises(InvalidRequest, match="job_id is empty"):
        ft.jobs.retrieve("")


def test_a_download_is_whole_or_not_there(tmp_path: Path) -> None:
    sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    ft, _ = client(httpx.Response(200, content=b"hello", headers={"x-sha256": sha256}))
    assert ft.exports.download("a", "e", tmp_path / "whole") == sha256
    ft, _ = client(httpx.Response(200, content=b"hell", headers={"x-sha256": sha256}))
    with pytest.raises(IntegrityError, match="download it again"):
        ft.exports.download("a", "e", tmp_path / "torn")
    ft, _ = client(httpx.Response(200, stream=BreaksOff(b"he")))
    with pytest.raises(httpx.ReadError):
        ft.exports.download("a", "e", tmp_path / "torn")
    assert [p.name for p in tmp_path.iterdir()] == ["whole"]
    ft, _ = client(httpx.Response(503), httpx.Response(200, content=b"hello", headers={"x-sha256": sha256}))
    assert ft.exports.download("a", "e", tmp_path / "later") == sha256, "opening it is repeated as every reading is"


def test_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_API_URL", "http://there/v1")
    monkeypatch.setenv("FT_API_KEY", "ft-sk-1")
    ft, seen = client(ok(data=[]), base_url=None, api_key=None)
    ft.models.list().all()
    assert (str(seen[0].url), seen[0].headers["authorization"]) == ("http://there/v1/models", "Bearer ft-sk-1")
    monkeypatch.delenv("FT_API_KEY")
    with pytest.raises(InvalidRequest, match="set FT_API_KEY"):
        FtClient()


def test_a_join_that_outlives_a_connection_is_asked_for_until_it_is_done() -> None:
    busy = error(503, "upload_completing")
    api, seen = client(httpx.ReadTimeout("no answer"), busy, busy, ok(id="upload_1", status="completed"))
    assert api.uploads.complete("upload_1", part_ids=["part_1"])["status"] == "completed"
    assert len(seen) == 4  # three tries of one call, and the next call
    assert {r.extensions["timeout"]["read"] for r in seen} == {600.0}
    api, seen = client(*[error(503, "database_unavailable")] * 3)
    with pytest.raises(Unavailable):
        api.uploads.complete("upload_1", part_ids=["part_1"])
    assert len(seen) == 3
