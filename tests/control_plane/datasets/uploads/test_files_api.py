"""``/v1/files`` and ``/v1/datasets`` through OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import NotFound
from ft_client import FtClient


def test_a_good_upload_is_validated_before_it_is_answered(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(130)
    file = client.files.create(file=path, purpose="fine-tune")
    assert (file.object, file.filename, file.purpose, file.status) == ("file", "support.jsonl", "fine-tune", "processed")
    assert file.bytes == path.stat().st_size
    assert file.dataset_id.startswith("ds_")
    assert client.files.wait_for_processing(file.id).status == "processed"
    assert client.files.content(file.id).read() == path.read_bytes()


def test_a_dataset_is_its_content_whatever_file_it_came_in(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    one = client.files.create(file=write_chat_rows(name="one.jsonl"), purpose="fine-tune")
    two = client.files.create(file=write_chat_rows(name="two.jsonl"), purpose="fine-tune")
    other = client.files.create(file=write_chat_rows(salt="!", name="one.jsonl"), purpose="fine-tune")
    assert one.id != two.id
    assert one.dataset_id == two.dataset_id != other.dataset_id


def test_a_bad_upload_is_a_file_with_every_problem_named(client: openai.OpenAI, ft: FtClient, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]} for i in range(120)]
    lines = [json.dumps(r) for r in rows]
    lines[4], lines[90] = '{"messages": [', json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    path.write_text("\n".join(lines))
    file = client.files.create(file=path, purpose="fine-tune")
    assert file.status == "error"
    assert "row 5" in file.status_details
    assert file.id in file.status_details
    report = ft.datasets.report(file.id)
    assert report["valid"] is False
    assert {e["row"] for e in report["errors"]} == {5, 91}


def test_a_validated_dataset_lies_whole_under_its_tenant(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, training_file: str
) -> None:
    dataset = client.files.retrieve(training_file).dataset_id
    keys = [o.key for o in platform.objects.list(f"tenants/{tenant.id}/datasets")]
    assert keys == [f"tenants/{tenant.id}/datasets/{dataset}/{n}" for n in ("dataset.json", "report.json", "rows.parquet")]
    record = json.loads(platform.objects.get_bytes(keys[0]))
    assert (record["id"], record["row_count"], record["name"]) == (dataset, 120, "support")


def test_a_csv_is_read_through_its_column_map(ft: FtClient, tmp_path: Path) -> None:
    path = tmp_path / "intents.csv"
    path.write_text("text,category\n" + "".join(f"question {i},answer {i}\n" for i in range(120)))
    assert ft.files.create(path, column_map={"text": "prompt", "category": "completion"})["status"] == "processed"
    assert ft.files.create(path, column_map={"nothing": "prompt"})["status"] == "error"


def test_a_column_map_that_is_no_json_object_is_refused(api_url: str, api_key: str) -> None:
    for sent in ("text=prompt", '["a"]', '{"a": 1}'):
        answer = httpx.post(
            f"{api_url}/v1/files",
            headers={"authorization": f"Bearer {api_key}"},
            data={"purpose": "fine-tune", "column_map": sent},
            files={"file": ("a.csv", b"a,b\n1,2\n")},
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_column_map")


def test_files_are_listed_page_by_page_newest_first(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    made = [client.files.create(file=write_chat_rows(3, salt=str(i)), purpose="fine-tune").id for i in range(5)]
    assert [f.id for f in client.files.list(limit=2)] == made[::-1]
    assert [f.id for f in client.files.list(limit=2, order="asc")] == made
    first = client.files.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    assert [f.id for f in client.files.list(after=made[2])] == [made[1], made[0]]


def test_a_deleted_file_is_gone_and_its_dataset_stays(client: openai.OpenAI, ft: FtClient, platform: Platform, training_file: str) -> None:
    dataset = client.files.retrieve(training_file).dataset_id
    deleted = client.files.delete(training_file)
    assert (deleted.id, deleted.deleted, deleted.object) == (training_file, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refused:
            call(training_file)
        assert refused.value.code == "file_not_found"
    assert list(client.files.list()) == []
    assert ft.datasets.report(dataset)["valid"] is True


def test_neither_file_of_a_job_that_has_not_ended_can_be_deleted(
    client: openai.OpenAI, training_file: str, write_chat_rows: Callable[..., Path]
) -> None:
    held_out = client.files.create(file=write_chat_rows(salt="held out"), purpose="fine-tune").id
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, validation_file=held_out)
    for file in (training_file, held_out):
        with pytest.raises(openai.ConflictError, match=job.id) as refused:
            client.files.delete(file)
        assert refused.value.code == "file_in_use"
    client.fine_tuning.jobs.cancel(job.id)
    for file in (training_file, held_out):
        client.files.delete(file)


def test_another_purpose_is_refused(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=write_chat_rows(), purpose="vision")
    assert (refused.value.code, refused.value.param) == ("invalid_purpose", "purpose")


def test_a_file_name_cannot_leave_its_place(client: openai.OpenAI, platform: Platform, tenant: Tenant) -> None:
    file = client.files.create(file=("../../../etc/pass\nwd.jsonl", b"{}\n"), purpose="fine-tune")
    assert "/" not in file.filename
    assert [o.key for o in platform.objects.list(f"tenants/{tenant.id}/files")] == [f"tenants/{tenant.id}/files/{file.id}/{file.filename}"]


def test_the_report_of_nothing_is_not_found(ft: FtClient) -> None:
    with pytest.raises(NotFound, match="no dataset"):
        ft.datasets.report("ds_0")
