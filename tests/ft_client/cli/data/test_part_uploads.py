"""``ft upload`` of a large file: interrupted and run again, it sends what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from ft_client import FtClient
from ft_client.cli.data.part_uploads import send_in_parts

PART = 4000


class Line(httpx.HTTPTransport):
    """A connection that breaks before the part of this number, and counts them."""

    def __init__(self, breaks_at: int | None = None) -> None:
        super().__init__()
        self.breaks_at, self.parts, self.uploads = breaks_at, 0, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/parts"):
            if self.parts == self.breaks_at:
                raise httpx.WriteError("the line is down")
            self.parts += 1
        self.uploads += request.url.path == "/v1/uploads"
        return super().handle_request(request)


@pytest.fixture
def send(api_url: str, api_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(file: Path, line: Line, **options: Any) -> Any:
        with FtClient(base_url=api_url, api_key=api_key, transport=line, backoff_s=0.01) as client:
            return send_in_parts(client, api_url, file, options, part_bytes=PART)

    return run


def test_a_second_call_sends_what_the_first_did_not(
    send: Callable[..., Any], write_chat_rows: Callable[..., Path], platform: Platform, tenant: Tenant, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_chat_rows()
    total = -(-path.stat().st_size // PART)
    first, second = Line(breaks_at=2), Line()
    with pytest.raises(httpx.WriteError):
        send(path, first, policies={"pii": "warn"})
    assert "run the same command within an hour" in capsys.readouterr().err
    made = send(path, second, policies={"pii": "warn"})
    assert (made["status"], made["bytes"], made["policies"]) == ("processed", path.stat().st_size, {"pii": "warn"})
    assert (first.parts, second.parts, second.uploads) == (2, total - 2, 0)
    assert platform.objects.get_bytes(f"tenants/{tenant.id}/files/{made['id']}/support.jsonl") == path.read_bytes()
    third = Line()
    assert send(path, third, policies={"pii": "warn"})["id"] != made["id"]  # it was done: this is a new one
    assert (third.parts, third.uploads) == (total, 1)


def test_a_file_that_was_changed_meanwhile_is_another_one(send: Callable[..., Any], write_chat_rows: Callable[..., Path]) -> None:
    with pytest.raises(httpx.WriteError):
        send(write_chat_rows(), Line(breaks_at=1))
    changed, line = write_chat_rows(salt="!"), Line()
    assert send(changed, line)["bytes"] == changed.stat().st_size
    assert line.uploads == 1


class LosesTheAnswer(Line):
    """A connection that breaks when the upload is completed, before its answer."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        if request.url.path.endswith("/complete"):
            answer.close()
            raise httpx.ReadError("the line is down")
        return answer


def test_an_upload_that_was_completed_though_no_answer_came_is_the_answer_of_the_next_call(
    send: Callable[..., Any], write_chat_rows: Callable[..., Path], platform: Platform, tenant: Tenant
) -> None:
    path, line = write_chat_rows(), Line()
    with pytest.raises(httpx.ReadError):
        send(path, LosesTheAnswer())
    made = send(path, line)
    assert (made["status"], made["bytes"]) == ("processed", path.stat().st_size)
    assert (line.parts, line.uploads) == (0, 0)
    assert [f.id for f in uploaded_files.list_files(platform, tenant.id).items] == [made["id"]]


def test_the_same_file_with_other_options_is_another_upload(send: Callable[..., Any], write_chat_rows: Callable[..., Path]) -> None:
    path, line = write_chat_rows(), Line()
    with pytest.raises(httpx.WriteError):
        send(path, Line(breaks_at=1), policies={"pii": "warn"})
    assert send(path, line, policies={"pii": "redact"})["policies"] == {"pii": "redact"}
    assert line.uploads == 1


def test_an_upload_that_is_gone_begins_anew(send: Callable[..., Any], write_chat_rows: Callable[..., Path], tmp_path: Path) -> None:
    path = write_chat_rows()
    with pytest.raises(httpx.WriteError):
        send(path, Line(breaks_at=1))
    (note,) = (tmp_path / "cache" / "ft" / "uploads").iterdir()
    for wrong in (json.dumps({"upload": "upload_none"}), "no json"):
        note.write_text(wrong)
        line = Line()
        assert send(path, line)["status"] == "processed"
        assert line.uploads == 1


def test_files_are_listed_shown_downloaded_and_deleted(
    ft: Callable[..., Any], write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_chat_rows()
    id_ = ft("upload", path).out.splitlines()[0]
    assert [f["id"] for f in ft("files", "list", "--json").json] == [id_]
    assert "never" in ft("files", "show", id_).out
    done = ft("files", "download", id_, "--out", tmp_path / "copy.jsonl")
    assert (done.code, (tmp_path / "copy.jsonl").read_bytes()) == (0, path.read_bytes())
    assert ft("files", "delete", id_, "--json").json["deleted"] is True
    assert ft("files", "show", id_).code != 0
