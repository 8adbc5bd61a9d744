"""Contamination lists: the operator's for all, each tenant's own for itself, one index for a set of them."""

from __future__ import annotations

import io
import json
import shutil
import threading
import uuid
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from control_plane.datasets import orphaned_objects, suites
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core import layout
from core.errors import Conflict, FtError, InvalidRequest, NotFound, QuotaExceeded, Unavailable
from engine.data.checks.contamination.benchmarks import BENCHMARKS
from engine.data.checks.contamination.shipped_suites import shipped_suites
from resources.object_store import LocalObjectStore

QUESTION = "How many of the {} sheep that the old shepherd counted on the hill before the storm came back to the valley?"


def suite(*questions: str, field: str = "question") -> io.BytesIO:
    return io.BytesIO("".join(json.dumps({field: q}) + "\n" for q in questions).encode())


def add(platform: Platform, tenant: str | None, name: str, *questions: str) -> None:
    suites.add(platform, tenant, suite(*questions), name=name, filename=f"{name}.jsonl", field="question")


def flagged(platform: Platform, tenant: str, path: Path, questions: Sequence[str]) -> dict[str, int]:
    """Rows of each suite that a dataset of `path` and `questions` is found to hold."""
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "Nine."}]} for q in questions]
    path.write_text(path.read_text() + "".join(json.dumps(r) + "\n" for r in rows))
    with path.open("rb") as stream:
        made = uploaded_files.create(platform, tenant, stream, filename=path.name, purpose="fine-tune", policies={"contamination": "warn"})
    file = uploaded_files.validate(platform, made.id)
    assert file.status == "processed", file.status_details
    found: dict[str, int] = file.report["stats"]["contamination"]["suites"]
    return {name: count for name, count in found.items() if count}


