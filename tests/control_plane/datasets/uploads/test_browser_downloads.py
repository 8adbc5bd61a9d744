"""What a tenant uploads is never a page of ours: a browser that follows a link to it saves a file, and runs nothing."""

from __future__ import annotations

import email.message
import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from control_plane.platform.context import Platform

SCRIPT = "<script>fetch('/v1/api_keys')</script>"
PAGE = f"<!doctype html><html><body>{SCRIPT}</body></html>".encode()
PICTURE = f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{SCRIPT}</svg>'.encode()
UPLOADS = {
    "a page with a quote in its name": ('a"; filename="b.html', PAGE, "text/html"),
    "a picture": ("../x/\u202egvs.svg", PICTURE, "image/svg+xml"),
}  # fmt: skip


@pytest.fixture
def browser(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    """Signed in to the console, whose cookie opens the API."""
    with httpx.Client(base_url=api_url, headers={"accept": "text/html,application/xhtml+xml,image/svg+xml,*/*;q=0.8"}, timeout=90) as made:
        assert made.post("/console/sign-in", data={"key": api_key}).status_code == 303
        yield made


@pytest.mark.parametrize("kind", UPLOADS)
def test_a_download_is_saved_and_not_shown(browser: httpx.Client, api_key: str, kind: str) -> None:
    name, content, media_type = UPLOADS[kind]
    bearer = {"authorization": f"Bearer {api_key}"}
    made = browser.post("/v1/files", files={"file": (name, content, media_type)}, data={"purpose": "fine-tune"}, headers=bearer)
    assert made.status_code == 200, made.text
    answer = browser.get(f"/v1/files/{made.json()['id']}/content")
    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    assert answer.headers["cache-control"] == "no-store"
    named = email.message.Message()
    named["content-disposition"] = answer.headers["content-disposition"]
    assert named.get_content_disposition() == "attachment"
    assert not set('/\\"<>\u202e\r\n') & set(str(named.get_filename()))
    assert set(dict(named.get_params(header="content-disposition") or ())) <= {"attachment", "filename", "filename*"}


def test_a_report_shows_a_script_as_text(browser: httpx.Client, api_key: str, platform: Platform) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{SCRIPT} {n}"}, {"role": "assistant", "content": PICTURE.decode()}]} for n in range(12)
    ]
    content = "\n".join(json.dumps(row) for row in [*rows, {SCRIPT: SCRIPT}]).encode()
    bearer = {"authorization": f"Bearer {api_key}"}
    upload = {"file": (f"{SCRIPT}.jsonl", content, "text/html")}
    made = browser.post("/v1/files", files=upload, data={"purpose": "fine-tune"}, headers=bearer).json()
    page = browser.get(f"/v1/datasets/{made['id']}/report")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html"), page.text
    assert page.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "fetch(" in page.text, "something of the rows is shown"
    assert not re.search(r"<script|<svg[^>]*onload", page.text)


def every_get(platform_openapi: dict[str, object]) -> list[str]:
    paths = platform_openapi["paths"]
    assert isinstance(paths, dict)
    return [path for path, calls in paths.items() if "get" in calls]


def test_no_answer_of_the_api_is_a_page_without_a_policy(browser: httpx.Client, api_url: str, make_path: Callable[[str], str]) -> None:
    """Errors quote what was asked for, and a page of ours is the only thing that a browser would run."""
    shown = 0
    for path in every_get(httpx.get(f"{api_url}/openapi.json", timeout=90).json()):
        if path.endswith(("/events", "/logs")):
            continue
        answer = browser.get(make_path(path))
        shown += SCRIPT[1:7] in answer.text
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], path
        if answer.headers.get("content-type", "").startswith(("text/html", "image/svg", "text/xml", "application/xhtml")):
            assert "default-src" in answer.headers["content-security-policy"], path
            assert "<script>" not in answer.text, path
    assert shown > 5, "ids are quoted"


@pytest.fixture
def make_path() -> Callable[[str], str]:
    return lambda path: re.sub(r"\{[^}]*\}", "%3Cscript%3Ealert(1)%3C%2Fscript%3E", path)
