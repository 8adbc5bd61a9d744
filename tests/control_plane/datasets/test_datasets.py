"""``/v1/datasets``, policies with an upload, previews and estimates, over the wire."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from control_plane.datasets import service as datasets
from control_plane.datasets.service import ExampleMessage
from control_plane.datasets.tables import datasets as datasets_table
from control_plane.datasets.tables import files
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.validation import HERE_BYTES, limits
from control_plane.platform.context import Platform
from control_plane.tenants import rules as tiers
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.base_models import Catalogue
from core.errors import Conflict, InvalidDataset, InvalidRequest, NotFound
from ft_client import FtClient
from tests.support.jobs.registered_adapter import add_dataset
from tests.support.models.tiny_model import build_tiny_model

MODEL = "tiny-chat"


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform whose only base model has a real tokenizer and template."""
    directory = build_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    return replace(new_platform(), models=Catalogue({MODEL: ({"id": MODEL, "path": str(directory)}, directory.parent)}))


@pytest.fixture
def pages(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api_url, headers={"authorization": f"Bearer {api_key}", "accept": "text/html"}) as client:
        yield client


def with_addresses(path: Path) -> Path:
    """Rows of which every tenth holds an e-mail address."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::10]:
        row["messages"][0]["content"] += " Write to jane.doe@example.com."
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_prompt_of_a_dataset_is_its_shared_system_message_and_first_question(
    platform: Platform, tenant: Tenant, tmp_path: Path
) -> None:
    def prompt(*systems: str | None) -> list[ExampleMessage]:
        lines = b""
        for n, system in enumerate(systems):
            turns = [
                ("system", system),
                ("user", f"Where is order {n}?"),
                ("assistant", f"Near {n}."),
                ("user", "Ok?"),
                ("assistant", "Yes."),
            ]
            row = {"messages": [{"role": role, "content": content} for role, content in turns if content]}
            lines += json.dumps(row).encode() + b"\n"
        file = uploaded_files.create(platform, tenant.id, io.BytesIO(lines), filename="rows.jsonl", purpose="fine-tune")
        return datasets.example_prompt(platform, tenant.id, str(file.dataset_id))

    def system(text: str, *, is_whole: bool = True) -> ExampleMessage:
        return ExampleMessage(role="system", content=text, is_whole=is_whole)

    asked = ExampleMessage(role="user", content="Where is order 0?")
    assert prompt("Be short.", "Be short.") == [system("Be short."), asked]
    assert prompt("Be short.", "Be kind.") == [asked], "no system message is the one that it was trained with"
    assert prompt(None, "Be kind.") == prompt(None, None) == [asked]
    long, longest = "Be short,\nand polite ... " * 40, "Be short. " * 820
    assert prompt(long, long) == [system(long), asked]
    assert prompt(longest, longest) == [system(f"{longest[:200]}...", is_whole=False), asked]
    assert prompt("Wait...", "Wait...") == [system("Wait..."), asked]
    assert datasets.example_prompt(platform, tenant.id, "ds_gone") == []


def test_the_prompt_of_a_dataset_with_an_earlier_report_has_what_its_first_rows_show(platform: Platform, tenant: Tenant) -> None:
    rows = [{"row": n, "messages": [{"role": "system", "content": "Be short. Be..."}, {"role": "user", "content": "Hi"}]} for n in (1, 2)]
    with platform.engine.begin() as conn:
        add_dataset(conn, tenant.id, "ds_before", now=platform.clock())
        conn.execute(sa.update(datasets_table).where(datasets_table.c.id == "ds_before").values(report={"first_rows": rows}))
    system, user = datasets.example_prompt(platform, tenant.id, "ds_before")
    assert (system.content, system.is_whole) == ("Be short. Be...", False)
    assert (user.content, user.is_whole) == ("Hi", True)


def stored_text(platform: Platform, tenant: Tenant, dataset: str, tmp_path: Path) -> str:
    target = tmp_path / "rows.parquet"
    platform.objects.get_file(f"tenants/{tenant.id}/datasets/{dataset}/rows.parquet", target)
    return "\n".join(pq.read_table(target).column("example").to_pylist())


def test_policies_of_an_upload_by_the_openai_client_shape_the_dataset(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    path = with_addresses(write_chat_rows(120))
    plain = client.files.create(file=path, purpose="fine-tune")
    spread = client.files.create(file=path, purpose="fine-tune", extra_body={"policies": {"pii": "redact", "toxicity_threshold": 0.8}})
    as_text = client.files.create(file=path, purpose="fine-tune", extra_body={"policies": '{"pii": "redact", "toxicity_threshold": 0.8}'})
    assert spread.policies == as_text.policies == {"pii": "redact", "toxicity_threshold": 0.8}
    assert spread.dataset_id == as_text.dataset_id != plain.dataset_id
    assert "jane.doe@example.com" in stored_text(platform, tenant, plain.dataset_id, tmp_path)
    redacted = stored_text(platform, tenant, spread.dataset_id, tmp_path)
    assert "jane.doe@example.com" not in redacted
    assert "[EMAIL]" in redacted


@pytest.mark.parametrize(
    "policies",
    ["pii=redact", '["pii"]', '{"pii": "perhaps"}', '{"nothing": "warn"}', '{"min_examples": 1}', '{"contamination_threshold": 7}'],
)
def test_policies_that_cannot_be_read_are_refused_before_anything_is_stored(
    ft: FtClient, api_url: str, api_key: str, policies: str
) -> None:
    answer = httpx.post(
        f"{api_url}/v1/files",
        headers={"authorization": f"Bearer {api_key}"},
        data={"purpose": "fine-tune", "policies": policies},
        files={"file": ("a.jsonl", b"{}\n")},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_policy")
    assert ft.files.list().all() == []


def test_more_examples_than_the_tier_allows_are_refused(platform: Platform, ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    made, _ = tenants.create(platform, "free-tier", tier="free")
    assert limits(platform, made.id)["max_examples"] == tiers.TIERS["free"].max_examples == 1_000_000
    uploaded = ft.files.create(write_chat_rows(120))
    assert ft.datasets.report(uploaded["id"])["policies"]["max_examples"] == 10_000_000


def test_a_dataset_is_listed_shown_and_reported(ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    first = ft.files.create(write_chat_rows(120), model=MODEL)
    second = ft.files.create(write_chat_rows(130, salt="?", name="other.jsonl"))
    assert [d["id"] for d in ft.datasets.list().all()] == [second["dataset_id"], first["dataset_id"]]
    shown = ft.datasets.retrieve(first["dataset_id"])
    assert (shown["object"], shown["name"], shown["version"], shown["format"]) == ("dataset", "support", 1, "chat")
    assert (shown["row_count"], shown["dedup_removed"], shown["review"]) == (ft.datasets.report(first["id"])["examples"], 0, "none")
    assert shown["token_count"] > 1000
    assert ft.datasets.retrieve(second["dataset_id"])["token_count"] is None, "no model was named, so nobody counted"
    assert ft.datasets.report(first["dataset_id"])["model"]["id"] == MODEL
    with pytest.raises(NotFound, match="no dataset"):
        ft.datasets.retrieve("ds_none")


def test_a_report_is_a_page_for_those_who_ask_for_one(ft: FtClient, pages: httpx.Client, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    path.write_text(path.read_text() + '{"messages": [{"role": "<script>alert(1)</script>", "content": "x"}]}\n')
    refused = ft.files.create(path)
    answer = pages.get(f"/v1/datasets/{refused['id']}/report")
    assert answer.headers["content-type"].startswith("text/html")
    assert "not valid" in answer.text
    assert "invalid_role" in answer.text
    assert "<svg" in answer.text
    assert "<script" not in answer.text, "what a file holds is never markup"
    assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in answer.text
    assert pages.get(f"/v1/datasets/{refused['id']}/report", headers={"accept": "*/*"}).json()["valid"] is False


def test_a_dataset_held_back_for_review_trains_only_once_it_is_approved(
    ft: FtClient, platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    suite = tmp_path / "quiz.jsonl"
    long = "Which of the many rivers that cross the wide northern plain is the longest one of all of them today?"
    suite.write_text(json.dumps({"question": long}) + "\n")
    ft.suites.create(suite, name="quiz", field="question")
    path = write_chat_rows(120)
    leaked = {"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "The grey one."}]}
    path.write_text(path.read_text() + json.dumps(leaked) + "\n")
    file = ft.files.create(path, policies={"contamination": "review"})
    assert file["status"] == "processed"
    held = ft.datasets.retrieve(file["dataset_id"])
    assert (held["review"], held["contamination_flagged"], held["approved_by"]) == ("pending", 1, None)
    with pytest.raises(InvalidRequest, match=r"approve it with POST /v1/datasets/ds_\w+/approve") as refused:
        ft.jobs.create(model=MODEL, training_file=file["id"])
    assert refused.value.code == "dataset_needs_review"
    reader = tenants.create_key(platform, tenant.id, name="reader", scopes=["read"])
    approved = ft.datasets.approve(file["dataset_id"])
    assert (approved["review"], approved["approved_by"]) == ("approved", approved["approved_by"])
    assert approved["approved_by"].startswith("key_") and approved["approved_by"] != reader.id
    assert ft.datasets.approve(file["dataset_id"])["approved_at"] == approved["approved_at"]
    assert ft.jobs.create(model=MODEL, training_file=file["id"])["state"] == "validating"


def test_approval_needs_a_key_that_may_write(platform: Platform, tenant: Tenant, api_url: str) -> None:
    reader = tenants.create_key(platform, tenant.id, name="reader", scopes=["read"])
    answer = httpx.post(f"{api_url}/v1/datasets/ds_1/approve", headers={"authorization": f"Bearer {reader.secret}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")


def test_a_preview_shows_what_is_trained(ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    file = ft.files.create(write_chat_rows(120))
    for subject in (file["id"], file["dataset_id"]):
        shown = ft.datasets.preview(subject, model=MODEL, num_examples=2)["data"]
        assert len(shown) == 2
        assert "What is 0 plus 0?" in json.dumps(shown[0])
    assert ft.datasets.preview(file["id"], model=MODEL, num_examples=1, max_seq_len=8)["data"][0]["truncated"] is True
    for wrong in ({"num_examples": 0}, {"num_examples": 101}, {"max_seq_len": 100_000}):
        with pytest.raises(InvalidRequest) as refused:
            ft.datasets.preview(file["id"], model=MODEL, **wrong)
        assert refused.value.code == "invalid_limit"


def test_an_estimate_rests_on_counted_tokens_where_they_were_counted(ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    counted, plain = ft.files.create(path, model=MODEL), ft.files.create(path)
    exact = ft.jobs.estimate(model=MODEL, training_file=counted["id"], hyperparameters={"n_epochs": 3})
    sampled = ft.jobs.estimate(model=MODEL, training_file=plain["id"], hyperparameters={"n_epochs": 3})
    assert exact["tokens"]["counted"] and sampled["tokens"]["counted"], "120 rows are all looked at"
    assert "counted at validation" in exact["tokens"]["how"]
    assert exact["tokens"]["per_epoch"] == sampled["tokens"]["per_epoch"] > 1000
    assert exact["tokens"]["total"] == 3 * exact["tokens"]["per_epoch"]
    assert exact["total_steps"] > 0 and exact["gpu_hours"] > 0 and exact["price_micros"] > 0
    assert exact["seconds_to_start"] == 0, "nothing is ahead of it"
    assert exact["seconds_to_finish"] == pytest.approx(exact["gpu_hours"] * 3600, abs=1)
    assert len(exact["assumptions"]) >= 5
    assert any(line.startswith("learning rate: ") and " steps of warm-up, then " in line for line in exact["assumptions"])
    assert ft.jobs.list().all() == [], "an estimate submits nothing"


def test_an_estimate_warns_of_steps_that_are_too_few_to_change_a_model(ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    file = ft.files.create(write_chat_rows(120))["id"]

    def estimated(**hyperparameters: Any) -> tuple[int, list[str]]:
        found = ft.jobs.estimate(model=MODEL, training_file=file, hyperparameters=hyperparameters)
        return found["total_steps"], [line for line in found["assumptions"] if "barely change a model" in line]

    steps, warnings = estimated(batch_size=16)
    assert steps < 100
    assert warnings == [f"{steps} steps of 16 are fewer than 100, and barely change a model: add rows, raise n_epochs, or lower batch_size"]
    enough, none = estimated()
    assert (enough >= 100, none) == (True, [])
    assert estimated(batch_size=16, max_steps=3) == (3, []), "a number of steps that was asked for needs no warning"


def test_an_estimate_says_what_the_job_makes_and_whether_vllm_can_serve_it(ft: FtClient, write_chat_rows: Callable[..., Path]) -> None:
    file = ft.files.create(write_chat_rows(120))["id"]

    def result(**hyperparameters: Any) -> tuple[str, int | None, str]:
        found = ft.jobs.estimate(model=MODEL, training_file=file, hyperparameters=hyperparameters)["result"]
        return found["type"], found["rank"], found["serving"]

    assert result(rank=8, use_rslora=True) == ("lora_adapter", 8, "shared_server")
    assert result(rank=8, init_lora_weights="pissa") == ("lora_adapter", 16, "shared_server")
    assert result(rank=8, use_dora=True) == ("lora_adapter", 8, "none")
    assert (
        "ft export NAME --format merged"
        in ft.jobs.estimate(model=MODEL, training_file=file, hyperparameters={"use_dora": True})["result"]["detail"]
    )


def test_an_estimate_goes_by_its_other_names(ft: FtClient, api_url: str, api_key: str, write_chat_rows: Callable[..., Path]) -> None:
    body = {"model": MODEL, "training_file": ft.files.create(write_chat_rows(120))["id"]}
    headers = {"authorization": f"Bearer {api_key}"}
    paths = ("fine_tuning/jobs/estimate", "fine_tuning/jobs/estimate-price", "fine-tunes/estimate-price")
    prices = [httpx.post(f"{api_url}/v1/{path}", json=body, headers=headers).json()["price_micros"] for path in paths]
    assert len(set(prices)) == 1


def test_what_cannot_be_estimated_has_a_reason(
    ft: FtClient, platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    file = ft.files.create(write_chat_rows(120))
    with pytest.raises(NotFound) as unknown:
        ft.jobs.estimate(model="nobody", training_file=file["id"])
    assert unknown.value.code == "model_not_found"
    small = ft.files.create(write_chat_rows(9, name="small.jsonl"))
    with pytest.raises(InvalidDataset):
        ft.jobs.estimate(model=MODEL, training_file=small["id"])
    with platform.engine.begin() as conn:
        conn.execute(sa.update(files).where(files.c.id == file["id"]).values(status="uploaded"))
    with pytest.raises(Conflict) as early:
        ft.jobs.estimate(model=MODEL, training_file=file["id"])
    assert early.value.code == "file_not_validated"


def test_a_large_upload_is_validated_behind_its_answer_and_streams_how_far_it_is(ft: FtClient, tmp_path: Path) -> None:
    draw, path = random.Random(5), tmp_path / "large.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as out:
        for i in range(3200):
            turns = [("user", f"{i} {draw.randbytes(700).hex()}"), ("assistant", f"It is {i}.")]
            out.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    made = ft.files.create(path)
    assert (made["status"], made["report_url"]) == ("uploaded", None)
    events = list(ft.files.events(made["id"]))
    assert [e["status"] for e in events[:-1]] == ["uploaded"] * (len(events) - 1)
    assert events[-1]["status"] == "processed"
    assert events[-1]["dataset_id"].startswith("ds_")
    assert any(e["progress"] and e["progress"]["stage"] for e in events)
    assert ft.files.retrieve(made["id"])["progress"] is None
    assert next(ft.files.events(made["id"]))["status"] == "processed", "a stream that begins late tells the end"
    with pytest.raises(Conflict) as refused:
        ft.files.validate(made["id"])
    assert refused.value.code == "file_is_validated"
    with pytest.raises(NotFound):
        list(ft.files.events("file-none"))


def test_an_upload_that_another_process_reads_is_waited_for(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    tiny, bigger = write_chat_rows(120), write_chat_rows(3000, name="bigger.jsonl")
    assert bigger.stat().st_size > HERE_BYTES
    packed = ("packed.jsonl.gz", gzip.compress(tiny.read_bytes()))
    assert [client.files.create(file=file, purpose="fine-tune").status for file in (packed, bigger)] == ["processed"] * 2


def uploaded_rows(ft: FtClient, path: Path, rows: list[dict[str, object]], **options: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = ft.files.create(path, **options)
    assert file["status"] == "processed", file["status_details"]
    return file


def chat(question: str, answer: str = "Nine of them.") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_an_estimate_counts_escaped_control_tokens_as_the_pack_does(ft: FtClient, tmp_path: Path) -> None:
    rows = [chat(f"What is <|im_start|> number {i}, and what is it for?") for i in range(120)]
    escaped = uploaded_rows(ft, tmp_path / "escaped.jsonl", rows, policies={"control_tokens": "escape"})
    counted = uploaded_rows(ft, tmp_path / "counted.jsonl", rows, policies={"control_tokens": "escape"}, model=MODEL)
    one, other = (ft.jobs.estimate(model=MODEL, training_file=file["id"]) for file in (escaped, counted))
    assert one["tokens"]["per_epoch"] == other["tokens"]["per_epoch"] > 1000
    assert "tokenized" in one["tokens"]["how"] and "counted at validation" in other["tokens"]["how"]
    plain = uploaded_rows(ft, tmp_path / "plain.jsonl", rows)
    with pytest.raises(InvalidRequest) as refused:
        ft.jobs.estimate(model=MODEL, training_file=plain["id"])
    assert refused.value.code == "control_token_in_content"


def test_an_estimate_leaves_out_what_the_pack_leaves_out(ft: FtClient, tmp_path: Path) -> None:
    short = [chat(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(120)]
    over = [chat(f"Tell me tale {i}.", " ".join(f"word{i}x{j}" for j in range(400))) for i in range(20)]
    cut, dropped, rejected = (
        uploaded_rows(ft, tmp_path / f"{policy}.jsonl", short + over, policies={"over_long": policy, "near_duplicates": "off"})
        for policy in ("truncate", "drop", "reject")
    )
    alone = uploaded_rows(ft, tmp_path / "alone.jsonl", short, policies={"near_duplicates": "off"})
    tokens = {f["id"]: ft.jobs.estimate(model=MODEL, training_file=f["id"])["tokens"]["per_epoch"] for f in (cut, dropped, alone)}
    assert tokens[dropped["id"]] == pytest.approx(tokens[alone["id"]], rel=0.1), "the share that is held out differs a little"
    assert tokens[cut["id"]] > 1.5 * tokens[dropped["id"]]
    with pytest.raises(InvalidRequest) as refused:
        ft.jobs.estimate(model=MODEL, training_file=rejected["id"])
    assert refused.value.code == "example_too_long"


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_answers_that_are_compared_are_not_imitated_nor_priced(
    ft: FtClient, write_chat_rows: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    answers: dict[str, Any] = {"preference": {"chosen": "Yes.", "rejected": "No."}, "kto": {"completion": "Perhaps.", "label": True}}[kind]
    rows = [{"prompt": f"Is {i} plus {i} an even number, as {2 * i} is?", **answers} for i in range(120)]
    file = uploaded_rows(ft, tmp_path / "rows.jsonl", rows, policies={"near_duplicates": "off"})
    assert ft.datasets.retrieve(file["dataset_id"])["format"] == kind
    good = ft.files.create(write_chat_rows(120))
    for call in (ft.jobs.estimate, ft.jobs.create):
        with pytest.raises(InvalidRequest, match=f"holds {kind} rows, which method sft cannot train on") as refused:
            call(model=MODEL, training_file=file["id"])
        assert (refused.value.code, refused.value.param) == ("preference_rows", "training_file")
    with pytest.raises(InvalidRequest) as held_out:
        ft.jobs.create(model=MODEL, training_file=good["id"], validation_file=file["id"])
    assert (held_out.value.code, held_out.value.param) == ("preference_rows", "validation_file")
    assert ft.jobs.list().all() == []


def test_rows_with_tools_are_refused_for_a_base_whose_template_leaves_them_out(ft: FtClient, tmp_path: Path) -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    rows: list[Any] = [chat(f"How are you on day {i}?", f"Well on day {i}.") for i in range(120)]
    for at in (4, 9):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "weather", "arguments": {"city": f"City {at}"}}}
        rows[at] = {
            "messages": [{"role": "user", "content": f"Weather in {at}?"}, {"role": "assistant", "tool_calls": [call]}],
            "tools": [tool],
        }
    policies = {"near_duplicates": "off"}
    file = uploaded_rows(ft, tmp_path / "rows.jsonl", rows, policies=policies)
    report = ft.datasets.report(file["dataset_id"])
    assert report["valid"] and report["stats"]["tools"]["calls"] == {"count": 2, "first": [5, 10]}
    for call in (ft.jobs.estimate, ft.jobs.create):
        with pytest.raises(InvalidRequest, match=r"leaves out .* of 2 rows \(5, 10\); choose a base model whose") as refused:
            call(model=MODEL, training_file=file["id"])
        assert (refused.value.code, refused.value.param) == ("tools_not_rendered", "training_file")
    with pytest.raises(InvalidRequest) as shown:
        ft.jobs.preview(model=MODEL, training_file=file["id"], num_examples=8)
    assert shown.value.code == "tools_not_rendered"
    dropping = uploaded_rows(ft, tmp_path / "drop.jsonl", rows, policies={**policies, "bad_rows": "drop"})
    assert ft.jobs.estimate(model=MODEL, training_file=dropping["id"])["tokens"]["per_epoch"] > 0
    assert ft.jobs.list().all() == []


def test_suites_go_over_the_wire(ft: FtClient, tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text('{"question": "How many sheep are on the hill?"}\n')
    assert ft.suites.create(path, name="herd", field="question")["num_items"] == 1
    assert [(s["name"], s["owner"]) for s in ft.suites.list().all()] == [("gsm8k", "platform"), ("herd", "tenant")]
    assert ft.suites.delete("herd")["deleted"] is True
    with pytest.raises(NotFound) as gone:
        ft.suites.delete("herd")
    assert gone.value.code == "suite_not_found"


def test_an_import_without_a_hub_is_refused_and_leaves_nothing(ft: FtClient) -> None:
    with pytest.raises(InvalidRequest) as disabled:
        ft.datasets.import_from_hub(hub_id="hf://acme/tickets@" + "a" * 40)
    assert disabled.value.code == "hub_disabled"
    with pytest.raises(InvalidRequest) as wrong:
        ft.datasets.import_from_hub(hub_id="hf://acme/tickets@" + "a" * 40, policies={"pii": "perhaps"})
    assert wrong.value.code == "invalid_policy"
    assert ft.files.list().all() == []


def test_an_estimate_counts_answers_that_are_cut_off_and_is_refused_without_any_other(ft: FtClient, tmp_path: Path) -> None:
    def estimate(name: str, every: int, **hyperparameters: Any) -> str:
        rows = [{"prompt": f"{i} " * (1 if i % every else 300), "completion": f"answer {i}"} for i in range(24)]
        file = uploaded_rows(ft, tmp_path / name, rows, policies={"near_duplicates": "off"})
        found = ft.jobs.estimate(model=MODEL, training_file=file["id"], hyperparameters={"max_seq_len": 128, **hyperparameters})
        return str(found["assumptions"][0])

    assert "of which max_seq_len 128 cuts off 12 whole answers (answer_cut_off)" in estimate("half.jsonl", 2)
    assert "cuts off" not in estimate("half.jsonl", 2, train_on_inputs=True)
    with pytest.raises(InvalidRequest, match="max_seq_len 128 cuts off the whole answer of 24 of 24 rows") as refused:
        estimate("all.jsonl", 1)
    assert refused.value.code == "answer_cut_off"