def test_datasets_are_held_against_the_operators_suites_and_the_tenants_own(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    platform = fresh_platform
    one, other = (tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")[0].id for _ in range(2))
    add(platform, None, "gsm8k", QUESTION.format("white"))
    add(platform, one, "gsm8k", QUESTION.format("black").replace("shepherd", "herdsman with the dog"))
    asked = [QUESTION.format("white"), QUESTION.format("black").replace("shepherd", "herdsman with the dog")]
    assert flagged(platform, one, write_chat_rows(120), asked) == {"gsm8k": 1, "own/gsm8k": 1}
    assert set(flagged(platform, other, write_chat_rows(121), asked)) == {"gsm8k"}, "another tenant's suite is not looked for"
    assert [(r.name, r.tenant_id, r.owner) for r in suites.list_suites(platform, one)] == [
        ("gsm8k", None, "operator"),
        ("gsm8k", one, "tenant"),
    ], "an operator's suite takes the place of the one that ships"
    assert [r.tenant_id for r in suites.list_suites(platform, other)] == [None]


def test_a_tenants_suite_takes_no_place_of_one_that_ships(fresh_platform: Platform) -> None:
    tenant = tenants.create(fresh_platform, "namesake")[0].id
    (shipped,) = shipped_suites()
    add(fresh_platform, tenant, shipped.name, QUESTION.format("white"))
    assert [(row.name, row.tenant_id) for row in suites.list_suites(fresh_platform, tenant)] == [
        (shipped.name, None),
        (shipped.name, tenant),
    ]


@pytest.mark.slow
def test_an_index_is_built_once_for_a_set_and_found_again_by_another_machine(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    add(platform, tenant.id, "quiz", QUESTION.format("grey"))
    first = suites.index_directory(platform, tenant.id)
    assert first is not None
    stamps = {p.name: p.stat().st_mtime_ns for p in first.iterdir()}
    assert suites.index_directory(platform, tenant.id) == first
    assert {p.name: p.stat().st_mtime_ns for p in first.iterdir()} == stamps
    elsewhere = replace(platform, settings=replace(platform.settings, home=tmp_path))
    fetched = suites.index_directory(elsewhere, tenant.id)
    assert fetched is not None and fetched != first
    assert {p.name: p.read_bytes() for p in fetched.iterdir()} == {p.name: p.read_bytes() for p in first.iterdir()}
    add(platform, tenant.id, "second", QUESTION.format("brown"))
    assert suites.index_directory(platform, tenant.id) != first


@pytest.mark.slow
def test_another_set_of_suites_makes_another_dataset(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    def dataset() -> str:
        with write_chat_rows(120).open("rb") as stream:
            made = uploaded_files.create(platform, tenant.id, stream, filename="support.jsonl", purpose="fine-tune")
        return str(uploaded_files.validate(platform, made.id).dataset_id)

    before = dataset()
    add(platform, tenant.id, "quiz", QUESTION.format("red"))
    assert dataset() != before
    suites.remove(platform, tenant.id, "quiz")
    assert dataset() == before


def test_a_name_is_taken_once_and_free_again_when_it_is_removed(platform: Platform, tenant: Tenant) -> None:
    add(platform, tenant.id, "quiz", QUESTION.format("one"))
    with pytest.raises(Conflict) as taken:
        add(platform, tenant.id, "quiz", QUESTION.format("two"))
    assert taken.value.code == "suite_exists"
    keys = [o.key for o in platform.objects.list(f"tenants/{tenant.id}/suites")]
    assert len(keys) == 1, "the refused one left nothing"
    suites.remove(platform, tenant.id, "quiz")
    assert list(platform.objects.list(f"tenants/{tenant.id}/suites")) == []
    with pytest.raises(NotFound):
        suites.remove(platform, tenant.id, "quiz")
    add(platform, tenant.id, "quiz", QUESTION.format("two"))


def test_a_tenant_removes_no_suite_of_the_operator(platform: Platform, tenant: Tenant) -> None:
    name = f"op-{uuid.uuid4().hex[:8]}"
    add(platform, None, name, QUESTION.format("own"))
    with pytest.raises(NotFound) as refused:
        suites.remove(platform, tenant.id, name)
    assert refused.value.code == "suite_not_found"
    suites.remove(platform, None, name)


@pytest.mark.parametrize(
    ("data", "field", "says"),
    [
        (b'{"question": "a"}\n{"answer": "b"}\n', "question", "row 2"),
        (b'{"question": 7}\n', "question", "row 1"),
        (b"", "question", "empty"),
        (b'{"question": "a"}\n', " , ", "field is empty"),
        (b'{"question": "a"}\n{"question": \n', "question", r"row 2 of bad.jsonl cannot be read: .*\(truncated_json\)"),
        (b'{"question": "a", "question": "b"}\n', "question", r"row 1 of bad.jsonl cannot be read: .*\(duplicate_key\)"),
        (b'{"question": "a"}\n', "a,b,c,d,e,f,g,h,i", "names 9 fields, and at most 8"),
    ],
)
def test_a_file_that_is_no_suite_is_refused(platform: Platform, tenant: Tenant, data: bytes, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        suites.add(platform, tenant.id, io.BytesIO(data), name="bad", filename="bad.jsonl", field=field)
    assert [r for r in suites.list_suites(platform, tenant.id) if r.tenant_id] == []


def test_several_fields_and_lists_of_answers_make_one_item(platform: Platform, tenant: Tenant) -> None:
    row = {"question": "Which one?", "choices": ["this", "that"]}
    made = suites.add(platform, tenant.id, io.BytesIO(json.dumps(row).encode()), name="mc", filename="mc.jsonl", field="question, choices")
    assert json.loads(platform.objects.get_bytes(made.object_key)) == "Which one?\nthis\nthat"


def test_a_field_counts_once_however_often_it_is_named(platform: Platform, tenant: Tenant) -> None:
    made = suites.add(platform, tenant.id, suite("Which?"), name="q", filename="q.jsonl", field="question," * 100_000)
    assert json.loads(platform.objects.get_bytes(made.object_key)) == "Which?"


def test_the_items_of_a_tenant_have_room_for_so_many_bytes_in_all(platform: Platform, tenant: Tenant) -> None:
    def add_bytes(name: str, text: str) -> None:
        suites.add(platform, tenant.id, suite(text), name=name, filename="q.jsonl", field="question", max_bytes=1000)

    add_bytes("first", "x" * 600)
    with pytest.raises(InvalidRequest, match="more than the 397 bytes that are left") as full:
        add_bytes("second", "y" * 400)
    assert full.value.code == "invalid_suite"
    suites.remove(platform, tenant.id, "first")
    add_bytes("second", "y" * 400)


def test_suites_that_are_added_at_once_share_the_room(platform: Platform, tenant: Tenant) -> None:
    def add_bytes(over: Platform, name: str, num: int) -> None:
        suites.add(over, tenant.id, suite("x" * num), name=name, filename="q.jsonl", field="question", max_bytes=1000)

    class Slow(LocalObjectStore):
        """While the items of one suite are stored, another suite is added."""

        def put_file(self, key: str, path: Path) -> None:
            super().put_file(key, path)
            add_bytes(platform, f"beside-{beside}", beside)

    slow = replace(platform, objects=Slow(platform.settings.home / "objects"))
    beside = 600
    with pytest.raises(InvalidRequest, match="more than the 397 bytes that are left"):
        add_bytes(slow, "late", 600)
    beside = 100
    add_bytes(slow, "fits", 200)
    kept = {s.name: s.object_key for s in suites.list_suites(platform, tenant.id) if s.tenant_id}
    assert set(kept) == {"beside-600", "beside-100", "fits"}
    stored = {o.key for o in platform.objects.list(f"{layout.tenant_prefix(tenant.id)}/suites")}
    assert stored == set(kept.values()), "the items of the refused one are gone"


def test_a_suite_whose_object_cannot_be_deleted_now_is_deleted_later(platform: Platform, tenant: Tenant) -> None:
    class Away(LocalObjectStore):
        def delete(self, key: str) -> None:
            raise Unavailable("the object store does not answer")

    add(platform, tenant.id, "quiz", QUESTION.format("white"))
    (key,) = (s.object_key for s in suites.list_suites(platform, tenant.id) if s.tenant_id)
    away = replace(platform, objects=Away(platform.settings.home / "objects"))
    with pytest.raises(Conflict):
        add(away, tenant.id, "quiz", QUESTION.format("black"))  # its name is taken, and its items stay for now
    suites.remove(away, tenant.id, "quiz")
    prefix = key.rpartition("/")[0]
    assert len(list(platform.objects.list(prefix))) == 2
    orphaned_objects.remove_due(replace(platform, clock=lambda: platform.clock() + orphaned_objects.WAITS))
    assert not list(platform.objects.list(prefix))


def test_a_tenant_has_a_bounded_number_of_suites(platform: Platform, tenant: Tenant) -> None:
    for i in range(suites.MAX_SUITES):
        add(platform, tenant.id, f"s{i}", f"question {i}")
    with pytest.raises(QuotaExceeded) as full:
        add(platform, tenant.id, "one-more", "question")
    assert full.value.code == "too_many_suites"
    suites.remove(platform, tenant.id, "s3")
    add(platform, tenant.id, "one-more", "question")


def test_a_suite_removed_while_the_index_is_built_refuses_no_upload(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    tenant = tenants.create(fresh_platform, "hasty")[0].id
    add(fresh_platform, tenant, "stays", QUESTION.format("white"))
    add(fresh_platform, tenant, "goes", QUESTION.format("black"))
    removed: list[str] = []

    class Hasty(LocalObjectStore):
        """Its tenant removes a suite as soon as the first one is read."""

        def get_file(self, key: str, path: Path) -> None:
            if "/suites/" in key and not removed:
                removed.append(key)
                suites.remove(fresh_platform, tenant, "goes")
            super().get_file(key, path)

    hasty = replace(fresh_platform, objects=Hasty(fresh_platform.settings.home / "objects"))
    assert set(flagged(hasty, tenant, write_chat_rows(120), [QUESTION.format("white")])) == {"own/stays"}
    assert len(removed) == 1


def test_no_index_is_built_by_the_process_that_took_an_upload(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    add(platform, tenant.id, "quiz", QUESTION.format("blue"))
    path = write_chat_rows(120)
    statuses = []
    for _ in range(2):
        with path.open("rb") as stream:
            made = uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune")
        statuses.append(made.status)
        assert uploaded_files.validate(platform, made.id).status == "processed"
    assert statuses == ["uploaded", "processed"]
    tight = replace(platform, settings=replace(platform.settings, validation_memory_bytes=1, home=path.parent))
    with pytest.raises(FtError, match="contamination lists needed"):
        suites.index_directory(replace(tight, objects=LocalObjectStore(copied(platform, path.parent))), tenant.id)


def archives_of_concurrent_calls(platform: Platform, tenants_of_calls: Sequence[str]) -> tuple[set[Path], list[str]]:
    """Ask for an index in a thread for each tenant, all at the same time; returns the archives and the codes of refusals."""
    together = threading.Barrier(len(tenants_of_calls))

    def call(tenant: str) -> Path | str:
        together.wait()
        try:
            return suites.index_archive(platform, tenant)
        except Unavailable as refused:
            return refused.code

    with ThreadPoolExecutor(len(tenants_of_calls)) as threads:
        found = list(threads.map(call, tenants_of_calls))
    return {one for one in found if isinstance(one, Path)}, [one for one in found if isinstance(one, str)]


def test_index_is_built_for_one_of_several_downloads_at_once_and_then_kept(platform: Platform, tenant: Tenant) -> None:
    add(platform, tenant.id, "quiz", QUESTION.format("violet"))
    made, refused = archives_of_concurrent_calls(platform, [tenant.id] * 5)
    assert (len(made), refused) == (1, ["index_being_built"] * 4)
    (first,) = made
    stat = first.stat()
    again, refused = archives_of_concurrent_calls(platform, [tenant.id] * 5)
    assert (again, refused, first.stat().st_ino) == (made, [], stat.st_ino), "the same file, not another one"
    with zipfile.ZipFile(first) as archive:
        index = suites.index_directory(platform, tenant.id)
        assert {name: archive.read(name) for name in archive.namelist()} == {
            path.name: path.read_bytes() for path in index.iterdir() if path.name != suites.DONE
        }
    suites.remove(platform, tenant.id, "quiz")
    assert suites.index_archive(platform, tenant.id) != first, "of another set of lists"


def test_builds_for_downloads_are_limited_over_all_tenants(platform: Platform) -> None:
    every = [tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")[0].id for _ in range(suites.MAX_BUILDS + 2)]
    for one in every:
        add(platform, one, "quiz", QUESTION.format("pink"))
    made, refused = archives_of_concurrent_calls(platform, every)
    assert (len(made), refused) == (suites.MAX_BUILDS, ["index_being_built"] * 2)
    assert all(suites.index_archive(platform, one).exists() for one in every), "once the others are done"


def copied(platform: Platform, directory: Path) -> Path:
    """The objects without any index."""
    target = directory / "objects"
    shutil.copytree(platform.settings.home / "objects", target, ignore=shutil.ignore_patterns("suite_indexes"))
    return target


SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"


def gsm8k(part: str, count: int) -> list[dict[str, str]]:
    file = SHARED_DATA / f"gsm8k_{part}.jsonl"
    if not file.is_file():
        pytest.skip(f"no local copy of GSM8K in {SHARED_DATA}")
    return [json.loads(line) for line in file.read_text().splitlines()[:count]]


def test_a_fresh_platform_finds_benchmark_questions_and_names_what_it_compared_with(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    tenant = tenants.create(fresh_platform, "fresh")[0].id
    path = write_chat_rows(120)
    planted = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]} for r in gsm8k("test", 3)
    ]
    trained = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in gsm8k("train", 50)
    ]
    path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in [*planted, *trained]))
    with path.open("rb") as stream:
        made = uploaded_files.create(fresh_platform, tenant, stream, filename=path.name, purpose="fine-tune")
    assert made.status == "processed", "no index has to be built for a tenant without suites"
    report = uploaded_files.get(fresh_platform, tenant, made.id).report
    assert report["stats"]["contamination"] == {"flagged": 3, "suites": {"gsm8k": 3}, "checked": ["gsm8k"]}
    assert [f["row"] for f in report["flagged"] if f["code"] == "contaminated"] == [121, 122, 123]
    with path.open("rb") as stream:
        made = uploaded_files.create(
            fresh_platform, tenant, stream, filename=path.name, purpose="fine-tune", policies={"contamination": "off"}
        )
    assert made.report["stats"]["contamination"] == {"flagged": None, "suites": {}, "checked": []}


def test_suites_of_ones_own_are_counted_beside_those_that_ship(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    tenant = tenants.create(fresh_platform, "both")[0].id
    add(fresh_platform, tenant, "quiz", QUESTION.format("white"))
    asked = [QUESTION.format("white"), *(row["question"] for row in gsm8k("test", 2))]
    assert flagged(fresh_platform, tenant, write_chat_rows(120), asked) == {"gsm8k": 2, "own/quiz": 1}


QUESTION_ROWS: dict[str, list[dict[str, object]]] = {
    "mmlu": [
        {"question": "Which?", "subject": "anatomy", "choices": ["this one", "that one"], "answer": 1},
        {"question": "Which?", "A": "this one", "B": "that one", "C": "both", "D": "none", "answer": "B"},
    ],
    "hellaswag": [{"ind": 4, "ctx_a": "A man", "ctx": "A man sits.", "endings": ["He stands.", "He sings."], "label": "0"}],
    "arc_easy": [{"id": "x", "question": "Which?", "choices": {"text": ["this", "that"], "label": ["A", "B"]}, "answerKey": "A"}],
    "arc_challenge": [
        {"id": "x", "question": {"stem": "Which?", "choices": [{"text": "this", "label": "A"}, {"text": "that", "label": "B"}]}},
        {"questionID": "x", "question": "Which? (A) this (B) that", "AnswerKey": "A"},
    ],
    "truthfulqa": [
        {"question": "Why?", "best_answer": "So.", "correct_answers": ["So.", "Because."], "incorrect_answers": ["No."]},
        {"question": "Why?", "mc1_targets": {"choices": ["So.", "No."], "labels": [1, 0]}},
        {"Type": "x", "Question": "Why?", "Best Answer": "So.", "Correct Answers": "So; because"},
    ],
}
EXPECTED = {
    "mmlu": ["Which?\nthis one\nthat one", "Which?\nthis one\nthat one\nboth\nnone"],
    "hellaswag": ["A man sits.\nHe stands.\nHe sings."],
    "arc_easy": ["Which?\nthis\nthat"],
    "arc_challenge": ["Which?\nthis\nthat", "Which? (A) this (B) that"],
    "truthfulqa": ["Why?\nSo.\nSo.\nBecause.", "Why?\nSo.\nNo.", "Why?\nSo.\nSo; because"],
}


def test_every_known_benchmark_is_tried() -> None:
    assert set(QUESTION_ROWS) == set(EXPECTED) == set(BENCHMARKS)


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, rows in QUESTION_ROWS.items() for form in range(len(rows))])
def test_benchmarks_are_registered_in_the_forms_in_which_they_are_published(
    fresh_platform: Platform, name: str, form: int, container: str
) -> None:
    row = QUESTION_ROWS[name][form]
    if container == "parquet":
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([row]), buffer)
        buffer.seek(0)
    else:
        buffer = io.BytesIO(json.dumps(row).encode() + b"\n")
    made = suites.add_benchmark(fresh_platform, buffer, name=name, filename=f"test.{container}")
    try:
        assert json.loads(fresh_platform.objects.get_bytes(made.object_key)) == EXPECTED[name][form]
        assert (made.name, made.tenant_id) == (name, None)
    finally:
        suites.remove(fresh_platform, None, name)


def test_a_benchmark_in_another_form_is_refused_with_the_forms_that_are_read(fresh_platform: Platform) -> None:
    with pytest.raises(InvalidRequest, match=r"test.jsonl has prompt, options; mmlu needs question,choices or question,A,B,C,D"):
        suites.add_benchmark(fresh_platform, io.BytesIO(b'{"prompt": "a", "options": "b"}\n'), name="mmlu", filename="test.jsonl")
    with pytest.raises(InvalidRequest, match="unknown benchmark 'exam'; choose one of mmlu, hellaswag"):
        suites.add_benchmark(fresh_platform, io.BytesIO(b"{}\n"), name="exam", filename="test.jsonl")


def test_a_suite_that_ships_is_not_replaced_by_its_published_form(fresh_platform: Platform) -> None:
    assert not set(BENCHMARKS) & {suite.name for suite in shipped_suites()}
    row = b'{"question": "How many?", "answer": "<<1+2=3>> #### 3"}\n'
    with pytest.raises(InvalidRequest, match="gsm8k ships with the platform"):
        suites.add_benchmark(fresh_platform, io.BytesIO(row), name="gsm8k", filename="test.jsonl")
