"""Forms of uploads: unknown fields are refused by name, objects come in both forms, and file names keep their script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.layout import file_key, safe_filename, shown_filename

ROWS = "".join(json.dumps({"prompt": f"q {i}", "completion": f"a {i}"}) + "\n" for i in range(12)).encode()
HOUR = {"anchor": "created_at", "seconds": 3600}
Post = Callable[..., httpx.Response]


@pytest.fixture
def post(api_url: str, api_key: str) -> Post:
    def send(path: str = "files", *, fields: Any = (), name: str = "rows.jsonl", file: str = "file", **options: Any) -> httpx.Response:
        files: list[tuple[str, Any]] = [(key, (None, value)) for key, value in fields]
        after = options.pop("after", ())
        files += [(file, (name, ROWS)), *((key, (None, value)) for key, value in after)]
        return httpx.post(f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {api_key}"}, files=files, timeout=60)

    return send


def error(answer: httpx.Response) -> tuple[int, str, str, str]:
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"], found["message"]


@pytest.mark.parametrize("where", ["fields", "after"])
@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("polcies", "policies"),
        ("polcies[pii]", "policies"),
        ("colum_map", "column_map"),
        ("expire_after[seconds]", "expires_after"),
        ("x", ""),
    ],
)
def test_unknown_fields_of_an_upload_are_refused_by_name(
    field: str, meant: str, where: str, post: Post, platform: Platform, tenant: Tenant
) -> None:
    usual = [("purpose", "fine-tune")]
    given: dict[str, Any] = {"fields": [*usual, (field, "{}")]} if where == "fields" else {"fields": usual, "after": [(field, "{}")]}
    status, code, param, message = error(post(**given))
    assert (status, code, param) == (400, "unknown_parameter", field)
    assert message.endswith(f"did you mean {meant}?") if meant else "did you mean" not in message
    assert list(platform.objects.list(f"tenants/{tenant.id}/files")) == [], "nothing is left behind"


def test_fields_that_are_sent_twice_are_refused(post: Post) -> None:
    usual = [("purpose", "fine-tune")]
    for twice in (
        [("purpose", "fine-tune")],
        [("policies", "{}"), ("policies[pii]", "warn")],
        [("policies[pii]", "warn"), ("policies", "{}")],
    ):
        status, code, param, message = error(post(fields=[*usual, *twice]))
        assert (status, code, param) == (400, "invalid_multipart", twice[-1][0].partition("[")[0])
        assert "was sent twice" in message


@pytest.mark.parametrize(
    "fields", [[("expires_after", json.dumps(HOUR))], [(f"expires_after[{key}]", str(value)) for key, value in HOUR.items()]]
)
def test_expiry_is_read_as_json_and_spread_over_fields(fields: list[tuple[str, str]], post: Post) -> None:
    made = post(fields=[("purpose", "fine-tune"), *fields]).json()
    assert made["expires_at"] == made["created_at"] + 3600


@pytest.mark.parametrize("text", ["3600", "[]", "{", '{"anchor": "created_at", "second": 3600}', '{"seconds": 3600}'])
def test_an_expiry_of_another_form_is_refused(text: str, post: Post) -> None:
    assert error(post(fields=[("purpose", "fine-tune"), ("expires_after", text)]))[:3] == (400, "invalid_expires_after", "expires_after")


def test_misspelled_policies_get_a_suggestion(post: Post) -> None:
    status, code, _, message = error(post(fields=[("purpose", "fine-tune"), ("policies", '{"near_duplicate": "off"}')]))
    assert (status, code) == (400, "invalid_policy")
    assert "did you mean near_duplicates" in message


def test_parts_and_suites_refuse_unknown_fields_too(client: openai.OpenAI, post: Post) -> None:
    made = client.uploads.create(bytes=len(ROWS), filename="a.jsonl", mime_type="text/plain", purpose="fine-tune").id
    for given in ({"fields": [("md5", "x")]}, {"after": [("md5", "x")]}):
        assert error(post(f"uploads/{made}/parts", file="data", **given))[:3] == (400, "unknown_parameter", "md5")
    assert error(post("suites", fields=[("name", "quiz"), ("feld", "prompt")]))[:3] == (400, "unknown_parameter", "feld")


NAMES = ["日本語 データ.jsonl", "Übung.csv", "بيانات.jsonl", "हिन्दी.jsonl", "👩\u200d🔬.jsonl", "e\u0301te\u0301.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_file_names_keep_their_script(name: str, client: openai.OpenAI, platform: Platform, tenant: Tenant) -> None:
    file = client.files.create(file=(name, ROWS), purpose="fine-tune")
    assert file.filename == name.replace("e\u0301", "\xe9")
    (key,) = (o.key for o in platform.objects.list(f"tenants/{tenant.id}/files"))
    assert key == file_key(tenant.id, file.id, file.filename)
    assert key.isascii()
    content = client.files.with_raw_response.content(file.id)
    assert content.content == ROWS
    named = httpx.Headers(content.headers)["content-disposition"]
    assert named.startswith(f"attachment; filename=\"{safe_filename(file.filename)}\"; filename*=UTF-8''%")
    in_parts = client.uploads.create(bytes=len(ROWS), filename=name, mime_type="text/plain", purpose="fine-tune")
    assert in_parts.filename == file.filename
    client.files.delete(file.id)


def test_a_file_name_that_is_only_extended_is_read(api_url: str, api_key: str) -> None:
    disposition = "form-data; name=\"file\"; filename*=UTF-8''%E6%97%A5%E6%9C%AC.jsonl"
    parts = [('form-data; name="purpose"', b"fine-tune"), (disposition, ROWS)]
    body = b"".join(b"--b\r\nContent-Disposition: %s\r\n\r\n%s\r\n" % (head.encode(), data) for head, data in parts) + b"--b--\r\n"
    headers = {"authorization": f"Bearer {api_key}", "content-type": "multipart/form-data; boundary=b"}
    assert httpx.post(f"{api_url}/v1/files", headers=headers, content=body, timeout=60).json()["filename"] == "日本.jsonl"


def test_names_cannot_forge_paths_lines_or_directions() -> None:
    assert shown_filename("../../etc/日本") == "日本"
    assert shown_filename("C:\\data\\a.jsonl") == "a.jsonl"
    assert shown_filename('a"\r\nb\u202egpj.exe\u2028') == "a___b_gpj.exe_"
    assert shown_filename("\ud800\0") == "__"
    assert shown_filename("...") == "file"
    assert shown_filename("ä" * 300 + ".jsonl") == "ä" * 249 + ".jsonl"
    assert [shown_filename(name) == safe_filename(name) for name in ("a b (1).jsonl", "<x>;.csv", "ä")] == [True, True, False]


def test_the_report_of_a_file_with_such_a_name_is_shown(client: openai.OpenAI, api_url: str, api_key: str, tmp_path: Path) -> None:
    (tmp_path / "données.jsonl").write_bytes(b"no json\n")
    file = client.files.create(file=tmp_path / "données.jsonl", purpose="fine-tune")
    headers = {"authorization": f"Bearer {api_key}", "accept": "text/html"}
    page = httpx.get(f"{api_url}/v1/datasets/{file.id}/report", headers=headers)
    assert (page.status_code, file.filename) == (200, "données.jsonl")
