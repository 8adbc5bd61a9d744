"""``/v1/uploads`` through OpenAI's client: files in parts, whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from control_plane.datasets.uploads import multipart_uploads
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant

CHUNK = 4000
"""Bytes of a part in these tests; the rows come to several."""


def send(client: openai.OpenAI, data: bytes, *, size: int = CHUNK) -> tuple[openai.types.Upload, list[str]]:
    """An upload of `data` of which every part is stored."""
    made = client.uploads.create(bytes=len(data), filename="rows.jsonl", mime_type="application/jsonl", purpose="fine-tune")
    parts = [client.uploads.parts.create(made.id, data=data[at : at + size]).id for at in range(0, len(data), size)]
    return made, parts


@pytest.fixture
def rows(write_chat_rows: Callable[..., Path]) -> bytes:
    return write_chat_rows().read_bytes()


def test_the_clients_own_helper_uploads_a_path_and_bytes(client: openai.OpenAI, write_chat_rows: Callable[..., Path], rows: bytes) -> None:
    path = write_chat_rows()
    md5 = hashlib.md5(rows).hexdigest()
    of_path = client.uploads.upload_file_chunked(file=path, mime_type="application/jsonl", purpose="fine-tune", part_size=CHUNK, md5=md5)
    of_bytes = client.uploads.upload_file_chunked(
        file=rows, filename="support.jsonl", bytes=len(rows), mime_type="application/jsonl", purpose="fine-tune"
    )
    for made in (of_path, of_bytes):
        assert (made.object, made.status, made.bytes, made.purpose) == ("upload", "completed", len(rows), "fine-tune")
        assert made.file is not None
        assert (made.file.filename, made.file.status, made.file.bytes) == ("support.jsonl", "processed", len(rows))
        assert client.files.content(made.file.id).read() == rows
    whole = client.files.create(file=path, purpose="fine-tune")
    assert of_path.file.sha256 == of_bytes.file.sha256 == whole.sha256
    assert of_path.file.dataset_id == whole.dataset_id


def test_the_async_helper_does_too(api_url: str, api_key: str, write_chat_rows: Callable[..., Path]) -> None:
    async def upload() -> openai.types.Upload:
        async with openai.AsyncOpenAI(base_url=f"{api_url}/v1", api_key=api_key) as client:
            return await client.uploads.upload_file_chunked(
                file=write_chat_rows(), mime_type="text/plain", purpose="fine-tune", part_size=9000
            )

    assert asyncio.run(upload()).file.status == "processed"


def test_the_order_is_that_of_the_last_call_and_the_md5_is_of_the_whole(client: openai.OpenAI, rows: bytes) -> None:
    made, parts = send(client, rows)
    with pytest.raises(openai.BadRequestError, match="md5") as refused:
        client.uploads.complete(made.id, part_ids=parts[::-1], md5=hashlib.md5(rows).hexdigest())
    assert (refused.value.code, refused.value.param) == ("md5_mismatch", "md5")
    done = client.uploads.complete(made.id, part_ids=parts, md5=hashlib.md5(rows).hexdigest())
    assert client.files.content(done.file.id).read() == rows


def test_what_is_there_is_told_with_its_digest_and_a_part_sent_twice_is_one(client: openai.OpenAI, rows: bytes) -> None:
    made, parts = send(client, rows)
    assert client.uploads.parts.create(made.id, data=rows[:CHUNK]).id == parts[0]
    asked = client.get(f"/uploads/{made.id}", cast_to=httpx.Response).json()
    assert [p["id"] for p in asked["parts"]] == parts
    assert [p["sha256"] for p in asked["parts"]] == [hashlib.sha256(rows[a : a + CHUNK]).hexdigest() for a in range(0, len(rows), CHUNK)]
    assert (asked["status"], asked["received_bytes"], asked["file"]) == ("pending", len(rows), None)


def test_completing_again_gives_the_same_file_and_the_parts_are_gone(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, rows: bytes
) -> None:
    made, parts = send(client, rows)
    first = client.uploads.complete(made.id, part_ids=parts)
    assert client.uploads.complete(made.id, part_ids=parts).file.id == first.file.id
    assert [f.id for f in client.files.list()] == [first.file.id]
    assert list(platform.objects.list(f"tenants/{tenant.id}/uploads")) == []
    client.files.delete(first.file.id)
    assert client.uploads.complete(made.id, part_ids=parts).file is None
    for change in (lambda: client.uploads.cancel(made.id), lambda: client.uploads.parts.create(made.id, data=b"x")):
        with pytest.raises(openai.ConflictError) as refused:
            change()
        assert refused.value.code == "upload_completed"


def test_of_many_completions_at_once_one_makes_the_file(client: openai.OpenAI, platform: Platform, tenant: Tenant, rows: bytes) -> None:
    made, parts = send(client, rows)
    start = threading.Barrier(6)

    def complete() -> str:
        start.wait()
        return client.uploads.complete(made.id, part_ids=parts).file.id

    with ThreadPoolExecutor(6) as pool:
        ids = {f.result() for f in [pool.submit(complete) for _ in range(6)]}
    assert len(ids) == 1
    assert [f.id for f in client.files.list()] == [*ids]
    assert len(list(platform.objects.list(f"tenants/{tenant.id}/files"))) == 1


def test_parts_that_do_not_add_up_make_no_file(client: openai.OpenAI, rows: bytes) -> None:
    made, parts = send(client, rows)
    for chosen, code in (
        (parts[:-1], "upload_size_mismatch"),
        ([*parts, parts[0]], "upload_size_mismatch"),
        (["part_x"], "part_not_found"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.uploads.complete(made.id, part_ids=chosen)
        assert (refused.value.code, refused.value.param) == (code, "part_ids")
    for data, code in ((b"y" * CHUNK, "upload_size_exceeded"), (b"y" * (len(rows) + 1), "upload_size_exceeded"), (b"", "empty_part")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.uploads.parts.create(made.id, data=data)
        assert refused.value.code == code
    assert client.uploads.complete(made.id, part_ids=parts).status == "completed"


def test_a_cancelled_upload_is_gone_with_its_parts(client: openai.OpenAI, platform: Platform, tenant: Tenant, rows: bytes) -> None:
    made, parts = send(client, rows)
    assert client.uploads.cancel(made.id).status == client.uploads.cancel(made.id).status == "cancelled"
    assert list(platform.objects.list(f"tenants/{tenant.id}/uploads")) == []
    for change in (lambda: client.uploads.complete(made.id, part_ids=parts), lambda: client.uploads.parts.create(made.id, data=b"x")):
        with pytest.raises(openai.ConflictError) as refused:
            change()
        assert refused.value.code == "upload_cancelled"


def test_what_the_file_would_be_refused_for_is_refused_before_a_byte_is_sent(
    client: openai.OpenAI, platform: Platform, api_url: str
) -> None:
    small, _ = tenants.create(platform, "of-the-free-tier", tier="free")
    key = tenants.create_key(platform, small.id, name="k", scopes=["write"]).secret
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=key) as poor, pytest.raises(openai.BadRequestError, match="1 GiB") as refused:
        poor.uploads.create(bytes=(1 << 30) + 1, filename="a.jsonl", mime_type="text/plain", purpose="fine-tune")
    assert (refused.value.code, refused.value.param) == ("file_too_large", "bytes")
    usual = {"bytes": 10, "filename": "a.jsonl", "mime_type": "text/plain", "purpose": "fine-tune"}
    for changed, code in (
        ({"bytes": 0}, "invalid_request"),
        ({"purpose": "vision"}, "invalid_purpose"),
        ({"extra_body": {"policies": {"pii": "perhaps"}}}, "invalid_policy"),
        ({"extra_body": {"bytez": 1}}, "unknown_parameter"),
        ({"expires_after": {"anchor": "created_at", "seconds": 60}}, "invalid_expires_after"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.uploads.create(**{**usual, **changed})  # type: ignore[arg-type]
        assert refused.value.code in (code, "invalid_type"), changed
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.uploads.create(**usual, extra_body={"model": "gpt-5"})  # type: ignore[arg-type]


def test_our_own_fields_reach_the_file(client: openai.OpenAI, tmp_path: Path) -> None:
    data = ("text,category\n" + "".join(f"question {i},answer {i}\n" for i in range(120))).encode()
    made = client.uploads.create(
        bytes=len(data), filename="intents.csv", mime_type="text/csv", purpose="fine-tune",
        expires_after={"anchor": "created_at", "seconds": 7200},
        extra_body={"column_map": {"text": "prompt", "category": "completion"}, "policies": {"pii": "warn"}, "model": None},
    )  # fmt: skip
    part = client.uploads.parts.create(made.id, data=data)
    file = client.uploads.complete(made.id, part_ids=[part.id]).file
    assert (file.status, file.policies) == ("processed", {"pii": "warn"})
    assert file.expires_at - file.created_at == 7200


def test_another_tenants_upload_does_not_exist(client: openai.OpenAI, platform: Platform, api_url: str, rows: bytes) -> None:
    made, parts = send(client, rows)
    other, _ = tenants.create(platform, "uploads-stranger", tier="standard")
    key = tenants.create_key(platform, other.id, name="k", scopes=["write"]).secret
    with openai.OpenAI(base_url=f"{api_url}/v1", api_key=key) as stranger:
        mine = stranger.uploads.create(bytes=len(rows), filename="a", mime_type="text/plain", purpose="fine-tune")
        for call in (
            lambda: stranger.uploads.complete(made.id, part_ids=parts),
            lambda: stranger.uploads.cancel(made.id),
            lambda: stranger.uploads.parts.create(made.id, data=b"x"),
            lambda: stranger.get(f"/uploads/{made.id}", cast_to=httpx.Response),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                call()
            assert refused.value.code == "upload_not_found"
        with pytest.raises(openai.BadRequestError) as unknown:
            stranger.uploads.complete(mine.id, part_ids=parts)
        assert unknown.value.code == "part_not_found"
    assert client.uploads.complete(made.id, part_ids=parts).status == "completed"


def test_a_part_larger_than_one_may_be_is_refused_as_it_comes(client: openai.OpenAI, platform: Platform, tenant: Tenant) -> None:
    made = client.uploads.create(bytes=multipart_uploads.PART_BYTES * 2, filename="a", mime_type="text/plain", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="64 MiB") as refused:
        client.uploads.parts.create(made.id, data=bytes(multipart_uploads.PART_BYTES + 1))
    assert refused.value.code == "part_too_large"
    assert list(platform.objects.list(f"tenants/{tenant.id}/uploads")) == []
