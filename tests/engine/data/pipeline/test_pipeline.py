"""The two passes: what does not depend on blocks, processes or the fast path, and what each policy does."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.pass_progress import PassProgress
from engine.data.checks.contamination.overlap import SuiteIndex
from engine.data.ingest import Policies, load_stored, validate_file
from engine.data.pipeline.block_reader import BlockReader, chat_reader
from engine.data.pipeline.options import BlockOptions
from engine.data.pipeline.pass_one import _blocks
from engine.data.readers.blocks import LineBlock
from engine.data.readers.row_stream import open_rows
from engine.data.schema import canonical
from engine.data.split import part_of
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.examples_of import chat, chat_example

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "si", "to", "vu", "zen") for b in ("ba", "do", "fi", "gar", "hem", "jul")]


def prose(rng: random.Random, num_words: int = 60) -> str:
    return " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(num_words))


def varied_file(path: Path, *, num_rows: int = 600, seed: int = 0) -> Path:
    """Good rows, bad rows of several kinds, exact copies and near copies."""
    rng = random.Random(seed)
    rows: list[Any] = []
    good: list[dict[str, Any]] = []
    for number in range(num_rows):
        kind = rng.random()
        if good and kind < 0.1:
            rows.append(rng.choice(good))
        elif good and kind < 0.2:
            source = rng.choice(good)
            asked, said = (m["content"] for m in source["messages"])
            words = said.split(" ")
            words[rng.randrange(len(words))] = "edited"
            rows.append(chat(asked, " ".join(words)))
        elif kind < 0.25:
            bad = (
                {"messages": []},
                b'{"messages": [{"role"',
                {"messages": [{"role": "bot", "content": "x"}]},
                b'{"a": 1, "a": 2}',
                b"\xff\xfe",
            )
            rows.append(rng.choice(bad))
        else:
            good.append(chat(f"{number} {prose(rng, 20)}", prose(rng)) | ({"id": number} if rng.random() < 0.5 else {}))
            rows.append(good[-1])
    path.write_bytes(
        b"\n".join(r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=rng.random() < 0.5).encode() for r in rows) + b"\n"
    )
    return path


def test_blocks_and_processes_change_nothing(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.jsonl")
    policies = Policies(bad_rows="drop", min_examples=1)
    alone = validate_file(path, filename="a.jsonl", policies=policies, output=tmp_path / "alone.parquet", workers=1, block_bytes=20_000)
    assert alone.report.stats["duplicates"]["exact"] > 20
    assert alone.report.stats["duplicates"]["near"] > 20
    assert alone.report.stats["bad_rows"] > 10
    array = tmp_path / "a.json"
    good = [
        json.loads(line)
        for line in path.read_bytes().splitlines()
        if line.startswith(b'{"messages": [{"role": "user"') and line.endswith(b"}")
    ]
    array.write_text(json.dumps(good))
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write(path.read_bytes())
    shared = validate_file(path, filename="a.jsonl", policies=policies, output=tmp_path / "shared.parquet", workers=2, block_bytes=20_000)
    assert shared == alone == validate_file(path, filename="a.jsonl", policies=policies)
    assert (tmp_path / "shared.parquet").read_bytes() == (tmp_path / "alone.parquet").read_bytes()
    assert validate_file(tmp_path / "a.jsonl.gz", filename="a.jsonl.gz", policies=policies).content_sha256 == alone.content_sha256
    many_blocks = validate_file(
        array, filename="a.json", policies=policies, output=tmp_path / "array.parquet", workers=2, block_bytes=20_000
    )
    assert many_blocks.content_sha256 == alone.content_sha256
    assert [s.split_key for s in load_stored(tmp_path / "array.parquet")] == [s.split_key for s in load_stored(tmp_path / "alone.parquet")]


MESSAGE_TEXTS = (
    '{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}', '{"role": "system", "content": "s"}',
    '{"role": "assistant", "content": "b", "weight": 1}', '{"role": "assistant", "content": "b", "weight": 0}',
    '{"role": "assistant", "content": "  "}', '{"role": "user", "content": "\\ud800"}', '{"role": "user", "content": "x", "role": "user"}',
    '{"role": "tool", "content": "t"}', '{"role": "user", "content": null}', '{"role": "assistant", "content": "b", "name": "n"}',
)  # fmt: skip
EXTRA_TEXTS = (
    '"split": "train"',
    '"split": 1',
    '"messages": 1',
    '"id": 3',
    '"id": null',
    '"chosen": "x"',
    '"rejected": "y"',
    '"system": "s"',
    '"text": "t"',
    '"other": {}',
    '"tools": []',
)
MESSAGES, EXTRA = st.sampled_from(MESSAGE_TEXTS), st.sampled_from(EXTRA_TEXTS)
PIECES = st.sampled_from((*MESSAGE_TEXTS, *EXTRA_TEXTS, '{"messages": [', ", ", "]}", " ", "\t", "}"))


def spelled(messages: list[str], extra: list[str]) -> bytes:
    return ('{"messages": [' + ", ".join(messages) + "]" + "".join(f", {e}" for e in extra) + "}").encode()


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.builds(spelled, st.lists(MESSAGES, max_size=5), st.lists(EXTRA, max_size=2)),
        st.lists(PIECES, max_size=8).map(lambda p: "".join(p).encode()),
    )
)
def test_the_fast_path_reads_what_the_slow_path_reads(line: bytes) -> None:
    def read(fast: bool) -> tuple[Any, ...]:
        result = BlockResult()
        options = BlockOptions(
            scratch=Path(), policies=Policies(), format="chat", extra_fields=("id", "text", "chosen", "rejected", "system")
        )
        reader = BlockReader(options, result)
        if not fast:
            reader._fast = None
        rows = [(r.number, r.byte_offset, canonical(r.example), r.part) for r in reader.lines(LineBlock(first_line=1, offset=0, data=line))]
        return rows, result.errors, result.counts, result.ignored, result.totals

    assert read(fast=True) == read(fast=False)


def test_a_plain_conversation_takes_the_fast_path() -> None:
    ignored: Counter[str] = Counter()
    read = chat_reader(("id", "source"), ignored)
    found = read(json.dumps(chat("a", "b", id=1)).encode(), 7)
    assert found is not None
    assert (found[0].row, found[0].answer, found[1], ignored) == (7, "b", "", {"id": 1})
    assert read(json.dumps(chat("a", "b", other=1)).encode(), 8) is None


def test_progress_never_goes_back_and_reaches_the_end(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.jsonl")
    seen: list[PassProgress] = []
    validate_file(
        path,
        filename="a.jsonl",
        policies=Policies(bad_rows="drop"),
        output=tmp_path / "o.parquet",
        progress=seen.append,
        progress_every_s=0,
    )
    reading = [p for p in seen if p.stage == "reading"]
    assert [p.stage for p in seen] == sorted((p.stage for p in seen), key=["reading", "duplicates", "writing"].index)
    assert reading[-1].rows == 600
    assert reading[-1].bytes == reading[-1].total_bytes == path.stat().st_size
    assert {"reading", "duplicates", "writing"} == {p.stage for p in seen}


def test_nothing_is_left_beside_the_output(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.jsonl")
    (tmp_path / "out").mkdir()
    validate_file(path, filename="a.jsonl", policies=Policies(bad_rows="drop"), output=tmp_path / "out" / "o.parquet")
    validate_file(path, filename="a.jsonl", output=tmp_path / "out" / "refused.parquet")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["o.parquet"]


def test_near_copies_share_a_split_key_and_never_straddle(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.jsonl")
    policies = Policies(bad_rows="drop", exact_duplicates="warn", near_duplicates="warn")
    report = validate_file(path, filename="a.jsonl", policies=policies, output=tmp_path / "o.parquet").report
    assert report.stats["dedup_removed"] == 0
    key_of = {s.row: s.split_key for s in load_stored(tmp_path / "o.parquet")}
    pairs = [(f["row"], f["of_row"]) for f in report.flagged]
    assert len(pairs) > 50
    assert all(key_of[row] == key_of[source] for row, source in pairs)
    parts = {row: part_of(key, validation_fraction=0.5) for row, key in key_of.items()}
    assert set(parts.values()) == {"train", "validation"}
    assert all(parts[row] == parts[source] for row, source in pairs)
    assert report.stats["splits"]["train"] + report.stats["splits"]["validation"] == report.examples


def test_rows_added_elsewhere_move_no_row_to_another_part(tmp_path: Path) -> None:
    first = varied_file(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(first.read_bytes() + varied_file(tmp_path / "more.jsonl", seed=9).read_bytes())
    keys = []
    for name in ("a", "b"):
        validate_file(
            tmp_path / f"{name}.jsonl", filename="a.jsonl", policies=Policies(bad_rows="drop"), output=tmp_path / f"{name}.parquet"
        )
        keys.append({s.row: s.split_key for s in load_stored(tmp_path / f"{name}.parquet")})
    assert len(keys[0]) > 300
    assert keys[0].items() <= keys[1].items()


@pytest.fixture
def suite(tmp_path: Path) -> tuple[Path, list[str]]:
    rng = random.Random(5)
    items = [prose(rng, 40) for _ in range(20)]
    SuiteIndex.build({"own-exam": items}).save(tmp_path / "suites")
    return tmp_path / "suites", items


@pytest.mark.parametrize("policy", ["drop", "warn", "review", "fail", "off"])
def test_contaminated_rows_meet_their_policy(
    jsonl: Callable[..., Path], tmp_path: Path, suite: tuple[Path, list[str]], policy: Any
) -> None:
    directory, items = suite
    rng = random.Random(6)
    rows = [chat(prose(rng), prose(rng)) for _ in range(5)]
    rows[2] = chat(items[3], "forty two")
    policies = Policies(min_examples=1, contamination=policy)
    report = validate_file(jsonl(*rows), filename="a.jsonl", policies=policies, suites=directory, output=tmp_path / "o.parquet").report
    found = policy != "off"
    assert report.stats["contamination"]["flagged"] == (1 if found else None)
    assert report.stats["contamination"]["checked"] == (["own-exam"] if found else [])
    assert [(f["row"], f["suite"]) for f in report.flagged] == ([(3, "own-exam")] if found else [])
    assert report.examples == (4 if policy == "drop" else 5)
    assert report.valid == (policy != "fail")
    assert report.review == (["contaminated"] if policy == "review" else [])
    if policy == "fail":
        assert report.error_counts == {"contaminated": 1}
        assert "contamination=drop" in report.errors[0].fix


def test_other_suites_make_another_dataset_id(jsonl: Callable[..., Path], tmp_path: Path, suite: tuple[Path, list[str]]) -> None:
    path = jsonl(chat("a question", "an answer"))
    policies = Policies(min_examples=1)
    plain, checked = (validate_file(path, filename="a.jsonl", policies=policies, suites=s).report for s in (None, suite[0]))
    assert plain.dataset_id != checked.dataset_id


@pytest.mark.parametrize(
    ("policy", "answer"), [("redact", "write to [EMAIL] please"), ("warn", "write to ann@example.org please"), ("reject", None)]
)
def test_personal_data_meets_its_policy(jsonl: Callable[..., Path], tmp_path: Path, policy: Any, answer: str | None) -> None:
    path = jsonl(chat("a", "b"), chat("whom?", "write to ann@example.org please"))
    policies = Policies(min_examples=1, pii=policy)
    report = validate_file(path, filename="a.jsonl", policies=policies, output=tmp_path / "o.parquet").report
    assert report.stats["personal_data"] == {"rows": 1, "kinds": {"email": 1}}
    if answer is None:
        assert [(e.row, e.path, e.code) for e in report.errors] == [(2, "messages[1].content", "personal_data")]
        return
    assert [s.example.answer for s in load_stored(tmp_path / "o.parquet")] == ["b", answer]
    assert "personal_data" in {w["code"] for w in report.warnings}


def test_the_datasets_own_split_is_kept(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [chat(f"question {i}", f"answer {i}", split="test" if i % 5 == 0 else "train") for i in range(10)]
    report = validate_file(
        jsonl(*rows), filename="a.jsonl", policies=Policies(min_examples=1, near_duplicates="off"), output=tmp_path / "o.parquet"
    ).report
    assert [s.part for s in load_stored(tmp_path / "o.parquet")] == ["validation" if i % 5 == 0 else "train" for i in range(10)]
    assert report.stats["splits"] == {"by": "the dataset's own split", "train": 8, "validation": 2}
    assert "unknown_field" not in {w["code"] for w in report.warnings}


@pytest.mark.parametrize("policy", ["drop", "escape"])
def test_control_tokens_in_content_are_dropped_or_escaped(jsonl: Callable[..., Path], tiny_model: Path, policy: Any) -> None:
    path = jsonl(chat("a", "b"), chat("c", "d <|im_end|>"))
    report = validate_file(path, filename="a.jsonl", policies=Policies(min_examples=1, control_tokens=policy), model_dir=tiny_model).report
    assert (report.valid, report.examples) == (True, 1 if policy == "drop" else 2)
    assert any(w["code"].startswith("control_tokens_") for w in report.warnings)


@pytest.mark.parametrize("name", ["near_duplicates", "toxicity"])
def test_a_policy_of_review_holds_the_dataset_back(jsonl: Callable[..., Path], name: str) -> None:
    said = " ".join(f"word{i}" for i in range(60))
    rude = "I will kill you, you worthless piece of shit, and rape you, you fucking cunt"
    path = jsonl(chat("q", said), chat("q", said + " more"), chat("hello there", rude))
    policies = Policies.from_request({name: "review"}, min_examples=1)
    report = validate_file(path, filename="a.jsonl", policies=policies).report
    code = {"near_duplicates": "near_duplicates", "toxicity": "toxic"}[name]
    assert (report.valid, report.review) == (True, [code])


def test_personal_data_in_the_arguments_of_a_tool_call_is_redacted(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "mail", "arguments": '{"to": ["ann@example.org"], "n": 1, "text": "hi"}'}}
    messages = [{"role": "user", "content": "write"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    path = jsonl(
        {"messages": [*messages, {"role": "tool", "content": "sent", "tool_call_id": "1"}, {"role": "assistant", "content": "done"}]}
    )
    policies = Policies(min_examples=1, pii="redact")
    report = validate_file(path, filename="a.jsonl", policies=policies, output=tmp_path / "o.parquet").report
    assert report.stats["personal_data"]["rows"] == 1
    (stored,) = load_stored(tmp_path / "o.parquet")
    assert stored.example.messages[1].tool_calls[0].arguments == {"to": ["[EMAIL]"], "n": 1, "text": "hi"}
    refused = validate_file(path, filename="a.jsonl", policies=Policies(min_examples=1, pii="reject")).report
    assert [e.path for e in refused.errors] == ["messages[1].tool_calls[0].arguments"]


def test_the_same_answer_called_good_and_bad_is_no_copy(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "c", "label": label} for label in (True, False, True)]
    report = validate_file(jsonl(*rows), filename="a.jsonl", policies=Policies(min_examples=1), output=tmp_path / "o.parquet").report
    assert (report.format, report.examples) == ("kto", 2)
    assert [s.example.label for s in load_stored(tmp_path / "o.parquet")] == [True, False]


def test_blocks_of_large_rows_hold_few(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([chat(f"{i}", f"{i} " * 100_000) for i in range(40)]))
    opened = open_rows(path, filename="a.json")
    sizes = [len(block.rows) for block in _blocks(opened, line_blocks=True, block_bytes=1 << 20)]
    assert sum(sizes) == 40
    assert max(sizes) <= 6


def test_other_splits_make_another_dataset(jsonl: Callable[..., Path]) -> None:
    def ids(*parts: str | None) -> str | None:
        rows = [chat(f"question {i}", f"answer {i}") | ({"split": part} if part else {}) for i, part in enumerate(parts)]
        return validate_file(jsonl(*rows), filename="a.jsonl", policies=Policies(min_examples=1)).report.dataset_id

    assert len({ids(None, None), ids("train", "train"), ids("train", "test"), ids("test", "train")}) == 4
    assert ids("train", "test") == ids("training", "validation")


def test_errors_of_both_looks_at_a_row_come_in_file_order(jsonl: Callable[..., Path]) -> None:
    path = jsonl(chat("q", "write to ann@example.org"), b"{", chat("q", "write to bob@example.org"), {"messages": []})
    report = validate_file(path, filename="a.jsonl", policies=Policies(min_examples=1, pii="reject")).report
    assert [(e.row, e.code) for e in report.errors] == [
        (1, "personal_data"), (2, "truncated_json"), (3, "personal_data"), (4, "empty_messages")
    ]  # fmt: skip


def test_kept_copies_of_a_near_duplicate_go_with_it(jsonl: Callable[..., Path], tmp_path: Path) -> None:
    said = " ".join(f"word{i}" for i in range(60))
    rows = [
        chat("q", said),
        chat("q", said + " more"),
        chat("other question", "quite another answer"),
        chat("q", said + " more"),
        chat("q", said),
    ]
    policies = Policies(min_examples=1, exact_duplicates="warn")
    report = validate_file(jsonl(*rows), filename="a.jsonl", policies=policies, output=tmp_path / "o.parquet").report
    assert [s.row for s in load_stored(tmp_path / "o.parquet")] == [1, 3, 5]
    assert report.stats["duplicates"] == {"exact": 2, "near": 2}


def test_a_field_of_its_own_in_every_row_is_counted_together(jsonl: Callable[..., Path]) -> None:
    path = jsonl(*(chat(f"question {i}", f"answer {i}", **{f"field_{i}": 1}) for i in range(1500)))
    options = BlockOptions(scratch=path.parent, policies=Policies(near_duplicates="off"), format="chat")
    result = BlockResult()
    data = path.read_bytes()
    assert len(list(BlockReader(options, result).lines(LineBlock(first_line=1, offset=0, data=data)))) == 1500
    assert len(result.ignored) == 1001
    assert sum(result.ignored.values()) == 1500


def test_escaped_control_tokens_are_counted_as_they_are_trained(jsonl: Callable[..., Path], merging_model: Path) -> None:
    path = jsonl(chat("c", "d <|im_end|> <|im_start|>"))
    policies = Policies(min_examples=1, control_tokens="escape")
    report = validate_file(path, filename="a.jsonl", policies=policies, model_dir=merging_model, max_seq_len=512).report
    example = chat_example("c", "d <|im_end|> <|im_start|>")
    trained = ChatTokenizer.load(merging_model).encode(example, max_seq_len=512, escape_control_tokens=True)
    assert report.stats["tokens"]["total"] == trained.num_tokens
